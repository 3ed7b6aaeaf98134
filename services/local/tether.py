"""Runs a command that must not outlive its parent: `python tether.py [--watch] PARENT_PID COMMAND…`. Standard library only.

A file to execute, not to import from: it costs one short interpreter start, and spares the supervisor code between fork and exec.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from types import FrameType

_PR_SET_PDEATHSIG = 1
_WATCH_SECONDS = 0.2


def exec_tethered(parent: int, command: list[str]) -> None:
    """Become `command`; Linux kills it when the parent's thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        sys.exit(1)
    for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored_by_python, signal.SIG_DFL)
    os.execvp(command[0], command)


def watch(parent: int, command: list[str]) -> int:
    """Run `command` as a child and kill it when the parent is gone: for systems without a parent-death signal."""
    child = subprocess.Popen(command)

    def forward(number: int, frame: FrameType | None) -> None:
        child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, forward)
    while child.poll() is None:
        if os.getppid() != parent:
            child.kill()
        time.sleep(_WATCH_SECONDS)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def main(arguments: list[str]) -> int:
    """Return the exit code of the command, unless this process became it."""
    by_watching = arguments[0] == "--watch" or not sys.platform.startswith("linux")
    if arguments[0] == "--watch":
        arguments = arguments[1:]
    parent, command = int(arguments[0]), arguments[1:]
    try:
        if by_watching:
            return watch(parent, command)
        exec_tethered(parent, command)
    except OSError as error:
        print(f"headrace: cannot run {command[0]}: {error.strerror or error}", file=sys.stderr)
    return 127


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
