"""Durable token totals per tenant and day in Valkey, written behind the requests: it never blocks or breaks one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import redis.asyncio
import redis.exceptions
from prometheus_client import Counter

from shared import keys

log = logging.getLogger(__name__)

KEEP_SECONDS = 400 * 86_400
_BATCH = 512
_RETRY_SECONDS = 1.0
_ONCE_SECONDS = 3600
_FAILURES = (redis.exceptions.RedisError, OSError)

# A batch is applied once, however often it is sent: a reply may be lost after the server has done the work.
_APPLY = """
if not redis.call('SET', KEYS[2], 1, 'NX', 'EX', ARGV[1]) then return 0 end
for i = 3, #ARGV, 2 do redis.call('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('EXPIRE', KEYS[1], ARGV[2])
return 1
"""


@dataclass(frozen=True, slots=True)
class UsageRecord:
    """What one finished request used, in tokens."""

    tenant: str
    pool: str
    prompt: int
    completion: int
    cached: int
    ended_at: float  # Unix seconds


class UsageLog:
    """Takes records at once and writes them in batches. At most `limit` wait while Valkey is away; more are dropped and counted."""

    def __init__(self, url: str, lost: Counter, *, limit: int = 10_000) -> None:
        self._client = redis.asyncio.Redis.from_url(url, socket_timeout=2, socket_connect_timeout=2)
        self._apply = self._client.register_script(_APPLY)
        self._lost = lost
        self._queue: asyncio.Queue[UsageRecord] = asyncio.Queue(limit)
        self._task: asyncio.Task[None] | None = None
        self.reachable = False
        self._warned = False

    def start(self) -> None:
        """Begin to write."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Write what is left, if Valkey answers."""
        if self._task is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(3 if self.reachable else 0):
                    await self._queue.join()
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._lost.inc(self._queue.qsize())
        with contextlib.suppress(*_FAILURES):
            await self._client.aclose()

    def record(self, record: UsageRecord) -> None:
        """Take one record."""
        try:
            self._queue.put_nowait(record)
        except asyncio.QueueFull:
            self._lost.inc()

    async def _run(self) -> None:
        await self._persist(self._ping)
        while True:
            records = [await self._queue.get()]
            while len(records) < _BATCH and not self._queue.empty():
                records.append(self._queue.get_nowait())
            for (tenant, day), fields in totals(records).items():
                await self._write(tenant, day, fields)
            for _ in records:
                self._queue.task_done()

    async def _write(self, tenant: str, day: str, fields: dict[str, int]) -> None:
        names = [keys.usage_day(tenant, day), keys.usage_batch(tenant, secrets.token_hex(8))]
        pairs = [value for pair in fields.items() for value in pair]

        async def apply() -> None:
            await self._apply(keys=names, args=[_ONCE_SECONDS, KEEP_SECONDS, *pairs])

        await self._persist(apply)

    async def _ping(self) -> None:
        await self._client.ping()

    async def _persist(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do `work` until it succeeds."""
        while True:
            try:
                await work()
            except _FAILURES as error:
                if self.reachable or not self._warned:
                    log.warning("usage: valkey: %s", error)
                self.reachable, self._warned = False, True
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                self.reachable = True
                return


def totals(records: list[UsageRecord]) -> dict[tuple[str, str], dict[str, int]]:
    """Return the sums of each field per (tenant, UTC day)."""
    sums: dict[tuple[str, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for record in records:
        fields = sums[record.tenant, datetime.fromtimestamp(record.ended_at, UTC).strftime("%Y%m%d")]
        counts = {"prompt": record.prompt, "completion": record.completion, "cached": record.cached, "requests": 1}
        for kind, count in counts.items():
            fields[keys.usage_field(record.pool, kind)] += count
    return sums
