"""What `headrace up` shows: spinners on a terminal, plain lines elsewhere. Standard output gets the result, standard error the rest."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import rich.console
import rich.markup
from rich.status import Status

_PLAIN_NOTE_SECONDS = 10.0


class Step:
    """One thing in progress."""

    def __init__(self, title: str, status: Status | None) -> None:
        self._title = title
        self._status = status
        self._noted_at = time.monotonic()

    def note(self, text: str, fraction: float | None = None) -> None:
        """Say how far it is; off a terminal at most every few seconds."""
        line = f"{self._title}: {text}" if text else self._title
        if fraction is not None:
            line += f" ({fraction:.0%})"
        if self._status is not None:
            self._status.update(rich.markup.escape(line))
        elif time.monotonic() - self._noted_at >= _PLAIN_NOTE_SECONDS:
            self._noted_at = time.monotonic()
            _write(f"headrace: {line}")


class Console:
    """Writes to a terminal or a file, and never fails because the terminal went away."""

    def __init__(self) -> None:
        self._rich = rich.console.Console(stderr=True, highlight=False)

    @contextmanager
    def step(self, title: str) -> Iterator[Step]:
        """Show `title` as in progress, then as done with its duration; an exception shows nothing more."""
        started_at = time.monotonic()
        if self._rich.is_terminal:
            with self._rich.status(rich.markup.escape(title)) as status:
                yield Step(title, status)
            with contextlib.suppress(OSError):
                self._rich.print(f"[green]✓[/] {rich.markup.escape(title)} [dim]{time.monotonic() - started_at:.1f} s[/]")
        else:
            _write(f"headrace: {title} …")
            yield Step(title, None)
            _write(f"headrace: {title}: done in {time.monotonic() - started_at:.1f} s")

    def say(self, line: str) -> None:
        """Show something worth knowing."""
        _write(f"headrace: {line}")

    def quote(self, lines: list[str]) -> None:
        """Show what another process wrote."""
        for line in lines:
            _write(f"    {line}")

    def result(self, line: str) -> None:
        """Print to standard output, unwrapped, so that it can be copied or piped."""
        print(line, flush=True)


def _write(line: str) -> None:
    with contextlib.suppress(OSError):  # a closed terminal must not keep the processes from being stopped
        print(line, file=sys.stderr, flush=True)
