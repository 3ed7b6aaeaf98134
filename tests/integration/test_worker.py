"""A real worker process on a real NATS server, seen from a gateway's side of the protocol."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import torch

from shared import subjects
from shared.bus import Bus
from shared.hashing import block_hashes
from shared.messages import (
    Accepted,
    BlockEvents,
    BlockSnapshot,
    Cancel,
    Delta,
    Frame,
    GatewayState,
    Priority,
    Sampling,
    SnapshotRequest,
    WorkerState,
    WorkRequest,
    decode_block_news,
    decode_fleet_state,
    decode_to_gateway,
    encode,
)
from tests.support.engine import Bench, load_decoder
from tests.support.model import tiny_llama_folder
from tests.support.servers import ServerProcess, nats_server

POOL = "tiny"
SALT = b"salt" * 4


class Gateway:
    """Speaks for one gateway id and records everything it hears."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.id = subjects.mint("g")
        self.accepted: list[Accepted] = []
        self.deltas: dict[str, list[Delta]] = {}
        self.states: list[WorkerState] = []
        self.news: list[BlockEvents | BlockSnapshot] = []
        self.beating = True

    async def start(self) -> None:
        await self.bus.subscribe(subjects.frames(self.id), self._on_frame)
        await self.bus.subscribe(subjects.FLEET_STATE, self._on_state)
        await self.bus.subscribe(subjects.ALL_FLEET_BLOCKS, self._on_news)

    async def beat(self) -> None:
        while True:
            if self.beating and self.bus.connected:
                await self.bus.publish(subjects.FLEET_STATE, encode(GatewayState(1, self.id)))
            await asyncio.sleep(0.3)

    async def _on_frame(self, payload: bytes, _reply: str) -> None:
        match decode_to_gateway(payload):
            case Accepted() as accepted:
                self.accepted.append(accepted)
            case Frame(deltas=deltas):
                for delta in deltas:
                    self.deltas.setdefault(delta.request, []).append(delta)

    async def _on_state(self, payload: bytes, _reply: str) -> None:
        state = decode_fleet_state(payload)
        if isinstance(state, WorkerState):
            self.states.append(state)

    async def _on_news(self, payload: bytes, _reply: str) -> None:
        self.news.append(decode_block_news(payload))

    async def send(
        self, prompt: list[int], most: int = 8, *, priority: Priority = "standard", attempt: int = 0, request: str = "", to: str = ""
    ) -> str:
        request = request or subjects.mint("r")
        work = WorkRequest(
            1, request, attempt, self.id, POOL, priority, prompt, len(prompt), most, Sampling(0, 0.0), SALT, time.time(), time.time() + 30
        )
        subject = subjects.own_work(POOL, priority, to) if to else subjects.shared_work(POOL, priority)
        await self.bus.enqueue(subject, encode(work), f"{request}.{attempt}")
        return request

    def tokens(self, request: str) -> list[int]:
        deltas = self.deltas.get(request, [])
        result: list[int] = []
        for delta in deltas:
            assert delta.index == len(result) or not delta.tokens
            result += delta.tokens
        return result

    def finish(self, request: str) -> str | None:
        ends = [delta.finish for delta in self.deltas.get(request, []) if delta.finish]
        assert len(ends) <= 1
        return ends[0] if ends else None

    async def until(self, condition: Callable[[], object], seconds: float = 20) -> None:
        give_up_at = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < give_up_at, "waited in vain"
            await asyncio.sleep(0.01)


