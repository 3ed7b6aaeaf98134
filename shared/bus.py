"""The NATS connection: core messages, the bounded work queue, and pulls from it. The only module that knows NATS."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import nats
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import api

from shared import subjects
from shared.messages import PRIORITIES, Priority

log = logging.getLogger(__name__)

ACK_WAIT_SECONDS = 5.0  # a delivery that no worker acknowledged by then goes to another
QUEUE_MAX_AGE_SECONDS = 600.0  # janitor of requests whose gateway died; live gateways remove theirs much earlier
API_TIMEOUT_SECONDS = 5.0
_PULL_GRACE_SECONDS = 0.5  # a pull outlives its expiry by so much before it is taken for lost in a broker restart
_ERR_STREAM_NAME_IN_USE = 10058
_ERR_SUBJECT_FULL = 10077
_FAILURES = (nats.errors.Error, OSError)  # a time-out is an OSError too


class BusUnavailable(ConnectionError):
    """NATS cannot be reached, or did not answer in time."""


class QueueFull(Exception):
    """The work subject holds as many messages as it may."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message pulled from the work queue; it comes back to another worker unless `Bus.acknowledge` is called in time."""

    payload: bytes
    ack_subject: str


@dataclass(slots=True)
class _Pull:
    wanted: int
    reply: str
    received: list[Delivery] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class _Inbox:
    """A subscription that serves one pull at a time: a delivery names its queue subject, so only the subscription tells whose it is."""

    subject: str
    count: int = 0
    pull: _Pull | None = None


