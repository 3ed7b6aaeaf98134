"""Every NATS subject, in one place. A subject is built from ids that the system minted, never from user text (rule of the protocol)."""

from __future__ import annotations

import re
import secrets

from shared.messages import Priority

_ID = re.compile(r"[a-z0-9-]{1,63}")

ROUTE = "hr.route"
ROUTERS = "routers"  # queue group of ROUTE
FLEET_STATE = "hr.fleet.state"
ALL_FLEET_BLOCKS = "hr.fleet.blocks.*"
WORK_STREAM = "WORK"
ALL_WORK = "hr.work.>"


def mint(prefix: str) -> str:
    """Return a new id that is valid in a subject, such as `w-3f9a0c1d5e7b`."""
    return _checked(f"{prefix}-{secrets.token_hex(6)}")


def slug(name: str) -> str:
    """Return the id under which a model named `name` is served (its pool): lower case, other characters as hyphens."""
    return _checked(re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:63].strip("-"))


def shared_work(pool: str, priority: Priority) -> str:
    """The queue that every worker of a pool pulls from."""
    return f"hr.work.{_checked(pool)}.{priority}"


def own_work(pool: str, priority: Priority, worker: str) -> str:
    """The queue of requests placed on one worker."""
    return f"hr.work.{_checked(pool)}.{priority}.{_checked(worker)}"


def frames(gateway: str) -> str:
    """Token frames and acceptances for one gateway."""
    return f"hr.frames.{_checked(gateway)}"


def control(worker: str) -> str:
    """Cancellations and snapshot requests for one worker."""
    return f"hr.control.{_checked(worker)}"


def fleet_blocks(worker: str) -> str:
    """Prefix-cache events and snapshots of one worker."""
    return f"hr.fleet.blocks.{_checked(worker)}"


def shared_consumer(pool: str, priority: Priority) -> str:
    """Name of the durable consumer behind `shared_work`."""
    return f"{_checked(pool)}_{priority}"


def own_consumer(pool: str, priority: Priority, worker: str) -> str:
    """Name of the consumer behind `own_work`."""
    return f"{_checked(pool)}_{priority}_{_checked(worker)}"


def _checked(token: str) -> str:
    if not _ID.fullmatch(token):
        raise ValueError(f"not an id of ours: {token[:80]!r}")
    return token
