"""Child processes: started tethered to this one, restarted with back-off, stopped in order. Knows commands, not what they serve.

Everything here runs on the main thread: on Linux a child dies with the thread that started it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from services.local.backoff import Backoff
from services.local.logs import tail

_TETHER = Path(__file__).with_name("tether.py")
_POLL_SECONDS = 0.02
LONGEST_LOG_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Command:
    """What to run. Children of a lower `stop_order` are stopped, and have ended, before the next ones are asked to."""

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    stop_order: int
    grace_seconds: float
    directory: Path | None = None


@dataclass(frozen=True, slots=True)
class Exit:
    """A child that ended by itself. `reason` is its exit code or signal in words, `tail` the last lines that it wrote."""

    name: str
    reason: str
    tail: list[str]
    restart_seconds: float


@dataclass(slots=True)
class _Child:
    command: Command
    log: Path
    backoff: Backoff = field(default_factory=Backoff)
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    restart_at: float = 0.0


class Supervisor:
    """Owns the children from `start` until `stop` or `kill`."""

    def __init__(self, logs: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._logs = logs
        self._clock = clock
        self._children: dict[str, _Child] = {}

    def start(self, command: Command) -> None:
        """Start a child; its output goes to `<logs>/<name>.log`, emptied first (the last run's is kept as `.log.1`).

        Raises:
            OSError: the log cannot be written, or no process can be started.
        """
        child = self._children[command.name] = _Child(command, self._logs / f"{command.name}.log")
        if child.log.exists():
            child.log.replace(_older(child.log))
        self._spawn(child)

    def pid(self, name: str) -> int | None:
        """The process of a child, or None while it waits for its restart."""
        process = self._children[name].process
        return process.pid if process is not None else None

    def log(self, name: str) -> Path:
        """The file that a child's output goes to."""
        return self._children[name].log

    def poll(self) -> list[Exit]:
        """Reap what has ended, restart what has waited long enough, and return the new exits. Never waits."""
        now = self._clock()
        exits = []
        for child in self._children.values():
            if child.process is None:
                if now >= child.restart_at:
                    self._spawn(child)
            elif (code := child.process.poll()) is not None:
                _signal_group(child.process.pid, signal.SIGKILL)  # what it started dies with it
                child.process = None
                delay = child.backoff.after_run(now - child.started_at)
                child.restart_at = now + delay
                exits.append(Exit(child.command.name, describe_exit(code), tail(child.log), delay))
        return exits

    def trim_logs(self) -> None:
        """Move the content of each log that has grown too long to its `.log.1`. Children append, so they notice nothing."""
        for child in self._children.values():
            with contextlib.suppress(OSError):
                if child.log.stat().st_size > LONGEST_LOG_BYTES:
                    _older(child.log).write_bytes(child.log.read_bytes())
                    os.truncate(child.log, 0)

    def stop(self, hurry: Callable[[], bool] = lambda: False) -> list[str]:
        """End every child, in order: SIGTERM, its grace period, SIGKILL. Returns the names of those that had to be killed.

        As soon as `hurry()` is true, everything is killed at once.
        """
        killed: list[str] = []
        for order in sorted({child.command.stop_order for child in self._children.values()}):
            group = [child for child in self._running() if child.command.stop_order == order]
            for child in group:
                _signal_process(child, signal.SIGTERM)
            asked_at = self._clock()
            while (left := [child for child in group if child.process is not None and child.process.poll() is None]) and not hurry():
                late = [child for child in left if self._clock() - asked_at > child.command.grace_seconds]
                killed += [child.command.name for child in late]
                self._end(late)
                time.sleep(_POLL_SECONDS)
            if left:
                killed += [child.command.name for child in self._running()]
                break
            self._end(group)
        self.kill()
        return killed

    def kill(self) -> None:
        """End every child at once."""
        self._end(self._running())

    def _running(self) -> list[_Child]:
        return [child for child in self._children.values() if child.process is not None]

    def _end(self, children: Iterable[_Child]) -> None:
        """Kill the children's process groups and reap them."""
        children = list(children)
        for child in children:
            if child.process is not None:
                _signal_group(child.process.pid, signal.SIGKILL)
                _signal_process(child, signal.SIGKILL)  # it may not lead its group yet
        for child in children:
            if child.process is not None:
                child.process.wait()
                child.process = None

    def _spawn(self, child: _Child) -> None:
        command = child.command
        with os.fdopen(os.open(child.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as output:
            child.process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_TETHER), str(os.getpid()), *command.argv],
                env=dict(command.environment),
                cwd=command.directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C in the terminal reaches the supervisor alone, which stops them in order
            )
        child.started_at = self._clock()


def describe_exit(code: int) -> str:
    """Say in words what an exit code of `subprocess` means."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _older(log: Path) -> Path:
    return log.with_name(log.name + ".1")


def _signal_process(child: _Child, number: signal.Signals) -> None:
    if child.process is not None:
        child.process.send_signal(number)  # does nothing when it has ended


def _signal_group(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS answers the latter for a group of zombies
        os.killpg(pid, number)
