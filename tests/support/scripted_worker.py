"""A worker without a model: speaks the real protocol on the real bus, and does what the test tells it. For tests of the gateway only."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from hashlib import blake2b

from shared import messages, subjects
from shared.bus import Bus, BusUnavailable, Delivery
from shared.messages import PRIORITIES, Accepted, Cancel, Delta, Extras, Finish, Frame, WorkerState, WorkRequest

NextToken = Callable[[list[int]], int]


def chained(tokens: list[int]) -> int:
    """Return a next token (32…126) that depends on every token before: any slip in a resumption shows."""
    return 32 + blake2b(repr(tokens).encode(), digest_size=2).digest()[0] % 95


def spelling(output: list[int]) -> Callable[[WorkRequest], NextToken]:
    """Make every request produce `output`, from its prompt on."""

    def script(work: WorkRequest) -> NextToken:
        return lambda tokens: output[(len(tokens) - work.prompt_length) % len(output)]

    return script


class ScriptedWorker:
    """Accepts what it pulls and produces one token per step and request. Switches change what it does from then on."""

    def __init__(
        self, bus: Bus, pool: str, *, script: Callable[[WorkRequest], NextToken] | None = None, step_seconds: float = 0.002
    ) -> None:
        self.id = subjects.mint("w")
        self.bus = bus
        self.pool = pool
        self.script = script or (lambda work: chained)
        self.step_seconds = step_seconds
        self.per_step = 1  # tokens in one delta
        self.slots = 64
        self.context_tokens = 8192
        self.block_size = 16
        self.pulling = True
        self.beating = True
        self.silent = False  # says nothing at all, as if stopped
        self.go = asyncio.Event()  # cleared: accepted requests wait before their next token
        self.go.set()
        self.expire_all = False
        self.accept_expired = False  # says `accepted` before `expired`, as the real worker does
        self.fail_with: str | None = None  # error code of the next deltas
        self.before_accept = asyncio.Event()
        self.before_accept.set()
        self.works: list[WorkRequest] = []
        self.cancels: list[Cancel] = []
        self.sent: list[tuple[str, Delta]] = []
        self.running: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Join the pool."""
        await self.bus.ensure_work_stream(256)
        await self.bus.ensure_consumers(self.pool, self.id)
        await self.bus.subscribe(subjects.control(self.id), self._on_control)
        await self.bus.flush()
        await self.beat()
        for work in (self._beat_always(), *(self._pull(own, p) for own in (True, False) for p in PRIORITIES)):
            self._tasks.append(asyncio.get_running_loop().create_task(work))

    async def rejoin(self) -> None:
        """Bring back what a restarted server has forgotten."""
        for _ in range(20):
            with contextlib.suppress(BusUnavailable):
                await self.bus.ensure_work_stream(256)
                await self.bus.ensure_consumers(self.pool, self.id)
                return
            await asyncio.sleep(0.2)

    async def stop(self) -> None:
        """End without a goodbye."""
        for task in [*self._tasks, *self.running.values()]:
            task.cancel()
        await asyncio.gather(*self._tasks, *self.running.values(), return_exceptions=True)

    async def beat(self, *, leaving: bool = False) -> None:
        """Send one heartbeat."""
        state = WorkerState(
            version=1,
            worker=self.id,
            pool=self.pool,
            role="both",
            block_size=self.block_size,
            blocks_total=1000,
            blocks_free=1000 - len(self.running),
            running=len(self.running),
            waiting=0,
            slots=self.slots,
            queued_prefill_tokens=0,
            context_tokens=self.context_tokens,
            prefill_tokens_per_second=0,
            decode_tokens_per_second=0,
            step=0,
            healthy=True,
            leaving=leaving,
        )
        await self.bus.publish(subjects.FLEET_STATE, messages.encode(state))

    async def send(self, gateway: str, *deltas: Delta) -> None:
        """Send one frame."""
        self.sent += [(gateway, delta) for delta in deltas]
        await self.bus.publish(subjects.frames(gateway), messages.encode(Frame(version=1, worker=self.id, step=0, deltas=list(deltas))))

    async def _beat_always(self) -> None:
        while True:
            if self.beating and not self.silent:
                with contextlib.suppress(BusUnavailable):
                    await self.beat()
            await asyncio.sleep(0.1)

    async def _on_control(self, payload: bytes, _reply: str) -> None:
        if self.silent:
            return
        message = messages.decode_to_worker(payload)
        if isinstance(message, Cancel):
            self.cancels.append(message)
            for (request, attempt), task in list(self.running.items()):
                if request == message.request and attempt <= message.attempt:
                    task.cancel()

    async def _pull(self, own: bool, priority: messages.Priority) -> None:
        name = subjects.own_consumer(self.pool, priority, self.id) if own else subjects.shared_consumer(self.pool, priority)
        while True:
            if not self.pulling or self.silent or len(self.running) >= self.slots:
                await asyncio.sleep(0.01)
                continue
            for delivery in await self.bus.pull(name, 1, 0.1):
                await self._take(delivery)

    async def _take(self, delivery: Delivery) -> None:
        work = messages.decode_work(delivery.payload)
        self.works.append(work)
        await self.before_accept.wait()
        accepted = Accepted(version=1, worker=self.id, request=work.request, attempt=work.attempt)
        expired = self.expire_all or time.time() > work.start_by
        if not expired or self.accept_expired:
            await self.bus.publish(subjects.frames(work.gateway), messages.encode(accepted))
        if expired:
            await self.send(work.gateway, Delta(work.request, work.attempt, len(work.tokens) - work.prompt_length, [], "expired"))
        else:
            self.running[work.request, work.attempt] = asyncio.get_running_loop().create_task(self._generate(work))
        await self.bus.acknowledge(delivery)

    async def _generate(self, work: WorkRequest) -> None:
        tokens = list(work.tokens)
        next_token = self.script(work)
        extras: Extras | None = Extras(cached_tokens=work.prompt_length // 2, queue_seconds=max(time.time() - work.arrived_at, 0))
        try:
            finish: Finish | None = None
            while finish is None:
                await asyncio.sleep(self.step_seconds)
                await self.go.wait()
                if self.silent:
                    await asyncio.sleep(0.05)
                    continue
                index = len(tokens) - work.prompt_length
                if self.fail_with is not None:
                    await self.send(work.gateway, Delta(work.request, work.attempt, index, [], "error", Extras(error=self.fail_with)))
                    return
                new: list[int] = []
                while len(new) < self.per_step and finish is None:
                    new.append(next_token(tokens + new))
                    if new[-1] in work.sampling.stop_token_ids:
                        finish = "stop"
                    elif index + len(new) >= work.max_tokens:
                        finish = "length"
                tokens += new
                await self.send(work.gateway, Delta(work.request, work.attempt, index, new, finish, extras))
                extras = None
        except asyncio.CancelledError:
            with contextlib.suppress(BusUnavailable):
                index = len(tokens) - work.prompt_length
                await self.send(work.gateway, Delta(work.request, work.attempt, index, [], "cancelled"))
        finally:
            self.running.pop((work.request, work.attempt), None)