class Bus:
    """One process's connection. Reconnects for ever; while disconnected every send raises BusUnavailable instead of buffering silently."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._js = client.jetstream(timeout=API_TIMEOUT_SECONDS)
        self._free_inboxes: list[_Inbox] = []
        self._reconnected: list[Callable[[], Awaitable[None]]] = []

    @classmethod
    async def connect(cls, url: str, name: str, *, patience_seconds: float = 10.0) -> Bus:
        """Connect as client `name`.

        Raises:
            BusUnavailable: no server answered at `url` within `patience_seconds`.
        """
        client = Client()
        bus = cls(client)

        last_error: Exception | None = None

        async def on_error(error: Exception) -> None:
            nonlocal last_error
            last_error = error
            log.warning("nats: %s", error or type(error).__name__)

        async def on_disconnect() -> None:
            if not client.is_closed:
                log.warning("nats: disconnected")

        async def on_reconnect() -> None:
            log.info("nats: reconnected")
            for callback in bus._reconnected:
                await callback()

        try:
            # the library itself tries again for ever
            async with asyncio.timeout(patience_seconds):
                await client.connect(
                    url,
                    name=name,
                    error_cb=on_error,
                    disconnected_cb=on_disconnect,
                    reconnected_cb=on_reconnect,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=0.25,  # type: ignore[arg-type]  # the library sleeps for it; a float is fine
                    connect_timeout=2,
                    ping_interval=5,
                    max_outstanding_pings=2,
                    pending_size=-1,
                )
        except _FAILURES as error:
            await client.close()
            where = url.rsplit("@", 1)[-1]  # without a password
            reason = last_error or error
            raise BusUnavailable(f"cannot reach NATS at {where}: {str(reason) or type(reason).__name__}") from None
        return bus

    @property
    def connected(self) -> bool:
        """Whether a server is connected right now."""
        return self._client.is_connected

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Call `callback` after each reconnection: a restarted server has forgotten streams held in memory."""
        self._reconnected.append(callback)

    async def close(self) -> None:
        """Flush what was sent and disconnect."""
        with contextlib.suppress(*_FAILURES):
            if self._client.is_connected:
                await self._client.flush(timeout=2)
        await self._client.close()

    # core messages

    async def publish(self, subject: str, payload: bytes, reply: str = "") -> None:
        """Send at most once.

        Raises:
            BusUnavailable: not connected.
        """
        try:
            await self._client.publish(subject, payload, reply)
        except (nats.errors.Error, OSError) as error:
            raise BusUnavailable(str(error) or type(error).__name__) from None

    async def flush(self) -> None:
        """Wait until the server has processed everything sent so far.

        Raises:
            BusUnavailable: not connected, or no answer.
        """
        try:
            await self._client.flush(timeout=2)
        except _FAILURES as error:
            raise BusUnavailable(str(error) or type(error).__name__) from None

    async def request(self, subject: str, payload: bytes, timeout_seconds: float) -> bytes | None:
        """Ask whoever serves `subject`; None when nobody answers in time."""
        try:
            return (await self._client.request(subject, payload, timeout=timeout_seconds)).data
        except _FAILURES:
            return None

    async def subscribe(self, subject: str, handler: Callable[[bytes, str], Awaitable[None]], *, queue: str = "") -> None:
        """Call `handler(payload, reply_subject)` for each message, one at a time and in order."""

        async def deliver(message: Msg) -> None:
            try:
                await handler(message.data, message.reply)
            except Exception:  # one bad message must not end the subscription
                log.exception("handler of %s failed", subject)

        await self._client.subscribe(subject, queue=queue, cb=deliver, pending_msgs_limit=1 << 20, pending_bytes_limit=1 << 28)

    # the work queue

    async def ensure_work_stream(self, depth: int, replicas: int = 1) -> None:
        """Create the WORK stream, or give an existing one this `depth` (messages per subject).

        Raises:
            BusUnavailable: NATS is away or has no JetStream.
        """
        config = api.StreamConfig(
            name=subjects.WORK_STREAM,
            subjects=[subjects.ALL_WORK],
            retention=api.RetentionPolicy.WORK_QUEUE,
            storage=api.StorageType.MEMORY,
            discard=api.DiscardPolicy.NEW,
            discard_new_per_subject=True,
            max_msgs_per_subject=depth,
            max_age=QUEUE_MAX_AGE_SECONDS,
            duplicate_window=60,
            num_replicas=replicas,
        )
        try:
            try:
                await self._js.add_stream(config)
            except nats.js.errors.APIError as error:
                if error.err_code != _ERR_STREAM_NAME_IN_USE:
                    raise
                await self._js.update_stream(config)
        except _FAILURES as error:
            raise BusUnavailable(f"work stream: {error or type(error).__name__}") from None

    async def ensure_consumers(self, pool: str, worker: str) -> None:
        """Create the consumers that `worker` pulls from: the pool's shared ones and its own.

        Raises:
            BusUnavailable: NATS is away.
        """
        try:
            for priority in PRIORITIES:
                await self._add_consumer(subjects.shared_consumer(pool, priority), subjects.shared_work(pool, priority), None)
                await self._add_consumer(subjects.own_consumer(pool, priority, worker), subjects.own_work(pool, priority, worker), 30.0)
        except _FAILURES as error:
            raise BusUnavailable(f"consumers of {pool}: {error or type(error).__name__}") from None

    async def drop_consumers(self, pool: str, worker: str) -> None:
        """Delete the worker's own consumers (it is leaving)."""
        for priority in PRIORITIES:
            with contextlib.suppress(*_FAILURES):
                await self._js.delete_consumer(subjects.WORK_STREAM, subjects.own_consumer(pool, priority, worker))

    async def _add_consumer(self, name: str, subject: str, inactive_seconds: float | None) -> None:
        await self._js.add_consumer(
            subjects.WORK_STREAM,
            api.ConsumerConfig(
                durable_name=name,
                filter_subject=subject,
                ack_policy=api.AckPolicy.EXPLICIT,
                ack_wait=ACK_WAIT_SECONDS,
                inactive_threshold=inactive_seconds,
                mem_storage=True,
            ),
        )

    async def enqueue(self, subject: str, payload: bytes, message_id: str) -> int:
        """Put a request into the work queue and return its stream sequence, by which `remove` finds it.

        Raises:
            QueueFull: the subject holds its limit of messages.
            BusUnavailable: NATS is away, or nobody has created the stream yet.
        """
        headers = {api.Header.MSG_ID.value: message_id}
        try:
            ack = await self._js.publish(subject, payload, headers=headers)
        except nats.js.errors.ServiceUnavailableError as error:
            if error.err_code == _ERR_SUBJECT_FULL:
                raise QueueFull(subject) from None
            raise BusUnavailable(str(error)) from None
        except _FAILURES as error:
            raise BusUnavailable(str(error) or type(error).__name__) from None
        return ack.seq

    async def remove(self, sequence: int) -> bool:
        """Take a queued request back. False when a worker already has it, or it could not be told."""
        try:
            return await self._js.delete_msg(subjects.WORK_STREAM, sequence)
        except _FAILURES:
            return False

    async def pull(self, consumer: str, count: int, wait_seconds: float) -> list[Delivery]:
        """Take up to `count` queued requests: at once if `wait_seconds` is 0, else wait so long for the first ones.

        Returns an empty list when there is none, also while NATS is away. Nothing is ever prefetched beyond `count`.
        """
        inbox = self._free_inboxes.pop() if self._free_inboxes else await self._open_inbox()
        inbox.count += 1
        pull = inbox.pull = _Pull(count, f"{inbox.subject}.{inbox.count}")
        wanted: dict[str, object] = {"batch": count}
        if wait_seconds > 0:
            wanted["expires"] = int(wait_seconds * 1e9)
        else:
            wanted["no_wait"] = True
        try:
            subject = f"$JS.API.CONSUMER.MSG.NEXT.{subjects.WORK_STREAM}.{consumer}"
            await self._client.publish(subject, json.dumps(wanted).encode(), pull.reply)
            async with asyncio.timeout(wait_seconds + _PULL_GRACE_SECONDS):  # not wait_for: in Python 3.11 it may swallow a cancellation
                await pull.done.wait()
        except _FAILURES:
            await asyncio.sleep(0 if self.connected else 0.1)
        finally:
            inbox.pull = None
            self._free_inboxes.append(inbox)
        return pull.received

    async def _open_inbox(self) -> _Inbox:
        inbox = _Inbox(self._client.new_inbox())

        async def on_pulled(message: Msg) -> None:
            pull = inbox.pull
            if message.headers and "Status" in message.headers and not message.reply:  # 404, 408 or 409: this pull is over
                if pull is not None and message.subject == pull.reply:
                    pull.done.set()
            elif pull is None or len(pull.received) == pull.wanted:  # it came after we gave up on its pull: hand it on at once
                await self.publish(message.reply, b"-NAK")
            else:
                pull.received.append(Delivery(message.data, message.reply))
                if len(pull.received) == pull.wanted:
                    pull.done.set()

        await self._client.subscribe(f"{inbox.subject}.*", cb=on_pulled)
        return inbox

    async def acknowledge(self, delivery: Delivery) -> None:
        """Remove a delivered request from the queue.

        Raises:
            BusUnavailable: not connected; the request will be delivered again.
        """
        await self.publish(delivery.ack_subject, b"+ACK")


def work_consumers(pool: str, worker: str, priority: Priority) -> tuple[str, str]:
    """Return the names of the consumers that `worker` pulls requests of `priority` from: its own first, then the pool's."""
    return subjects.own_consumer(pool, priority, worker), subjects.shared_consumer(pool, priority)
