"""Limits of the machine and of a container."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from shared.machine import free_memory, total_memory, usable_cores

MIB = 1 << 20


def test_the_machine_itself(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == len(os.sched_getaffinity(0))
    assert total_memory(tmp_path) == psutil.virtual_memory().total
    assert 0 < free_memory(tmp_path) <= total_memory(tmp_path)


def test_an_unlimited_container(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert usable_cores(tmp_path) == len(os.sched_getaffinity(0))
    assert total_memory(tmp_path) == psutil.virtual_memory().total


def test_a_limited_container(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "memory.max").write_text(f"{256 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{200 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon {100 * MIB}\ninactive_file {40 * MIB}\n")
    assert usable_cores(tmp_path) == 1
    assert total_memory(tmp_path) == 256 * MIB
    assert free_memory(tmp_path) == 96 * MIB
    (tmp_path / "memory.current").write_text(f"{300 * MIB}\n")
    assert free_memory(tmp_path) == 0
    (tmp_path / "cpu.max").write_text("20000 100000\n")
    assert usable_cores(tmp_path) == 1
