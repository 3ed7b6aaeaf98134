"""Who is alive and how full. Knows heartbeats and its own router's placements; no prefixes, no wire, no clock (times are passed in)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from services.router.placement import Load, prompt_blocks
from shared.messages import WorkerState

STALE_SECONDS = 1.5  # three missed heartbeats: not idle, but unknown
FORGET_SECONDS = 30.0  # a worker that comes back sooner keeps its place
SETTLE_SECONDS = 0.25  # from an answer to a gateway until the worker's heartbeat can be trusted to count that request

News = Literal["new", "known", "returned", "left", "stranger"]


@dataclass(frozen=True, slots=True)
class _Placement:
    placed_at: float
    new_tokens: int
    blocks: int


@dataclass(slots=True)
class _Member:
    state: WorkerState
    heard_at: float
    placements: deque[_Placement] = field(default_factory=deque)  # not in `state` yet, oldest first


class Fleet:
    """The workers heard lately. Times are seconds of any one monotonic clock."""

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}

    def hear(self, state: WorkerState, now: float) -> News:
        """Take in a heartbeat, and say whose it was; `returned` is a worker that was stale, `stranger` an unknown one that says goodbye."""
        if state.leaving:
            return "stranger" if self._members.pop(state.worker, None) is None else "left"
        member = self._members.get(state.worker)
        if member is None:
            self._members[state.worker] = _Member(state, now)
            return "new"
        news: News = "known" if self._fresh(member, now) else "returned"
        _absorb(member, state, now)
        member.state, member.heard_at = state, now
        return news

    def place(self, worker: str, prompt_tokens: int, new_tokens: int, now: float) -> None:
        """Count a request as on its way to `worker`, so that the next decision does not take the worker for as idle as it was."""
        member = self._members.get(worker)
        if member is not None:
            member.placements.append(_Placement(now, new_tokens, prompt_blocks(prompt_tokens, member.state.block_size)))

    def available(self, pool: str, now: float) -> list[Load]:
        """Return the load of each worker of `pool` that takes new prompts: fresh, healthy, and not draining."""
        return [
            _load(member)
            for member in self._members.values()
            if member.state.pool == pool
            and member.state.healthy
            and not member.state.draining
            and member.state.role != "decode"
            and self._fresh(member, now)
        ]

    def fresh(self, now: float) -> list[str]:
        """Return the workers that have been heard lately, in whatever condition they are."""
        return [worker for worker, member in self._members.items() if self._fresh(member, now)]

    def forget_silent(self, now: float) -> list[str]:
        """Drop the workers that have been silent for long, and return them."""
        silent = [worker for worker, member in self._members.items() if now - member.heard_at > FORGET_SECONDS]
        for worker in silent:
            del self._members[worker]
        return silent

    @staticmethod
    def _fresh(member: _Member, now: float) -> bool:
        return now - member.heard_at <= STALE_SECONDS


def _absorb(member: _Member, state: WorkerState, now: float) -> None:
    """Drop the placements that the heartbeat `state` already counts.

    That is every one old enough to have been pulled, and as many as the worker's sequences have grown by. Since a fresh worker beats at
    least every STALE_SECONDS, no placement outlives STALE_SECONDS + SETTLE_SECONDS, even if its request went elsewhere.
    """
    settled = sum(now - placement.placed_at >= SETTLE_SECONDS for placement in member.placements)
    grown = state.running + state.waiting - member.state.running - member.state.waiting
    for _ in range(min(max(settled, grown), len(member.placements))):
        member.placements.popleft()


def _load(member: _Member) -> Load:
    state, placements = member.state, member.placements
    batch = state.running + state.waiting + len(placements)
    return Load(
        worker=state.worker,
        block_size=state.block_size,
        batch=batch,
        free_slots=state.slots - batch,
        free_blocks=state.blocks_free - sum(placement.blocks for placement in placements),
        queued_prefill_tokens=state.queued_prefill_tokens + sum(placement.new_tokens for placement in placements),
        context_tokens=state.context_tokens,
    )
