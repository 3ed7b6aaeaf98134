"""Every Redis key, in one place. Keys are built from ids that the system minted, never from user text.

The braces are the hash tag: all keys of one tenant live on one cluster node, so a script may touch several of them.
"""

from __future__ import annotations

import re

_ID = re.compile(r"[a-z0-9-]{1,63}")
_DAY = re.compile(r"[0-9]{8}")

DEFAULT_TENANT = "default"


def usage_day(tenant: str, day: str) -> str:
    """Hash of token totals of a tenant on a `day` (yyyymmdd, UTC); its fields are those of `usage_field`."""
    if not _DAY.fullmatch(day):
        raise ValueError(f"not a day: {day[:80]!r}")
    return f"hr:usage:{{{_checked(tenant)}}}:{day}"


def usage_field(pool: str, kind: str) -> str:
    """Field of `usage_day`: `kind` is prompt, completion, cached (tokens) or requests."""
    return f"{_checked(pool)}:{_checked(kind)}"


def usage_batch(tenant: str, batch: str) -> str:
    """Marks a batch of usage as written, for as long as it might be sent again."""
    return f"hr:usage-batch:{{{_checked(tenant)}}}:{_checked(batch)}"


def _checked(token: str) -> str:
    if not _ID.fullmatch(token):
        raise ValueError(f"not an id of ours: {token[:80]!r}")
    return token
