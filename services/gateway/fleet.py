"""The workers of a pool as one gateway hears them. Pure: the clock is passed in."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

from shared.messages import WorkerState

FORGET_SECONDS = 60.0
UNHEALTHY_FACTOR = 5  # a worker that still beats but says it is unwell gets so many times the silence limit


@dataclass(slots=True)
class _Worker:
    heard_at: float
    well_at: float
    state: WorkerState | None  # None: known from its frames only


class Fleet:
    """Last signs of life and last heartbeat of each worker."""

    def __init__(self, pool: str, silence_seconds: float, clock: Callable[[], float]) -> None:
        self._pool = pool
        self._silence_seconds = silence_seconds
        self._clock = clock
        self._workers: dict[str, _Worker] = {}
        self._left: dict[str, float] = {}  # goodbyes: ids are never used again

    def beat(self, state: WorkerState) -> None:
        """Take a heartbeat."""
        if state.pool != self._pool or state.worker in self._left:
            return
        now = self._clock()
        known = self._workers.get(state.worker)
        well_at = now if state.healthy or known is None else known.well_at
        self._workers[state.worker] = _Worker(now, well_at, state)

    def heard(self, worker: str) -> None:
        """Note a frame or an acceptance."""
        if worker in self._left:
            return
        now = self._clock()
        known = self._workers.get(worker)
        if known is None:
            self._workers[worker] = _Worker(now, now, None)
        else:
            known.heard_at = now

    def left(self, worker: str) -> None:
        """Note a goodbye, or a death."""
        self._workers.pop(worker, None)
        self._left[worker] = self._clock()

    def forgive(self) -> None:
        """Start all silences anew: it was this gateway that could not hear."""
        now = self._clock()
        for worker in self._workers.values():
            worker.heard_at = worker.well_at = now

    def lost(self, worker: str) -> bool:
        """Whether a worker has to be taken for dead."""
        known = self._workers.get(worker)
        if known is None:
            return True
        now = self._clock()
        return now - known.heard_at > self._silence_seconds or now - known.well_at > UNHEALTHY_FACTOR * self._silence_seconds

    def alive(self) -> list[WorkerState]:
        """Return the workers that may be given work."""
        now = self._clock()
        return [
            worker.state
            for worker in self._workers.values()
            if worker.state is not None
            and worker.state.healthy
            and not worker.state.draining
            and now - worker.heard_at <= self._silence_seconds
        ]

    def least_loaded(self, excluded: Container[str]) -> str | None:
        """Return the worker with the least to do that is not excluded."""
        candidates = [state for state in self.alive() if state.worker not in excluded]
        best = min(candidates, key=lambda state: (state.running + state.waiting, state.queued_prefill_tokens), default=None)
        return best.worker if best is not None else None

    def context_tokens(self) -> int | None:
        """Return the longest prompt + output that a live worker can hold, None when none was heard."""
        return max((state.context_tokens for state in self.alive() if state.context_tokens > 0), default=None)

    def block_size(self) -> int | None:
        """Return the block size of the pool, None when no worker was heard."""
        return next((state.block_size for state in self.alive()), None)

    def forget_old(self) -> None:
        """Drop what is of no more use, so that the memory stays bounded."""
        oldest = self._clock() - FORGET_SECONDS
        self._workers = {id: worker for id, worker in self._workers.items() if worker.heard_at > oldest}
        self._left = {id: at for id, at in self._left.items() if at > oldest}
