"""The step loop, in a thread of its own so that no event loop ever waits for a step: plan, run, commit.

Requests and cancellations come in through a queue and are taken up between steps; results go out through one callback per step.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from services.worker.engine.scheduler import NeverFits, Scheduler
from services.worker.engine.sequence import Progress, Sequence, StepOutput, StepPlan

log = logging.getLogger(__name__)

_IDLE_BEAT_SECONDS = 0.2
_RATE_MEMORY = 0.9  # weight of the past in the measured rates, per step


class StepRunner(Protocol):
    """What the engine needs of a runner."""

    def run(self, plan: StepPlan) -> StepOutput:
        """Return what `plan` asks for."""


@dataclass(frozen=True, slots=True)
class Load:
    """The engine's state after a step; `taken` counts submissions it has taken up, so that a submitter knows what is still on its way."""

    step: int = 0
    taken: int = 0
    running: int = 0
    waiting: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    queued_prefill_tokens: int = 0
    prefill_tokens_per_second: float = 0.0
    decode_tokens_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class StepReport:
    """One turn of the loop: progress of requests, changes of the prefix cache, the load, and what there is to measure."""

    progress: list[Progress]
    stored: list[bytes]
    removed: list[bytes]
    load: Load
    seconds: float = 0.0  # of the step; 0 when the turn only took up cancellations
    batch_size: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preempted: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Cancel:
    request: str
    attempt: int


@dataclass(frozen=True, slots=True)
class _Snapshot:
    reply: Callable[[list[bytes]], None]


class Engine:
    """`report` is called from the engine's thread after every turn that changed something; it must not block."""

    def __init__(self, scheduler: Scheduler, runner: StepRunner, report: Callable[[StepReport], None]) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._report = report
        self._inbox: queue.SimpleQueue[Sequence | _Cancel | _Snapshot | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self._beat = time.monotonic()
        self._taken = self._steps = 0
        self._prefill_rate = self._decode_rate = 0.0
        self.failed = False
        self.load = Load(blocks_free=scheduler.pool.free)

    def start(self) -> None:
        """Start the loop."""
        self._thread.start()

    def stop(self, timeout_seconds: float = 5.0) -> None:
        """End the loop after the current step."""
        self._inbox.put(None)
        self._thread.join(timeout_seconds)

    def submit(self, sequence: Sequence) -> None:
        """Add a sequence at the next step. Its fate is reported, including that it can never fit."""
        self._inbox.put(sequence)

    def cancel(self, request: str, attempt: int) -> None:
        """End attempts of `request` up to `attempt` and free their blocks before the next step."""
        self._inbox.put(_Cancel(request, attempt))

    def snapshot(self, reply: Callable[[list[bytes]], None]) -> None:
        """Call `reply`, from the engine's thread and in order with the reports, with the hashes of all cached blocks."""
        self._inbox.put(_Snapshot(reply))

    def seconds_since_beat(self) -> float:
        """Time since the loop last came around: a step that hangs, or a dead thread, makes it grow."""
        return time.monotonic() - self._beat

    def _loop(self) -> None:
        worked = False
        try:
            while True:
                self._beat = time.monotonic()
                progress: list[Progress] = []
                if not self._take_up(progress):
                    break
                worked = worked or self._scheduler.has_work
                if self._scheduler.has_work:
                    self._step(progress)
                elif progress:
                    self._send(StepReport(progress, *self._scheduler.pool.take_events(), self._load()))
                if worked and not self._scheduler.has_work:
                    self._scheduler.check()
                    worked = False
        except Exception:
            log.exception("the engine's step failed")
            self.failed = True
            lost = [self._scheduler.end(sequence, "error", "worker_failed") for sequence in self._scheduler.sequences()]
            self._send(StepReport(lost, [], [], self._load()))

    def _step(self, progress: list[Progress]) -> None:
        """One step of the continuous batch."""
        scheduler, began = self._scheduler, time.monotonic()
        queries, hits = scheduler.prefix_query_tokens, scheduler.prefix_hit_tokens
        plan = scheduler.plan()
        now = time.time()
        for entry in plan.entries:
            if entry.sequence.queue_seconds is None:
                entry.sequence.queue_seconds = max(0.0, now - entry.sequence.wall_arrival)
        output = self._runner.run(plan)
        progress += scheduler.commit(plan, output)
        seconds = time.monotonic() - began
        decodes = sum(entry.count == 1 for entry in plan.entries)
        self._measure(seconds, plan.tokens - decodes, decodes)
        self._send(
            StepReport(
                progress,
                *scheduler.pool.take_events(),
                self._load(),
                seconds=seconds,
                batch_size=len(plan.entries),
                prefill_tokens=plan.tokens - decodes,
                decode_tokens=len(output.draws),
                preempted=plan.preempted,
                prefix_query_tokens=scheduler.prefix_query_tokens - queries,
                prefix_hit_tokens=scheduler.prefix_hit_tokens - hits,
            )
        )

    def _take_up(self, progress: list[Progress]) -> bool:
        """Take everything that has come in; wait for something when there is nothing to run. False: stop."""
        block = not self._scheduler.has_work
        while True:
            try:
                item = self._inbox.get(block, _IDLE_BEAT_SECONDS if block else None)
            except queue.Empty:
                return True
            block = False
            match item:
                case None:
                    return False
                case Sequence():
                    self._add(item, progress)
                case _Cancel():
                    sequence = self._scheduler.find(item.request)
                    if sequence is not None and sequence.attempt <= item.attempt:
                        progress.append(self._scheduler.end(sequence, "cancelled"))
                case _Snapshot():
                    # events so far go first, so that the snapshot stands exactly after them
                    self._send(StepReport([], *self._scheduler.pool.take_events(), self._load()))
                    item.reply(self._scheduler.pool.hashes())

    def _add(self, sequence: Sequence, progress: list[Progress]) -> None:
        self._taken += 1
        try:
            self._scheduler.add(sequence)
        except NeverFits:
            progress.append(
                Progress(sequence.request, sequence.attempt, sequence.gateway, sequence.output_length, [], "error", "kv_capacity")
            )

    def _measure(self, seconds: float, prefill: int, decodes: int) -> None:
        self._steps += 1
        if prefill > decodes:  # a step mostly of one kind tells that kind's rate
            self._prefill_rate = _blend(self._prefill_rate, prefill / seconds)
        elif decodes:
            self._decode_rate = _blend(self._decode_rate, decodes / seconds)

    def _load(self) -> Load:
        scheduler = self._scheduler
        return Load(
            step=self._steps,
            taken=self._taken,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            blocks_free=scheduler.pool.free,
            blocks_cached=scheduler.pool.cached,
            queued_prefill_tokens=scheduler.queued_prefill_tokens,
            prefill_tokens_per_second=self._prefill_rate,
            decode_tokens_per_second=self._decode_rate,
        )

    def _send(self, report: StepReport) -> None:
        self.load = report.load
        self._report(report)


def _blend(old: float, new: float) -> float:
    return new if not old else _RATE_MEMORY * old + (1 - _RATE_MEMORY) * new
