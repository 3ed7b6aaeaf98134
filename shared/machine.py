"""What this machine, or the container (cgroup v2) that it is seen from, lets a process use. Knows the operating system only."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Return how many cores this process may use at once: those it may be scheduled on, or fewer if its time on them is limited."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file, or "max"
        return cores


def total_memory(cgroup: Path = _CGROUP) -> int:
    """Return the bytes of memory that there are for this process at most."""
    total = int(psutil.virtual_memory().total)
    limit = _number(cgroup / "memory.max")
    return total if limit is None else min(total, limit)


def free_memory(cgroup: Path = _CGROUP) -> int:
    """Return the bytes of memory that this process could take now; what only caches files counts as free."""
    free = int(psutil.virtual_memory().available)
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if limit is None or used is None:
        return free
    return max(0, min(free, limit - used + _file_cache(cgroup / "memory.stat")))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _file_cache(path: Path) -> int:
    try:
        facts = dict(line.split() for line in path.read_text().splitlines())
        return int(facts["inactive_file"])
    except (OSError, ValueError, LookupError):
        return 0
