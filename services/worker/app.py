"""The worker process: loads a model, builds the engine, and connects it to the bus."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from functools import partial

from services.worker.emitter import Emitter
from services.worker.engine.engine import Engine, StepReport
from services.worker.engine.scheduler import order
from services.worker.engine.sequence import Progress, Sequence
from services.worker.intake import Intake, expired
from services.worker.loading import ConfigurationError, EngineParts, build
from services.worker.models.description import UnsupportedModel
from shared import model_files, subjects
from shared.bus import Bus, BusUnavailable, Delivery
from shared.messages import (
    Cancel,
    Finish,
    GatewayState,
    MessageError,
    SnapshotRequest,
    WorkerState,
    WorkRequest,
    decode_fleet_state,
    decode_to_worker,
)
from shared.settings import Settings
from shared.telemetry import WorkerMetrics, serve_metrics, set_up_logging

log = logging.getLogger(__name__)

_HUNG_SECONDS = 30.0  # a step loop that has not come around for so long is not coming back


def run(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit code: 0 after a clean stop, 1 when the engine failed, 2 when it could not start."""
    set_up_logging("worker", settings.log_level, settings.log_format)
    try:
        return asyncio.run(Worker(settings, build(settings)).serve())
    except (model_files.ModelError, UnsupportedModel, BusUnavailable, ConfigurationError, OSError) as error:
        log.error("%s", error)
        return 2