class Worker:
    """A worker process that tests may kill."""

    def __init__(self, folder: Path, nats: ServerProcess, log: Path, **settings: object) -> None:
        environment = {f"HEADRACE_{name.upper()}": str(value) for name, value in settings.items()}
        self.log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "services.cli", "worker"],
                env={
                    **os.environ,
                    "HEADRACE_MODEL": str(folder),
                    "HEADRACE_NATS_URL": nats.url,
                    "HEADRACE_DTYPE": "float32",
                    "HEADRACE_THREADS": "1",
                    "HEADRACE_KV_BLOCKS": "64",
                    "HEADRACE_STATE_DIR": str(log.parent / "state"),
                    **environment,
                },
                stderr=output,
            )

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama_folder(tmp_path_factory.mktemp("model") / POOL)


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with nats_server(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture
async def gateway(nats: ServerProcess) -> AsyncIterator[Gateway]:
    bus = await Bus.connect(nats.url, "test gateway")
    await bus.ensure_work_stream(64)
    one = Gateway(bus)
    await one.start()
    beat = asyncio.create_task(one.beat())
    yield one
    beat.cancel()
    await bus.close()


@pytest.fixture
async def start(folder: Path, nats: ServerProcess, gateway: Gateway, tmp_path: Path) -> AsyncIterator[Callable[..., object]]:
    started: list[Worker] = []

    async def begin(**settings: object) -> Worker:
        worker = Worker(folder, nats, tmp_path / f"worker{len(started)}.log", **settings)
        started.append(worker)
        gateway.states.clear()
        await gateway.until(lambda: gateway.states or worker.process.poll() is not None, 60)
        assert worker.process.poll() is None, worker.log.read_text()
        return worker

    yield begin
    for worker in started:
        worker.stop(signal.SIGKILL)


def expected(folder: Path, prompt: list[int], most: int) -> list[int]:
    return Bench(load_decoder(folder, torch.float32), blocks=300).run([prompt], most)[0]


def idle(gateway: Gateway) -> bool:
    state = gateway.states[-1]
    return state.running == state.waiting == 0 and state.blocks_free == state.blocks_total


async def test_a_batch_of_requests(folder: Path, gateway: Gateway, start: Callable[..., object]) -> None:
    await start()  # type: ignore[misc]
    prompts = [list(range(3, 3 + length)) for length in (1, 16, 40, 200)] * 4
    requests = [await gateway.send(prompt, 12) for prompt in prompts]
    await gateway.until(lambda: all(gateway.finish(request) for request in requests))
    for request, prompt in zip(requests, prompts, strict=True):
        assert gateway.tokens(request) == expected(folder, prompt, 12)
        assert gateway.finish(request) == "length"
        first = gateway.deltas[request][0].extras
        assert first is not None
        assert first.queue_seconds is not None
        assert first.cached_tokens is not None
    assert {one.request for one in gateway.accepted} == set(requests)
    await gateway.until(lambda: idle(gateway))


async def test_refusals_are_answered(gateway: Gateway, start: Callable[..., object]) -> None:
    await start()  # type: ignore[misc]
    large = await gateway.send([5] * 900, 200)
    odd = await gateway.send([5, 100_000], 2)
    late = WorkRequest(1, subjects.mint("r"), 0, gateway.id, POOL, "batch", [5], 1, 2, Sampling(0), SALT, time.time(), time.time() - 1)
    await gateway.bus.enqueue(subjects.shared_work(POOL, "batch"), encode(late), late.request)
    await gateway.bus.enqueue(subjects.shared_work(POOL, "batch"), b"\xc1 no message", "x")
    good = await gateway.send([5, 6], 2)
    await gateway.until(lambda: all(gateway.finish(request) for request in (large, odd, late.request, good)))
    assert gateway.finish(late.request) == "expired"
    for request, code in ((large, "kv_capacity"), (odd, "invalid")):
        assert gateway.finish(request) == "error"
        extras = gateway.deltas[request][-1].extras
        assert extras is not None
        assert extras.error == code
    assert gateway.finish(good) == "length"


async def test_cancelling_frees_the_blocks_and_disturbs_nobody(folder: Path, gateway: Gateway, start: Callable[..., object]) -> None:
    await start(kv_blocks=600, step_tokens=32)  # type: ignore[misc]
    other, victim = await gateway.send([9, 8, 7], 300), await gateway.send([4] * 50, 2000)
    prefilling = await gateway.send([3, 4] * 1500, 10)
    await gateway.until(lambda: len(gateway.tokens(victim)) > 3 and len(gateway.tokens(other)) > 3)
    worker = gateway.accepted[0].worker
    for request in (victim, prefilling):
        await gateway.bus.publish(subjects.control(worker), encode(Cancel(1, request, 0)))
    await gateway.until(lambda: gateway.finish(victim) and gateway.finish(prefilling))
    assert gateway.finish(victim) == gateway.finish(prefilling) == "cancelled"
    assert gateway.tokens(prefilling) == []
    made = len(gateway.tokens(victim))
    await gateway.until(lambda: gateway.finish(other))
    assert len(gateway.tokens(victim)) == made
    assert gateway.tokens(other) == expected(folder, [9, 8, 7], 300)
    await gateway.until(lambda: idle(gateway))


async def test_work_of_a_silent_gateway_is_dropped(gateway: Gateway, start: Callable[..., object]) -> None:
    await start(gateway_lease_seconds=1, kv_blocks=256)  # type: ignore[misc]
    request = await gateway.send([5], 4000)
    await gateway.until(lambda: gateway.tokens(request))
    gateway.beating = False
    await gateway.until(lambda: gateway.finish(request), 10)
    assert gateway.finish(request) == "cancelled"


async def test_urgent_classes_first_and_batch_moves(gateway: Gateway, start: Callable[..., object]) -> None:
    classes: list[Priority] = ["batch", "standard", "interactive"]
    requests = {priority: [await gateway.send([5], 4, priority=priority) for _ in range(8)] for priority in classes}
    await start(slots=1)  # type: ignore[misc]
    await gateway.until(lambda: all(gateway.finish(one) for some in requests.values() for one in some))
    places = {one.request: place for place, one in enumerate(gateway.accepted)}
    mean = {priority: sum(places[one] for one in requests[priority]) / 8 for priority in classes}
    assert mean["interactive"] < mean["standard"] < mean["batch"]
    assert min(places[one] for one in requests["batch"]) < 12


async def test_what_is_placed_on_a_worker_does_not_starve_the_shared_queue(gateway: Gateway, start: Callable[..., object]) -> None:
    await start(slots=1)  # type: ignore[misc]
    worker = gateway.states[-1].worker
    placed = [await gateway.send([5], 16, to=worker) for _ in range(12)]
    shared = [await gateway.send([5], 16) for _ in range(4)]
    await gateway.until(lambda: all(gateway.finish(one) for one in placed + shared))
    places = {one.request: place for place, one in enumerate(gateway.accepted)}
    assert max(places[one] for one in shared) < max(places[one] for one in placed)


async def test_a_tiny_pool_serves_what_fits_and_refuses_the_rest(folder: Path, gateway: Gateway, start: Callable[..., object]) -> None:
    await start(kv_blocks=2)  # type: ignore[misc]
    assert gateway.states[-1].context_tokens == 32
    fits, never = await gateway.send([5, 6, 7], 8), await gateway.send([5] * 40, 8)
    await gateway.until(lambda: gateway.finish(fits) and gateway.finish(never))
    assert gateway.tokens(fits) == expected(folder, [5, 6, 7], 8)
    assert gateway.finish(never) == "error"


async def test_a_redelivered_attempt_runs_once_and_a_newer_replaces_it(gateway: Gateway, start: Callable[..., object]) -> None:
    await start(kv_blocks=600)  # type: ignore[misc]
    request = await gateway.send([5], 2000)
    await gateway.until(lambda: len(gateway.tokens(request)) > 2)
    again = WorkRequest(1, request, 0, gateway.id, POOL, "standard", [5], 1, 5, Sampling(0, 0.0), SALT, time.time(), time.time() + 9)
    await gateway.bus.enqueue(subjects.shared_work(POOL, "standard"), encode(again), "another id")
    count = len(gateway.tokens(request))
    await gateway.until(lambda: len(gateway.tokens(request)) > count + 20)
    await gateway.send([5], 4, attempt=1, request=request)
    await gateway.until(lambda: [delta.finish for delta in gateway.deltas[request] if delta.finish] == ["cancelled", "length"])
    assert sum(len(delta.tokens) for delta in gateway.deltas[request] if delta.attempt == 1) == 4


async def test_block_events_and_snapshots(gateway: Gateway, start: Callable[..., object]) -> None:
    await start()  # type: ignore[misc]
    prompt = list(range(3, 53))
    request = await gateway.send(prompt, 2)
    await gateway.until(lambda: gateway.finish(request) and gateway.news)
    events = gateway.news[0]
    assert isinstance(events, BlockEvents)
    assert events.sequence == 1
    assert events.stored == block_hashes(SALT, prompt, 16)
    await gateway.bus.publish(subjects.control(events.worker), encode(SnapshotRequest(1)))
    await gateway.until(lambda: isinstance(gateway.news[-1], BlockSnapshot))
    snapshot = gateway.news[-1]
    assert isinstance(snapshot, BlockSnapshot)
    assert (snapshot.sequence, snapshot.part, snapshot.parts) == (1, 0, 1)
    assert set(snapshot.hashes) == set(events.stored)
    second = await gateway.send(prompt, 2)
    await gateway.until(lambda: gateway.finish(second))
    extras = gateway.deltas[second][0].extras
    assert extras is not None
    assert extras.cached_tokens == 48


async def test_sigterm_lets_work_finish_and_says_goodbye(gateway: Gateway, start: Callable[..., object]) -> None:
    worker: Worker = await start()  # type: ignore[misc]
    request = await gateway.send([5], 300)
    await gateway.until(lambda: gateway.tokens(request))
    assert await asyncio.to_thread(worker.stop) == 0
    assert gateway.finish(request) == "length"
    assert len(gateway.tokens(request)) == 300
    await gateway.until(lambda: gateway.states[-1].leaving)
    left = await gateway.send([6], 2)  # nobody takes it, and it is not lost
    await start()  # type: ignore[misc]
    await gateway.until(lambda: gateway.finish(left) == "length")


async def test_a_killed_worker_leaves_what_it_had_not_accepted(gateway: Gateway, start: Callable[..., object]) -> None:
    worker: Worker = await start()  # type: ignore[misc]
    worker.process.send_signal(signal.SIGSTOP)
    requests = [await gateway.send([5 + i], 3) for i in range(6)]
    await asyncio.sleep(0.3)  # its waiting pulls have taken some of them
    worker.stop(signal.SIGKILL)
    await start()  # type: ignore[misc]
    await gateway.until(lambda: all(gateway.finish(request) for request in requests), 30)


async def test_survives_a_restart_of_nats(gateway: Gateway, nats: ServerProcess, start: Callable[..., object]) -> None:
    await start()  # type: ignore[misc]
    nats.stop(hard=True)
    await asyncio.sleep(0.5)
    nats.start()
    began = time.monotonic()
    await gateway.until(lambda: gateway.bus.connected)
    await gateway.bus.ensure_work_stream(64)
    request = await gateway.send([5], 3)
    await gateway.until(lambda: gateway.finish(request) == "length", 10)
    assert time.monotonic() - began < 10
