"""The router process: NATS in, NATS out. Feeds the fleet, the prefix index and the placement; decides nothing itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from services.router.fleet import Fleet
from services.router.placement import Decision, choose
from services.router.prefix_index import PrefixIndex
from shared import subjects
from shared.bus import Bus, BusUnavailable
from shared.messages import (
    BlockEvents,
    MessageError,
    RouteReply,
    RouteRequest,
    SnapshotRequest,
    WorkerState,
    decode_block_news,
    decode_fleet_state,
    decode_route_request,
    encode,
)
from shared.settings import Settings
from shared.telemetry import RouterMetrics, serve_metrics, set_up_logging

log = logging.getLogger(__name__)

TICK_SECONDS = 0.1
EXPECT_SECONDS = 5.0  # how long a placed prompt's blocks count as cached unless events confirm them; each follower renews it
FIRST_RETRY_SECONDS = 0.5  # of a snapshot request; doubles up to the last
LAST_RETRY_SECONDS = 8.0
STALLED_SECONDS = 2.0  # a loop that has not ticked for so long is unhealthy


@dataclass(slots=True)
class _Asking:
    """An unanswered need for a worker's snapshot."""

    next_at: float
    wait_seconds: float = FIRST_RETRY_SECONDS


class Router:
    """The state of one router, and its handlers: one call at a time, all on one event loop."""

    def __init__(self, bus: Bus, metrics: RouterMetrics, *, source: Random, clock: Callable[[], float] = time.monotonic) -> None:
        self._bus = bus
        self._metrics = metrics
        self._random = source
        self._clock = clock
        self._fleet = Fleet()
        self._index = PrefixIndex()
        self._asking: dict[str, _Asking] = {}
        self._ticked_at = clock()

    async def start(self) -> None:
        """Subscribe to everything; advice is given from now on."""
        self._bus.on_reconnect(self.on_reconnect)
        await self._bus.subscribe(subjects.FLEET_STATE, self.on_fleet_state)
        await self._bus.subscribe(subjects.ALL_FLEET_BLOCKS, self.on_block_news)
        await self._bus.subscribe(subjects.ROUTE, self.on_route, queue=subjects.ROUTERS)
        await self._bus.flush()

    @property
    def healthy(self) -> bool:
        """Whether NATS is connected and the event loop is turning. Safe to read from another thread."""
        return self._bus.connected and self._clock() - self._ticked_at < STALLED_SECONDS

    async def on_fleet_state(self, payload: bytes, _reply: str) -> None:
        """A heartbeat."""
        try:
            state = decode_fleet_state(payload)
        except MessageError as error:
            self._malformed(error)
            return
        if not isinstance(state, WorkerState):
            return
        news = self._fleet.hear(state, self._clock())
        if news == "left":
            self._forget(state.worker)
            log.info("worker %s left", state.worker)
        elif news == "new":
            log.info("worker %s joined %s", state.worker, state.pool)
            self._index.add(state.worker, state.blocks_total)
            await self._ask_for_snapshot(state.worker)
        elif news == "returned":
            log.info("worker %s is back", state.worker)
            self._index.doubt(state.worker)
            await self._ask_for_snapshot(state.worker)

    async def on_block_news(self, payload: bytes, _reply: str) -> None:
        """Cache events or a part of a snapshot."""
        try:
            news = decode_block_news(payload)
        except MessageError as error:
            self._malformed(error)
            return
        if isinstance(news, BlockEvents):
            if self._index.apply(news):
                self._metrics.gaps.inc()
                log.warning("worker %s: a gap before block event %d", news.worker, news.sequence)
                await self._ask_for_snapshot(news.worker)
        elif self._index.apply_snapshot(news):
            self._asking.pop(news.worker, None)

    async def on_route(self, payload: bytes, reply: str) -> None:
        """A gateway's question. A malformed one gets no answer: the gateway does without."""
        try:
            request = decode_route_request(payload)
        except MessageError as error:
            self._malformed(error)
            return
        started = time.perf_counter()
        decision = self.decide(request)
        self._metrics.seconds.observe(time.perf_counter() - started)
        self._metrics.decisions.labels(decision.reason).inc()
        self._metrics.matched_tokens.inc(decision.matched_tokens)
        if reply:
            answer = RouteReply(1, decision.worker, decision.matched_tokens)
            with contextlib.suppress(BusUnavailable):
                await self._bus.publish(reply, encode(answer))

    def decide(self, request: RouteRequest) -> Decision:
        """Choose, and count the choice as load and as cached until the worker's own reports do."""
        now = self._clock()
        loads = self._fleet.available(request.pool, now)
        matched = self._index.matched_blocks(request.hashes)
        confirmed = self._index.confirmed_blocks(request.hashes) if matched else matched
        decision = choose(request, loads, matched, confirmed, self._random)
        if decision.worker is not None:
            self._fleet.place(decision.worker, request.prompt_tokens, decision.new_tokens, now)
            self._index.expect(decision.worker, request.hashes, now + EXPECT_SECONDS)
        return decision

    async def on_reconnect(self) -> None:
        """While disconnected any news may have been missed, the last one of a worker too, which no later one would reveal."""
        for worker in self._index.workers():
            self._index.doubt(worker)
            self._asking.pop(worker, None)
            await self._ask_for_snapshot(worker)

    async def tick(self) -> None:
        """Do what is due: forget, expire, ask again, publish the gauges."""
        now = self._ticked_at = self._clock()
        for worker in self._fleet.forget_silent(now):
            self._forget(worker)
            log.info("worker %s forgotten: silent", worker)
        self._index.expire(now)
        fresh = self._fleet.fresh(now)
        for worker in fresh:
            await self._ask_for_snapshot(worker)
        self._metrics.workers.set(len(fresh))
        self._metrics.indexed_blocks.set(self._index.blocks)

    async def _ask_for_snapshot(self, worker: str) -> None:
        """Ask an out-of-step worker, unless it was asked a moment ago."""
        if not self._index.needs_snapshot(worker):
            self._asking.pop(worker, None)
            return
        now = self._clock()
        asking = self._asking.setdefault(worker, _Asking(now))
        if now < asking.next_at:
            return
        asking.next_at = now + asking.wait_seconds
        asking.wait_seconds = min(2 * asking.wait_seconds, LAST_RETRY_SECONDS)
        with contextlib.suppress(BusUnavailable):
            await self._bus.publish(subjects.control(worker), encode(SnapshotRequest(1)))

    def _forget(self, worker: str) -> None:
        self._index.remove(worker)
        self._asking.pop(worker, None)

    def _malformed(self, error: MessageError) -> None:
        self._metrics.malformed.inc()
        log.warning("dropped: %s", error)


