"""A router process against a real NATS server and scripted workers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import IO, Protocol, TypeVar

import pytest

from shared import subjects
from shared.bus import Bus, BusUnavailable
from shared.hashing import block_hashes
from shared.messages import (
    BlockEvents,
    BlockSnapshot,
    RouteReply,
    RouteRequest,
    SnapshotRequest,
    WorkerState,
    decode_route_reply,
    decode_to_worker,
    encode,
)
from tests.support.servers import ServerProcess, nats_server

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]
POOL = "pool-x"
BLOCK = 16
SHORT = 100  # tokens: too few to be placed without a reason


class RouterProcess:
    """A router as its own process; `metrics_url` is known once it is ready."""

    def __init__(self, nats_url: str, log: IO[bytes]) -> None:
        self._log = log
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import sys; from services.router.app import run; from shared.settings import Settings; sys.exit(run(Settings()))",
            ],
            cwd=ROOT,
            env=os.environ | {"HEADRACE_NATS_URL": nats_url, "HEADRACE_LOG_FORMAT": "json"},
            stderr=log,
        )
        self.metrics_url = f"http://127.0.0.1:{self._wait_ready()}"

    def lines(self) -> list[dict[str, object]]:
        text = Path(self._log.name).read_text()
        return [json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}")]

    def _wait_ready(self) -> object:
        for _ in range(300):
            for line in self.lines():
                if line["message"] == "ready":
                    return line["metrics_port"]
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise TimeoutError(f"the router did not get ready: {Path(self._log.name).read_text()}")

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(self.metrics_url + "/metrics", timeout=5) as response:
            found = re.search(rf"^{re.escape(name)} (\S+)$", response.read().decode(), re.MULTILINE)
        assert found, name
        return float(found[1])

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(5)


class ScriptedWorker:
    """Speaks a worker's part of the protocol: heartbeats by itself, events when told, snapshots when asked."""

    def __init__(self, bus: Bus) -> None:
        self.id = subjects.mint("w")
        self.snapshots_asked = 0
        self._bus = bus
        self._cached: list[bytes] = []
        self._sequence = 0
        self._beating: asyncio.Task[None] | None = None

    async def start(self, *, answering: bool = True) -> None:
        async def on_control(payload: bytes, _reply: str) -> None:
            if isinstance(decode_to_worker(payload), SnapshotRequest):
                self.snapshots_asked += 1
                if answering:
                    await self._send_snapshot()

        await self._bus.subscribe(subjects.control(self.id), on_control)
        await self._bus.flush()
        self._beating = asyncio.create_task(self._beat())

    async def store(self, hashes: list[bytes], *, lost: bool = False) -> None:
        """Cache `hashes`; `lost`: the event goes missing on the way."""
        self._cached += hashes
        self._sequence += 1
        if not lost:
            await self._send(subjects.fleet_blocks(self.id), encode(BlockEvents(1, self.id, self._sequence, hashes, [])))

    async def die(self) -> None:
        """Fall silent without a goodbye."""
        if self._beating:
            self._beating.cancel()

    async def leave(self) -> None:
        await self.die()
        await self._send(subjects.FLEET_STATE, encode(self._state(leaving=True)))

    def _state(self, *, leaving: bool = False) -> WorkerState:
        return WorkerState(1, self.id, POOL, "both", BLOCK, 1000, 1000, 0, 0, 64, 0, 8192, 0.0, 0.0, 1, True, leaving=leaving)

    async def _beat(self) -> None:
        while True:
            await self._send(subjects.FLEET_STATE, encode(self._state()))
            await asyncio.sleep(0.5)

    async def _send_snapshot(self) -> None:
        half = len(self._cached) // 2
        for part, hashes in enumerate((self._cached[:half], self._cached[half:])):
            await self._send(subjects.fleet_blocks(self.id), encode(BlockSnapshot(1, self.id, self._sequence, part, 2, hashes)))

    async def _send(self, subject: str, payload: bytes) -> None:
        with contextlib.suppress(BusUnavailable):
            await self._bus.publish(subject, payload)


async def settled(router: RouterProcess, name: str, value: float) -> None:
    """Wait until the router's metric `name` has `value`: it has taken in what the workers said."""

    async def get() -> float:
        return await asyncio.to_thread(router.metric, "headrace_router_" + name)

    await until(get, lambda now: now == value)


class StartWorker(Protocol):
    async def __call__(self, *, answering: bool = True) -> ScriptedWorker: ...


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[ServerProcess]:
    with nats_server(tmp_path) as server:
        yield server


