"""Pulls from the work queue just what the engine can start now, urgent classes first, and hands it over once accepted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from shared.bus import Bus, Delivery, work_consumers
from shared.messages import PRIORITIES, MessageError, WorkRequest, decode_work

log = logging.getLogger(__name__)

_WAIT_SECONDS = 1.0  # of a pull that waits; short, since a broker restart forgets it
_FULL_POLL_SECONDS = 0.25  # how often to look for room, besides being told
_NARROW_POLL_SECONDS = 0.02  # how often to look for requests when there is room for fewer than there are consumers
_BATCH_SHARE = 8  # of so many sweeps, one starts with the last class, so that batch always moves


class Intake:
    """`room()` says how many requests the engine could start now; `accept(request, delivery)` acknowledges and submits one."""

    def __init__(
        self, bus: Bus, pool: str, worker: str, room: Callable[[], int], accept: Callable[[WorkRequest, Delivery], Awaitable[None]]
    ) -> None:
        self._bus = bus
        self._consumers = {priority: work_consumers(pool, worker, priority) for priority in PRIORITIES}
        self._room = room
        self._accept = accept
        self._waiting: dict[str, asyncio.Task[None]] = {}  # consumer -> a pull that waits for its next message
        self._woken = asyncio.Event()
        self._sweeps = 0
        self._stopping = False

    def wake(self) -> None:
        """There may be room now."""
        self._woken.set()

    async def run(self) -> None:
        """Pull until `stop`, and then until no pull is under way, so that nothing that one brings is left to time out."""
        while not self._stopping:
            self._woken.clear()
            room = self._room()
            if room > 0 and await self._sweep():
                continue
            if room >= 2 * len(PRIORITIES):  # each waiting pull may bring one
                self._arm()
            try:
                await asyncio.wait_for(self._woken.wait(), _FULL_POLL_SECONDS if room <= 0 or self._waiting else _NARROW_POLL_SECONDS)
            except TimeoutError:
                continue
        while self._waiting:
            await asyncio.wait(list(self._waiting.values()))

    def stop(self) -> None:
        """Make `run` come to its end."""
        self._stopping = True
        self._woken.set()

    def _order(self) -> list[str]:
        """Return the consumers, urgent classes first (in one sweep of some, last), and in turns a worker's own or the shared one first."""
        self._sweeps += 1
        classes = reversed(PRIORITIES) if self._sweeps % _BATCH_SHARE == 0 else PRIORITIES
        turn = 1 if (self._sweeps + self._sweeps // _BATCH_SHARE) % 2 else -1
        return [consumer for priority in classes for consumer in self._consumers[priority][::turn]]

    async def _sweep(self) -> bool:
        """Take what is queued, without waiting; say whether there was anything."""
        found = False
        for consumer in self._order():
            if consumer in self._waiting:  # its pull would have brought a message
                continue
            room = self._room()
            if room <= 0:
                return found
            deliveries = await self._bus.pull(consumer, min(room, 8), 0)
            found = found or bool(deliveries)
            for delivery in deliveries:
                await self._take(delivery)
        return found

    def _arm(self) -> None:
        """Keep one waiting pull per consumer."""
        for consumer in [one for consumers in self._consumers.values() for one in consumers]:
            if consumer not in self._waiting:
                self._waiting[consumer] = asyncio.create_task(self._wait(consumer))

    async def _wait(self, consumer: str) -> None:
        try:
            for delivery in await self._bus.pull(consumer, 1, _WAIT_SECONDS):
                await self._take(delivery)
        finally:
            del self._waiting[consumer]
            self._woken.set()

    async def _take(self, delivery: Delivery) -> None:
        try:
            request = decode_work(delivery.payload)
        except MessageError as error:
            log.error("dropped a queued message that is no request: %s", error)
            await self._bus.acknowledge(delivery)
            return
        await self._accept(request, delivery)


def expired(request: WorkRequest) -> bool:
    """Whether a request has waited in the queue for longer than it may."""
    return time.time() > request.start_by
