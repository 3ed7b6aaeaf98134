"""Everything a worker says: frames and acceptances to gateways, prefix-cache events, heartbeats. Turns step reports into messages."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable

from services.worker.engine.engine import StepReport
from services.worker.engine.sequence import Progress
from shared import subjects
from shared.bus import Bus, BusUnavailable
from shared.messages import Accepted, BlockEvents, BlockSnapshot, Delta, Extras, Frame, WorkerState, encode
from shared.telemetry import WorkerMetrics

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.5
_SNAPSHOT_PART = 16_384  # hashes in one message: 300 kB


class Emitter:
    """Publishes for one worker. Reports are handled in the order in which they were made, so events and snapshots keep theirs."""

    def __init__(self, bus: Bus, worker: str, metrics: WorkerMetrics, blocks_total: int, state: Callable[[], WorkerState]) -> None:
        self._bus = bus
        self._worker = worker
        self._metrics = metrics
        self._blocks_total = blocks_total
        self._state = state
        self._events = 0
        self._outbox: asyncio.Queue[StepReport | list[bytes]] = asyncio.Queue()
        self._state_changed = asyncio.Event()

    def report(self, report: StepReport | list[bytes]) -> None:
        """Take a step report, or the hashes of a snapshot, from the event loop's thread."""
        self._outbox.put_nowait(report)

    def state_changed(self) -> None:
        """Send a heartbeat now instead of at the next beat."""
        self._state_changed.set()

    async def accepted(self, gateway: str, request: str, attempt: int) -> None:
        """Tell a gateway that its request is here.

        Raises:
            BusUnavailable: not connected.
        """
        await self._bus.publish(subjects.frames(gateway), encode(Accepted(1, self._worker, request, attempt)))

    async def send(self, step: int, progress: list[Progress]) -> None:
        """Send one frame to each gateway concerned. While the bus is away frames are lost, which the gateways notice by their indices."""
        by_gateway: dict[str, list[Delta]] = defaultdict(list)
        for one in progress:
            by_gateway[one.gateway].append(_delta(one))
        for gateway, deltas in by_gateway.items():
            await self._publish(subjects.frames(gateway), encode(Frame(1, self._worker, step, deltas)))

    async def heartbeats(self) -> None:
        """Beat until cancelled."""
        while True:
            self._state_changed.clear()
            await self.beat()
            try:
                await asyncio.wait_for(self._state_changed.wait(), HEARTBEAT_SECONDS)
            except TimeoutError:
                continue

    async def beat(self) -> None:
        """Send one heartbeat."""
        await self._publish(subjects.FLEET_STATE, encode(self._state()))

    async def run(self) -> None:
        """Publish what is reported until cancelled."""
        while True:
            report = await self._outbox.get()
            if isinstance(report, list):
                await self._send_snapshot(report)
                continue
            await self.send(report.load.step, report.progress)
            if report.stored or report.removed:
                self._events += 1
                events = BlockEvents(1, self._worker, self._events, report.stored, report.removed)
                await self._publish(subjects.fleet_blocks(self._worker), encode(events))
            self._measure(report)

    async def _send_snapshot(self, hashes: list[bytes]) -> None:
        parts = [hashes[i : i + _SNAPSHOT_PART] for i in range(0, len(hashes), _SNAPSHOT_PART)] or [[]]
        for i, part in enumerate(parts):
            message = BlockSnapshot(1, self._worker, self._events, i, len(parts), part)
            await self._publish(subjects.fleet_blocks(self._worker), encode(message))

    async def _publish(self, subject: str, payload: bytes) -> None:
        try:
            await self._bus.publish(subject, payload)
        except BusUnavailable as error:
            log.debug("lost a message to %s: %s", subject, error)

    def _measure(self, report: StepReport) -> None:
        metrics, load = self._metrics, report.load
        metrics.running.set(load.running)
        metrics.waiting.set(load.waiting)
        metrics.kv_utilisation.set(1 - load.blocks_free / self._blocks_total)
        metrics.cached_blocks.set(load.blocks_cached)
        metrics.refused.inc(sum(one.finish == "error" for one in report.progress))
        if report.batch_size:
            metrics.batch_size.observe(report.batch_size)
            (metrics.step_prefill if report.prefill_tokens else metrics.step_decode).observe(report.seconds)
            metrics.prefill_tokens.inc(report.prefill_tokens)
            metrics.decode_tokens.inc(report.decode_tokens)
            metrics.prefix_query_tokens.inc(report.prefix_query_tokens)
            metrics.prefix_hit_tokens.inc(report.prefix_hit_tokens)
            metrics.preemptions.inc(report.preempted)


def _delta(one: Progress) -> Delta:
    extras = Extras(
        cached_tokens=one.cached_tokens,
        queue_seconds=one.queue_seconds,
        logprobs=one.logprobs,
        prompt_from=one.scored_from,
        prompt_logprobs=one.scored,
        error=one.error,
    )
    return Delta(one.request, one.attempt, one.index, one.tokens, one.finish, None if extras == _NOTHING else extras)


_NOTHING = Extras()
