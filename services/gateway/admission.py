"""Into the queue: where a request goes, how long it may wait there, and when it is refused."""

from __future__ import annotations

import asyncio
import contextlib
import time

from services.gateway.relay import Relay
from services.gateway.request import Failure, OpenRequest
from shared import messages, subjects
from shared.bus import Bus, BusUnavailable, QueueFull
from shared.hashing import block_hashes
from shared.messages import MAX_MESSAGE_BYTES, MessageError, RouteRequest
from shared.settings import Settings

HEADER_BYTES = 1024  # room for NATS headers beside a payload
RETRY_SECONDS = 0.25  # between tries to queue an admitted request again
MAX_HASHES = 32_768
_OFF_LOOP_TOKENS = 8192
_GRACE_SECONDS = 0.5  # after the deadline, for a worker that took the request at the last moment to say so
_SMOOTHING = 0.1


class TooLarge(Exception):
    """The request does not fit into one message."""


class Admission:
    """Queues requests and watches over them until a worker accepts them."""

    def __init__(self, bus: Bus, relay: Relay, settings: Settings, pool: str) -> None:
        self._bus = bus
        self._relay = relay
        self._settings = settings
        self._pool = pool
        self._queue_seconds = 0.0  # smoothed

    def waited(self, seconds: float) -> None:
        """Learn how long a request waited in the queue, for `Retry-After`."""
        self._queue_seconds += _SMOOTHING * (seconds - self._queue_seconds)

    def retry_after_seconds(self) -> float:
        """Return when a refused client should try again."""
        return min(max(self._queue_seconds, 1.0), 30.0)

    def submit(self, request: OpenRequest, *, patient: bool = False) -> None:
        """Queue a new request, in a task that a disconnect does not cancel: it must be known whether the message is in the queue.

        A refusal is immediate, and is the request's end (`request.failure`); a `patient` request, one of a response that has begun,
        waits for room instead.
        """
        self._relay.add(request)
        self._relay.spawn(self.resume(request) if patient else self._submit(request), request)

    async def _submit(self, request: OpenRequest) -> None:
        attempt, failure = request.attempt, None
        try:
            await self._place(request)
        except QueueFull:
            failure = Failure("queue_full", self.retry_after_seconds())
        except BusUnavailable:
            failure = Failure("unavailable", self.retry_after_seconds())
        except TooLarge:
            failure = Failure("too_large")
        if failure is not None and request.attempt == attempt:  # else a reconnection has queued it again meanwhile
            self._relay.fail(request, failure)

    async def resume(self, request: OpenRequest) -> None:
        """Queue the live attempt of a request that is not to be shed: it waits for room until its deadline."""
        attempt = request.attempt
        give_up_at = time.monotonic() + self._settings.queue_seconds
        while request.ending is None and request.attempt == attempt:
            try:
                await self._place(request)
                return
            except TooLarge:
                self._relay.fail(request, Failure("too_large"))
                return
            except (QueueFull, BusUnavailable):
                if time.monotonic() >= give_up_at:
                    self._relay.fail(request, Failure("timeout", self.retry_after_seconds()))
                    return
                await asyncio.sleep(RETRY_SECONDS)

    async def _place(self, request: OpenRequest) -> None:
        """Queue the live attempt on the best worker's own subject, or on the shared one.

        Raises:
            QueueFull: there is no room.
            BusUnavailable: NATS is away.
            TooLarge: it does not fit into one message.
        """
        if not self._bus.connected:
            raise BusUnavailable("not connected")
        attempt = request.attempt
        request.deadline = time.monotonic() + self._settings.queue_seconds
        worker = await self._choose(request)
        if request.attempt != attempt or request.ending is not None:
            return
        if worker is not None:
            with contextlib.suppress(QueueFull):  # then anyone may take it
                await self._enqueue(request, worker)
                return
            if request.attempt != attempt or request.ending is not None:
                return
        await self._enqueue(request, None)

    async def _choose(self, request: OpenRequest) -> str | None:
        alive, block_size = self._relay.fleet.alive(), self._relay.fleet.block_size()
        if len(alive) < 2 or block_size is None:
            return None
        tokens = request.job.prompt + request.tokens
        if len(tokens) > _OFF_LOOP_TOKENS:
            hashes = await asyncio.to_thread(block_hashes, request.job.salt, tokens, block_size)
        else:
            hashes = block_hashes(request.job.salt, tokens, block_size)
        question = RouteRequest(
            version=1, pool=self._pool, prompt_tokens=len(tokens), hashes=hashes[:MAX_HASHES], excluded=request.excluded
        )
        answer = await self._bus.request(subjects.ROUTE, messages.encode(question), self._settings.route_seconds)
        with contextlib.suppress(MessageError):
            if answer is not None and (worker := messages.decode_route_reply(answer).worker) is not None:
                known = any(state.worker == worker for state in alive)
                return worker if known and worker not in request.excluded else None
        # The shared queue would let a worker that lost this request take it again.
        return self._relay.fleet.least_loaded(request.excluded) if request.excluded else None

    async def _enqueue(self, request: OpenRequest, worker: str | None) -> None:
        attempt, priority = request.attempt, request.job.priority
        start_by = time.time() + request.deadline - time.monotonic()
        payload = messages.encode(request.work(self._relay.gateway, self._pool, start_by))
        if len(payload) + HEADER_BYTES > MAX_MESSAGE_BYTES:
            raise TooLarge
        subject = subjects.own_work(self._pool, priority, worker) if worker else subjects.shared_work(self._pool, priority)
        sequence = await self._bus.enqueue(subject, payload, f"{request.id}.{attempt}")
        if request.ending is not None or request.attempt != attempt:
            await self._bus.remove(sequence)  # nobody waits for it any more
            return
        request.sequence, request.placed_on = sequence, worker
        if not request.accepted.is_set():
            self._relay.spawn(self._watch(request, attempt), request)

    async def _watch(self, request: OpenRequest, attempt: int) -> None:
        """Wait for the acceptance of one attempt: first of the worker it was placed on, then of any, then no longer."""
        accepted = request.accepted
        if request.attempt != attempt:
            return
        if request.placed_on is not None and not await _within(accepted, self._settings.patience_seconds):
            await self._share(request, attempt)
            return
        if await _within(accepted, request.deadline - time.monotonic()):
            return
        if request.sequence is None or not await self._bus.remove(request.sequence):
            await _within(accepted, _GRACE_SECONDS)
        if request.attempt == attempt and request.worker is None:
            self._relay.fail(request, Failure("timeout", self.retry_after_seconds()))

    async def _share(self, request: OpenRequest, attempt: int) -> None:
        """Move a request that its worker does not pull to the shared queue, under a new attempt number."""
        sequence, worker = request.sequence, request.placed_on
        if sequence is None or not await self._bus.remove(sequence):
            await _within(request.accepted, _GRACE_SECONDS)  # the worker seems to have it already
        if request.attempt != attempt or request.worker is not None or request.ending is not None:
            return
        deadline = request.deadline
        self._relay.metrics.resumes.labels("impatience").inc()
        if worker is not None:
            self._relay.cancel(worker, request.id, attempt)
        request.begin_attempt()
        request.deadline = deadline
        try:
            await self._enqueue(request, None)
        except (QueueFull, BusUnavailable):
            await self.resume(request)


async def _within(event: asyncio.Event, seconds: float) -> bool:
    if event.is_set():
        return True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(seconds, 0)):
            await event.wait()
    return event.is_set()
