"""SIGINT, SIGTERM and SIGHUP of `headrace up`: the first asks for a stop, the second for haste, the third ends it on the spot."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(BaseException):
    """A stop was asked for inside `Interrupts.raising`. Not an Exception, so that no library swallows it."""


class Interrupts:
    """Counts the signals. Main thread only."""

    def __init__(self) -> None:
        self._count = 0
        self._raising = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup
            signal.signal(number, self._on_signal)

    @property
    def requested(self) -> bool:
        """A stop was asked for."""
        return self._count > 0

    @property
    def hurried(self) -> bool:
        """It was asked for again."""
        return self._count > 1

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Raise Interrupted from a signal that comes inside: for calls into libraries that wait long."""
        if self.requested:
            raise Interrupted
        self._raising = True
        try:
            yield
        finally:
            self._raising = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count > 2:
            os._exit(128 + number)  # the children are tethered: they go too
        if self._raising:
            self._raising = False
            raise Interrupted