@pytest.fixture
async def bus(nats: ServerProcess) -> AsyncIterator[Bus]:
    connected = await Bus.connect(nats.url, "test")
    yield connected
    await connected.close()


@pytest.fixture
def router(nats: ServerProcess, tmp_path: Path) -> Iterator[RouterProcess]:
    with (tmp_path / "router.log").open("wb") as log:
        process = RouterProcess(nats.url, log)
        yield process
        process.process.kill()
        process.process.wait()


@pytest.fixture
async def start_worker(bus: Bus) -> AsyncIterator[StartWorker]:
    started: list[ScriptedWorker] = []

    async def make(*, answering: bool = True) -> ScriptedWorker:
        worker = ScriptedWorker(bus)
        await worker.start(answering=answering)
        started.append(worker)
        return worker

    yield make
    for worker in started:
        await worker.die()


def prompt(seed: int, tokens: int = SHORT) -> list[bytes]:
    return block_hashes(b"s" * 16, [seed * 10_000 + i for i in range(tokens)], BLOCK)


async def ask(bus: Bus, hashes: list[bytes], tokens: int = SHORT, excluded: list[str] | None = None) -> RouteReply | None:
    payload = await bus.request(subjects.ROUTE, encode(RouteRequest(1, POOL, tokens, hashes, excluded or [])), 1.0)
    return None if payload is None else decode_route_reply(payload)


async def until(get: Callable[[], Awaitable[T]], accept: Callable[[T], bool], seconds: float = 8.0) -> T:
    deadline = time.monotonic() + seconds
    while True:
        value = await get()
        if accept(value):
            return value
        assert time.monotonic() < deadline, f"still {value!r} after {seconds} s"
        await asyncio.sleep(0.05)


async def test_the_holder_of_a_prefix_gets_it(bus: Bus, router: RouterProcess, start_worker: StartWorker) -> None:
    one, two = await start_worker(), await start_worker()
    await one.store(prompt(1))
    await two.store(prompt(2))
    await settled(router, "indexed_blocks", 12)
    assert router.metric("headrace_router_workers") == 2
    assert await ask(bus, prompt(1), tokens=100_000) == RouteReply(1), "no room"
    assert await ask(bus, prompt(1)) == RouteReply(1, one.id, 96)
    assert await ask(bus, prompt(2)) == RouteReply(1, two.id, 96)
    assert await ask(bus, prompt(1), excluded=[one.id]) == RouteReply(1, two.id)
    assert router.metric('headrace_router_decisions_total{outcome="placed"}') == 3
    assert router.metric('headrace_router_decisions_total{outcome="no_room"}') == 1
    assert router.metric('headrace_router_decisions_total{outcome="no_worker"}') == 0
    assert router.metric("headrace_router_matched_tokens_total") == 192
    assert router.metric("headrace_router_event_gaps_total") == 0


async def test_simultaneous_requests_with_one_new_long_prefix_go_together(
    bus: Bus, router: RouterProcess, start_worker: StartWorker
) -> None:
    for _ in range(4):
        await start_worker()
    await settled(router, "workers", 4)
    for seed in range(5):
        shared_prefix = prompt(seed, 1600)
        replies = await asyncio.gather(*(ask(bus, [*shared_prefix, bytes([i, seed] * 8)], 1620) for i in range(4)))
        assert len({reply.worker for reply in replies if reply}) == 1
        assert [reply.matched_tokens for reply in replies if reply] == [0, 1600, 1600, 1600]


@pytest.mark.parametrize("tokens", [16, 480])
async def test_requests_that_share_nothing_spread(bus: Bus, router: RouterProcess, start_worker: StartWorker, tokens: int) -> None:
    for _ in range(4):
        await start_worker()
    await settled(router, "workers", 4)
    replies = await asyncio.gather(*(ask(bus, prompt(seed, tokens), tokens) for seed in range(8)))
    chosen = [reply.worker for reply in replies if reply]
    assert len(chosen) == 8
    assert sorted(chosen.count(worker) for worker in set(chosen)) == [2, 2, 2, 2]


