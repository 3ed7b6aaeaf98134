"""Reads what a child process wrote last, for a person: JSON log records become plain lines. Knows files and text only."""

from __future__ import annotations

import json
import os
from pathlib import Path

_TAIL_BYTES = 16384


def tail(path: Path, lines: int = 8) -> list[str]:
    """Return the last lines of a log, as far as they lie within its last few kilobytes."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [readable(line) for line in text.splitlines() if line.strip()][-lines:]


def readable(line: str) -> str:
    """Return a JSON log record as `level: message`, with the last line of its exception; any other line as it is."""
    try:
        record = json.loads(line)
        shown = f"{record['level']}: {record['message']}"
    except (ValueError, LookupError, TypeError):
        return line
    exception = str(record.get("exception", "")).strip()
    return shown + (f" [{exception.splitlines()[-1]}]" if exception else "")


def cause(lines: list[str]) -> str:
    """Return the line that best says why a process ended: its own clear error, else the last thing it wrote."""
    for start in ("headrace: ", "critical: ", "error: "):
        for line in reversed(lines):
            if line.startswith(start):
                return line.removeprefix(start)
    return lines[-1].strip() if lines else "it wrote nothing"
