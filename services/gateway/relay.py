"""Frames to open requests: matches, orders and ends them, notices lost workers, and moves their requests elsewhere.

The history of every request is kept simple here: contiguous indices, one live attempt, exactly one end.

A worker's finish "error" carries a code: "kv_capacity" (it can never hold the request), "invalid" (it cannot make sense of it) and
"not_finite" (the model's logits are NaN or infinite, as they would be anywhere) end the request; "worker_failed" and any other mean that
the worker gave up, and the request goes on elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import os
import signal
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Literal

from services.gateway.fleet import Fleet
from services.gateway.request import Failure, OpenRequest
from shared import messages, subjects
from shared.bus import Bus, BusUnavailable
from shared.messages import Accepted, Cancel, Delta, GatewayState, MessageError, WorkerState
from shared.telemetry import GatewayMetrics

log = logging.getLogger(__name__)

TICK_SECONDS = 0.2
BEAT_SECONDS = 1.0
OUTAGE_SECONDS = 8.0  # open requests end with an error when NATS stays away for so long
RECANCEL_SECONDS = 1.0
_REMEMBERED_CANCELS = 10_000

Resume = Callable[[OpenRequest], Awaitable[None]]


def _end_process(task: asyncio.Task[None]) -> None:
    """Half a gateway is worse than none: what supervises this process starts it again."""
    if not task.cancelled():
        log.critical("a loop of the relay broke", exc_info=task.exception())
        os.kill(os.getpid(), signal.SIGTERM)


class Relay:
    """All open requests of one gateway."""

    def __init__(self, bus: Bus, gateway: str, fleet: Fleet, metrics: GatewayMetrics, max_resumes: int) -> None:
        self._bus = bus
        self.gateway = gateway
        self.fleet = fleet
        self.metrics = metrics
        self._max_resumes = max_resumes
        self._open: dict[str, OpenRequest] = {}
        self._cancelled: OrderedDict[tuple[str, str, int], float] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loops: list[asyncio.Task[None]] = []
        self._resume: Resume | None = None
        self._down_since: float | None = None
        self._ignored = {
            reason: metrics.frames_ignored.labels(reason) for reason in ("unknown_request", "old_attempt", "repeat", "gap", "malformed")
        }

    async def start(self, resume: Resume) -> None:
        """Listen to workers. `resume` queues a request's live attempt again, or ends the request.

        Raises:
            BusUnavailable: NATS is away.
        """
        self._resume = resume
        await self._bus.subscribe(subjects.frames(self.gateway), self._on_to_gateway)
        await self._bus.subscribe(subjects.FLEET_STATE, self._on_fleet_state)
        await self._bus.flush()
        self._bus.on_reconnect(self._on_reconnect)
        loop = asyncio.get_running_loop()
        self._loops = [loop.create_task(self._beat()), loop.create_task(self._watch())]
        for task in self._loops:
            task.add_done_callback(_end_process)

    async def stop(self) -> None:
        """End what is open, say goodbye to the workers, and stop listening."""
        for task in self._loops:
            task.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        self.fail_all(Failure("shutting_down"))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2)  # the last cancellations go out
        with contextlib.suppress(BusUnavailable):
            await self._bus.publish(subjects.FLEET_STATE, messages.encode(GatewayState(version=1, gateway=self.gateway, leaving=True)))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def spawn(self, work: Coroutine[Any, Any, None], request: OpenRequest | None = None) -> None:
        """Run `work` in a task that this relay owns: no client's disconnect cancels it. If it breaks, so does `request`: nobody hangs."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._on_done, request))

    def _on_done(self, request: OpenRequest | None, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background task failed", exc_info=error)
            if request is not None:
                self.fail(request, Failure("internal"))

    @property
    def open_requests(self) -> int:
        """Requests between admission and their end."""
        return len(self._open)

    # the life of a request

    def add(self, request: OpenRequest) -> None:
        """Expect frames for this request, from before it is queued."""
        self._open[request.id] = request

    def close(self, request: OpenRequest) -> None:
        """The response is over, whether the request is or not: stop its work wherever it is. Never blocks."""
        if self._end(request, "cancelled"):
            self.withdraw(request)

    def finish(self, request: OpenRequest, ending: Literal["stop", "length"]) -> None:
        """End a request here, because the gateway saw its end (a stop string), and stop its work."""
        if self._end(request, ending):
            self.withdraw(request)

    def fail(self, request: OpenRequest, failure: Failure) -> None:
        """End a request without success, and stop its work."""
        if self._end(request, "failed", failure):
            self.withdraw(request)

    def fail_all(self, failure: Failure) -> None:
        """End every open request without success."""
        for request in list(self._open.values()):
            self.fail(request, failure)

    def withdraw(self, request: OpenRequest) -> None:
        """Stop the live attempt: at the worker that has it, or in the queue. What slips through is cancelled when it shows up."""
        if request.worker is not None:
            self.cancel(request.worker, request.id, request.attempt)
        elif request.sequence is not None:
            self.spawn(self._remove(request.sequence))

    async def _remove(self, sequence: int) -> None:
        await self._bus.remove(sequence)

    def _end(self, request: OpenRequest, ending: Literal["stop", "length", "cancelled", "failed"], failure: Failure | None = None) -> bool:
        self._open.pop(request.id, None)
        return request.end(ending, failure)

    def cancel(self, worker: str, request: str, attempt: int) -> None:
        """Tell a worker to stop a request up to this attempt: once, and again only if it goes on all the same."""
        key, now = (worker, request, attempt), time.monotonic()
        if now - self._cancelled.get(key, -math.inf) < RECANCEL_SECONDS:
            return
        self._cancelled[key] = now
        if len(self._cancelled) > _REMEMBERED_CANCELS:
            self._cancelled.popitem(last=False)
        self.spawn(self._send_cancel(worker, request, attempt))

    async def _send_cancel(self, worker: str, request: str, attempt: int) -> None:
        try:
            await self._bus.publish(subjects.control(worker), messages.encode(Cancel(version=1, request=request, attempt=attempt)))
        except BusUnavailable:
            self._cancelled.pop((worker, request, attempt), None)  # its next frame tries again

    # what workers say

    async def _on_to_gateway(self, payload: bytes, _reply: str) -> None:
        try:
            message = messages.decode_to_gateway(payload)
        except MessageError as error:
            self._ignored["malformed"].inc()
            log.warning("frame: %s", error)
            return
        self.fleet.heard(message.worker)
        if isinstance(message, Accepted):
            self._on_accepted(message)
        else:
            for delta in message.deltas:
                self._on_delta(message.worker, delta)

    def _on_accepted(self, message: Accepted) -> None:
        request = self._live(message.worker, message.request, message.attempt, ended=False)
        if request is not None and request.worker is None:
            request.accept(message.worker)

    def _live(self, worker: str, id: str, attempt: int, *, ended: bool) -> OpenRequest | None:
        """Return the open request whose live attempt this is; else have the sender cancelled, unless it `ended` anyway."""
        request = self._open.get(id)
        if request is None:
            reason = "unknown_request"
        elif attempt < request.attempt or request.worker not in (None, worker):  # a redelivery may run twice: the first counts
            reason = "old_attempt"
        elif attempt > request.attempt:
            reason = "malformed"
        else:
            return request
        self._ignored[reason].inc()
        if not ended:
            self.cancel(worker, id, attempt)
        return None

    def _on_delta(self, worker: str, delta: Delta) -> None:
        request = self._live(worker, delta.request, delta.attempt, ended=delta.finish is not None)
        if request is None:
            return
        have, end = len(request.tokens), delta.index + len(delta.tokens)
        gave_up = delta.finish in ("cancelled", "expired", "error") and not delta.tokens  # then its index does not matter
        if delta.index > have and not gave_up:
            self._ignored["gap"].inc()
            self.lose(request)
            return
        if (end < have or (delta.index < have and end == have and delta.finish is None)) and not gave_up:
            self._ignored["repeat"].inc()
            return
        tokens = delta.tokens[have - delta.index :] if delta.index < have else delta.tokens
        if request.worker is None and delta.finish not in ("expired", "error"):
            request.accept(worker)
        request.append(tokens, delta.extras)
        if delta.finish is not None:
            self._on_finish(request, worker, delta)

    def _on_finish(self, request: OpenRequest, worker: str, delta: Delta) -> None:
        error = delta.extras.error if delta.extras is not None else None
        match delta.finish, error:
            case ("stop" | "length") as ending, _:
                self._end(request, ending)
            case "expired", _:
                self._end(request, "failed", Failure("timeout"))
            case "error", "kv_capacity":
                self._end(request, "failed", Failure("kv_capacity"))
            case "error", "invalid":
                log.error("%s refused %s as invalid", worker, request.id)
                self._end(request, "failed", Failure("invalid"))
            case "error", "not_finite":
                log.error("%s: the logits of %s are not finite", worker, request.id)
                self._end(request, "failed", Failure("internal"))
            case "cancelled", _:  # not by us, or it would not be open: the worker drains
                self.lose(request)
            case _:
                log.warning("%s gave up %s: %s", worker, request.id, error)
                self.lose(request, worker)

    async def _on_fleet_state(self, payload: bytes, _reply: str) -> None:
        try:
            state = messages.decode_fleet_state(payload)
        except MessageError as error:
            log.warning("fleet state: %s", error)
            return
        if not isinstance(state, WorkerState):
            return
        if state.leaving:
            self._lose_worker(state.worker)
        else:
            self.fleet.beat(state)

    # loss and resumption

    def lose(self, request: OpenRequest, worker: str | None = None) -> None:
        """The live attempt is lost: go on elsewhere from the last token, not on `worker`. Ends the request after too many times."""
        self.withdraw(request)
        ending = request.complete()
        if ending in ("stop", "length"):
            self._end(request, ending)
        elif request.resumes >= self._max_resumes:
            self._end(request, "failed", Failure("worker_lost"))
        else:
            request.resumes += 1
            if worker is not None:
                request.excluded = [*request.excluded, worker][-64:]
            self.metrics.resumes.labels("worker_lost").inc()
            self._requeue(request)

    def _requeue(self, request: OpenRequest) -> None:
        request.begin_attempt()
        if self._resume is not None:
            self.spawn(self._run_resume(self._resume, request), request)

    async def _run_resume(self, resume: Resume, request: OpenRequest) -> None:
        await resume(request)

    def _lose_worker(self, worker: str) -> None:
        self.fleet.left(worker)
        for request in list(self._open.values()):
            if request.worker == worker:
                self.lose(request, worker)

    async def _watch(self) -> None:
        expected = time.monotonic() + TICK_SECONDS
        beats = 0
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            if now - expected > 1.0:  # this process stood still; the workers may have spoken all the while
                self.fleet.forgive()
            expected = now + TICK_SECONDS
            if not self._bus.connected:
                self._down_since = self._down_since or now
                if now - self._down_since > OUTAGE_SECONDS:
                    self.fail_all(Failure("unavailable", 5.0))
                continue
            if self._down_since is not None:
                self._down_since = None
                self.fleet.forgive()
            for worker in {request.worker for request in self._open.values() if request.worker is not None}:
                if self.fleet.lost(worker):
                    log.warning("%s is silent: its requests go elsewhere", worker)
                    self._silence(worker)
            beats += 1
            if beats % 100 == 0:
                self.fleet.forget_old()

    def _silence(self, worker: str) -> None:
        """A silent worker's requests go on elsewhere. Unlike after a goodbye, it may come back."""
        for request in list(self._open.values()):
            if request.worker == worker:
                self.lose(request, worker)

    async def _on_reconnect(self) -> None:
        """What was sent while we were away is lost, and a restarted server has an empty queue with new sequence numbers."""
        self.fleet.forgive()
        self._down_since = None
        for request in list(self._open.values()):
            request.sequence = None  # it may name another's message now
            if request.worker is not None:
                self.cancel(request.worker, request.id, request.attempt)
            self._requeue(request)

    async def _beat(self) -> None:
        payload = messages.encode(GatewayState(version=1, gateway=self.gateway))
        while True:
            with contextlib.suppress(BusUnavailable):
                await self._bus.publish(subjects.FLEET_STATE, payload)
            await asyncio.sleep(BEAT_SECONDS)
