"""The state directory of `headrace up`: its secrets, its lock, its space. Knows files only, no processes and no network."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from shared.settings import default_state_dir

LEAST_FREE_BYTES = 64 << 20


class LaunchError(Exception):
    """Why `headrace up` cannot start or go on, in one line for the person at the terminal."""


def prepare(directory: Path) -> Path:
    """Create the state directory for its owner alone and return its absolute path.

    Raises:
        LaunchError: it cannot be written, or its disk is full.
    """
    directory = directory.expanduser().absolute()
    try:
        created = not directory.exists()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if created or directory == default_state_dir():  # a directory that somebody else shares on purpose keeps its mode
            directory.chmod(0o700)
        (directory / "logs").mkdir(mode=0o700, exist_ok=True)
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise LaunchError(f"cannot use the state directory {directory}: {error.strerror or error}") from None
    if free < LEAST_FREE_BYTES:
        raise LaunchError(f"no space left for {directory}: {free >> 20} MiB free, {LEAST_FREE_BYTES >> 20} needed")
    return directory


def new_api_key() -> str:
    """Return a new key `hr_<id>.<secret>` whose secret has 256 random bits."""
    return f"hr_{secrets.token_hex(6)}.{secrets.token_urlsafe(32)}"


def new_secret() -> str:
    """Return 256 random bits as text."""
    return secrets.token_urlsafe(32)


def kept_secret(path: Path, make: Callable[[], str]) -> str:
    """Return the secret in `path`; on first use make it. The file is readable by its owner alone, and whole or absent.

    Raises:
        LaunchError: the file is empty.
        OSError: it cannot be read or written.
    """
    try:
        value = path.read_text().strip()
    except FileNotFoundError:
        value = make()
        write_private(path, value + "\n")
        return value
    if not value:
        raise LaunchError(f"{path} is empty; delete it and a new one is made")
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        path.chmod(0o600)
    return value


def write_private(path: Path, text: str) -> None:
    """Write a file of mode 0600, replacing it in one step."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


class Lock:
    """Held by the one `headrace up` of a state directory; the system frees it however that process ends."""

    def __init__(self, directory: Path) -> None:
        """Take the lock.

        Raises:
            LaunchError: another process has it.
        """
        self._file = (directory / "lock").open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip() or "unknown"
            self._file.close()
            raise LaunchError(
                f"another `headrace up` (process {holder}) uses {directory}; stop it, or give this one another --state-dir and --port"
            ) from None
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def release(self) -> None:
        """Let another process have it."""
        self._file.close()