def run(settings: Settings) -> int:
    """Run a router until SIGTERM or SIGINT. Returns the exit code: 0, or 1 when it could not start."""
    set_up_logging("router", settings.log_level, settings.log_format)
    return asyncio.run(_serve(settings))


async def _serve(settings: Settings) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    stopped = asyncio.create_task(stop.wait())
    work = asyncio.create_task(_work(settings))
    await asyncio.wait({stopped, work}, return_when=asyncio.FIRST_COMPLETED)
    if work.done():
        stopped.cancel()
        return work.result()
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work
    log.info("stopped")
    return 0


async def _work(settings: Settings) -> int:
    try:
        bus = await Bus.connect(settings.nats_url, "router")
    except BusUnavailable as error:
        log.error("%s", error)
        return 1
    metrics = RouterMetrics()
    router = Router(bus, metrics, source=random.Random())
    try:
        server = serve_metrics(metrics.registry, settings.host, settings.metrics_port, lambda: router.healthy)
    except OSError as error:
        log.error("metrics port %d: %s", settings.metrics_port, error.strerror)
        await bus.close()
        return 1
    try:
        await router.start()
        log.info("ready", extra={"fields": {"metrics_port": server.server_address[1]}})
        while True:
            await router.tick()
            await asyncio.sleep(TICK_SECONDS)
    except BusUnavailable as error:
        log.error("%s", error)
        return 1
    finally:
        await bus.close()
        await asyncio.to_thread(server.shutdown)