class Worker:
    """One worker id, from ready to goodbye."""

    def __init__(self, settings: Settings, parts: EngineParts) -> None:
        self._settings = settings
        self._scheduler = parts.scheduler
        self._vocabulary = parts.description.vocabulary
        self._pool = parts.folder.pool
        self.id = subjects.mint("w")
        self._metrics = WorkerMetrics(self._pool)
        self._loop = asyncio.new_event_loop()  # replaced in serve()
        self.engine = Engine(parts.scheduler, parts.runner, self._report)
        self._submitted = 0
        self._live: dict[str, tuple[int, str]] = {}  # request -> attempt and gateway, of what the engine has or is about to get
        self._gateways: dict[str, float] = {}  # gateway -> when it was last heard
        self._typical_blocks = 16.0  # per request, a running mean
        self._draining = self._leaving = False
        self._stop = asyncio.Event()

    async def serve(self) -> int:
        """Run until a signal or a failure of the engine; see `run`."""
        settings = self._settings
        self._loop = asyncio.get_running_loop()
        self._bus = bus = await Bus.connect(settings.nats_url, self.id)
        self._emitter = Emitter(bus, self.id, self._metrics, self._scheduler.pool.size, self.state)
        self._intake = Intake(bus, self._pool, self.id, self.room, self._accept)
        await bus.subscribe(subjects.control(self.id), self._on_control)
        await bus.subscribe(subjects.FLEET_STATE, self._on_fleet_state)
        await self._ensure_queue()
        bus.on_reconnect(self._ensure_queue)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop.set)
        metrics = serve_metrics(self._metrics.registry, settings.host, settings.metrics_port, self.healthy)
        self.engine.start()
        intake = asyncio.create_task(self._intake.run())
        helpers = [asyncio.create_task(one) for one in (self._emitter.run(), self._emitter.heartbeats(), self._watch())]
        log.info("ready: worker %s of pool %s, metrics on port %d", self.id, self._pool, metrics.server_address[1])
        stop = asyncio.create_task(self._stop.wait())
        await asyncio.wait([stop, intake, *helpers], return_when=asyncio.FIRST_COMPLETED)
        for task in (intake, *helpers):
            if task.done():
                log.error("a task of the worker ended early", exc_info=task.exception())
        failed = self.engine.failed or not stop.done()
        await self._leave(intake, failed)
        for task in helpers:
            task.cancel()
        metrics.shutdown()
        await bus.close()
        return 1 if failed else 0

    async def _leave(self, intake: asyncio.Task[None], failed: bool) -> None:
        """Take no more work, let what runs finish within the grace period, and say goodbye: gateways continue the rest elsewhere."""
        self._draining = True
        self._intake.stop()
        self._emitter.state_changed()
        give_up_at = time.monotonic() + (0 if failed else self._settings.drain_seconds)
        while (self._live or not intake.done()) and time.monotonic() < give_up_at and not self.engine.failed:  # noqa: ASYNC110  # three facts
            await asyncio.sleep(0.02)
        await self._bus.drop_consumers(self._pool, self.id)
        await asyncio.to_thread(self.engine.stop)
        await asyncio.sleep(0.05)  # the last frames go before the goodbye
        self._leaving = True
        await self._emitter.beat()

    async def _ensure_queue(self) -> None:
        await self._bus.ensure_work_stream(self._settings.queue_depth)
        await self._bus.ensure_consumers(self._pool, self.id)

    # what the engine says

    def _report(self, report: StepReport) -> None:
        """Called from the engine's thread."""
        self._loop.call_soon_threadsafe(self._on_report, report)

    def _on_report(self, report: StepReport) -> None:
        self._emitter.report(report)
        for one in report.progress:
            if one.finish and self._live.get(one.request, (-1, ""))[0] == one.attempt:
                del self._live[one.request]
        if report.prefill_tokens or any(one.finish for one in report.progress):
            self._intake.wake()
        if report.preempted:
            self._emitter.state_changed()
        if self.engine.failed:
            self._emitter.state_changed()
            self._stop.set()

    def healthy(self) -> bool:
        """Whether the step loop is beating."""
        return not self.engine.failed and self.engine.seconds_since_beat() < _HUNG_SECONDS

    def state(self) -> WorkerState:
        """Return the heartbeat as of now."""
        load, on_its_way = self.engine.load, self._submitted - self.engine.load.taken
        return WorkerState(
            version=1,
            worker=self.id,
            pool=self._pool,
            role="both",
            block_size=self._scheduler.pool.block_size,
            blocks_total=self._scheduler.pool.size,
            blocks_free=load.blocks_free,
            running=load.running,
            waiting=load.waiting + on_its_way,
            slots=self._scheduler.slots,
            queued_prefill_tokens=load.queued_prefill_tokens,
            context_tokens=self._scheduler.context_tokens,
            prefill_tokens_per_second=load.prefill_tokens_per_second,
            decode_tokens_per_second=load.decode_tokens_per_second,
            step=load.step,
            healthy=self.healthy(),
            draining=self._draining,
            leaving=self._leaving,
        )

    # what comes in

    def room(self) -> int:
        """How many more requests could start now: free slots and KV blocks, and no long prefill already waiting for its turn."""
        if self._draining or not self.healthy():
            return 0
        load = self.engine.load
        ahead = load.waiting + self._submitted - load.taken
        if load.queued_prefill_tokens > 2 * self._scheduler.step_tokens:
            return 0
        room = min(self._scheduler.slots - load.running, int(load.blocks_free / self._typical_blocks)) - ahead
        idle = load.running + ahead == 0
        return max(room, 1) if idle else room  # whatever does not fit into an empty pool must be refused, not left in the queue

    async def _accept(self, request: WorkRequest, delivery: Delivery) -> None:
        """Say `accepted` first and acknowledge after: whatever dies between, the request is either known to its gateway or still queued."""
        attempt, _ = self._live.get(request.request, (-1, ""))
        if request.attempt <= attempt:  # delivered twice
            await self._bus.acknowledge(delivery)
            return
        try:
            await self._emitter.accepted(request.gateway, request.request, request.attempt)
            await self._bus.acknowledge(delivery)
        except BusUnavailable:
            return  # it will be delivered again
        if expired(request):
            await self._refuse(request, "expired", None)
        elif max(request.tokens) >= self._vocabulary or request.prompt_length > len(request.tokens):
            await self._refuse(request, "error", "invalid")
        else:
            if attempt >= 0:
                self.engine.cancel(request.request, attempt)
            self._live[request.request] = (request.attempt, request.gateway)
            self._gateways.setdefault(request.gateway, time.monotonic())
            self._submitted += 1
            blocks = (request.prompt_length + min(request.max_tokens, 512)) / self._scheduler.pool.block_size
            self._typical_blocks += (blocks - self._typical_blocks) / 16
            self.engine.submit(
                Sequence(
                    request=request.request,
                    attempt=request.attempt,
                    gateway=request.gateway,
                    tokens=request.tokens,
                    prompt_length=request.prompt_length,
                    max_tokens=request.max_tokens,
                    sampling=request.sampling,
                    salt=request.salt,
                    order=order(request.priority, time.monotonic()),
                    wall_arrival=request.arrived_at,
                )
            )

    async def _refuse(self, request: WorkRequest, finish: Finish, error: str | None) -> None:
        index = len(request.tokens) - request.prompt_length
        self._metrics.refused.inc()
        await self._emitter.send(0, [Progress(request.request, request.attempt, request.gateway, max(0, index), [], finish, error)])

    async def _on_control(self, payload: bytes, _reply: str) -> None:
        match self._decoded(decode_to_worker, payload):
            case Cancel() as cancel:
                self.engine.cancel(cancel.request, cancel.attempt)
            case SnapshotRequest():
                report = self._emitter.report
                self.engine.snapshot(lambda hashes: _call_soon(self._loop, partial(report, hashes)))

    async def _on_fleet_state(self, payload: bytes, _reply: str) -> None:
        match self._decoded(decode_fleet_state, payload):
            case GatewayState(gateway=gateway, leaving=False):
                self._gateways[gateway] = time.monotonic()
            case GatewayState(gateway=gateway):
                self._gateways[gateway] = 0.0

    @staticmethod
    def _decoded(decode: object, payload: bytes) -> object:
        try:
            return decode(payload)  # type: ignore[operator]
        except MessageError as error:
            log.warning("dropped a message: %s", error)
            return None

    async def _watch(self) -> None:
        """Drop the work of gateways that are gone: nobody would read its tokens."""
        while True:
            await asyncio.sleep(0.5)
            lease = time.monotonic() - self._settings.gateway_lease_seconds
            for request, (attempt, gateway) in list(self._live.items()):
                if self._gateways.get(gateway, 0.0) < lease:
                    self.engine.cancel(request, attempt)
            self._gateways = {gateway: heard for gateway, heard in self._gateways.items() if heard >= lease - 60}


def _call_soon(loop: asyncio.AbstractEventLoop, call: partial[None]) -> None:
    loop.call_soon_threadsafe(call)