async def test_a_gap_leads_to_a_snapshot(bus: Bus, router: RouterProcess, start_worker: StartWorker) -> None:
    one, _two = await start_worker(), await start_worker()
    await one.store(prompt(1))
    await settled(router, "indexed_blocks", 6)
    await until(lambda: ask(bus, prompt(1)), lambda reply: reply == RouteReply(1, one.id, 96))
    asked_before = one.snapshots_asked
    assert asked_before >= 1, "a new worker is asked for what it holds"
    await one.store(prompt(2), lost=True)
    await asyncio.sleep(0.3)
    assert router.metric("headrace_router_indexed_blocks") == 6
    await one.store(prompt(3))
    await settled(router, "indexed_blocks", 18)
    assert await ask(bus, prompt(2)) == RouteReply(1, one.id, 96)
    assert one.snapshots_asked == asked_before + 1
    assert router.metric("headrace_router_event_gaps_total") == 1


async def test_a_worker_that_does_not_answer_is_asked_again_but_not_all_the_time(
    bus: Bus, router: RouterProcess, start_worker: StartWorker
) -> None:
    mute = await start_worker(answering=False)
    for _ in range(50):
        await mute.store(prompt(1))
        await asyncio.sleep(0.04)
    assert 2 <= mute.snapshots_asked <= 5
    reply = await ask(bus, prompt(1))
    assert reply is not None
    assert reply.worker == mute.id, "its events count meanwhile"


async def test_a_router_that_comes_late_learns_what_is_cached(
    nats: ServerProcess, bus: Bus, router: RouterProcess, start_worker: StartWorker, tmp_path: Path
) -> None:
    assert router.stop() == 0
    one, _two = await start_worker(), await start_worker()
    await one.store(prompt(1))
    with (tmp_path / "late.log").open("wb") as log:
        late = RouterProcess(nats.url, log)
        try:
            await settled(late, "indexed_blocks", 6)
            assert await ask(bus, prompt(1)) == RouteReply(1, one.id, 96)
        finally:
            assert late.stop() == 0


@pytest.mark.parametrize("goodbye", [True, False], ids=["goodbye", "silence"])
async def test_a_dead_worker_is_never_chosen(bus: Bus, router: RouterProcess, start_worker: StartWorker, goodbye: bool) -> None:
    holder, other = await start_worker(), await start_worker()
    await holder.store(prompt(1, 480))
    await settled(router, "indexed_blocks", 30)
    assert await ask(bus, prompt(1, 480), 481) == RouteReply(1, holder.id, 480)
    if goodbye:
        await holder.leave()
        await bus.flush()
    else:
        await holder.die()
        await asyncio.sleep(1.6)
    for _ in range(20):
        reply = await ask(bus, prompt(1, 480), 481)
        assert reply is not None
        assert reply.worker == other.id
    await other.leave()
    await bus.flush()
    assert await ask(bus, prompt(1, 480), 481) == RouteReply(1)


async def test_answers_again_after_nats_restarts(nats: ServerProcess, bus: Bus, router: RouterProcess, start_worker: StartWorker) -> None:
    one, _two = await start_worker(), await start_worker()
    await one.store(prompt(1))
    await settled(router, "indexed_blocks", 6)
    nats.stop()
    await one.store(prompt(2))  # nobody hears of it, and no later event will show that
    await asyncio.sleep(0.5)
    with pytest.raises(urllib.error.HTTPError, match="503"):
        urllib.request.urlopen(router.metrics_url + "/health", timeout=5)
    nats.start()
    await settled(router, "indexed_blocks", 12)
    for seed in (1, 2):
        assert await ask(bus, prompt(seed)) == RouteReply(1, one.id, 96)
    with urllib.request.urlopen(router.metrics_url + "/health", timeout=5) as response:
        assert response.status == 200


async def test_malformed_messages_are_counted_and_dropped(bus: Bus, router: RouterProcess, start_worker: StartWorker) -> None:
    one = await start_worker()
    await one.store(prompt(1))
    for subject in (subjects.FLEET_STATE, subjects.fleet_blocks(one.id), subjects.ROUTE):
        for payload in (b"", b"\xc1", b"\x93" * 5000, encode(one._state())[:-3]):
            await bus.publish(subject, payload)
    await settled(router, "indexed_blocks", 6)
    assert await ask(bus, prompt(1)) == RouteReply(1, one.id, 96)
    await settled(router, "malformed_total", 12)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
async def test_signals_end_it_at_once(router: RouterProcess, number: signal.Signals) -> None:
    started = time.monotonic()
    router.process.send_signal(number)
    assert router.process.wait(5) == 0
    assert time.monotonic() - started < 2


async def test_signals_end_it_while_nats_is_away(nats: ServerProcess, router: RouterProcess) -> None:
    nats.stop()
    await asyncio.sleep(0.5)
    started = time.monotonic()
    assert router.stop() == 0
    assert time.monotonic() - started < 3
