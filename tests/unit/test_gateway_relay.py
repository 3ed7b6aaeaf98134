"""The relay's bookkeeping without a network: whatever arrives in whatever order, a request's history stays simple."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.fleet import Fleet
from services.gateway.relay import Relay
from services.gateway.request import Failure, Job, OpenRequest
from shared import messages
from shared.bus import Bus
from shared.messages import Accepted, Delta, Extras, Frame, Sampling, ToGateway, WorkerState
from shared.telemetry import GatewayMetrics

OUTPUT = [100 + i for i in range(12)]


class RecordingBus:
    """Takes what the relay sends."""

    connected = True

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes]] = []
        self.removed: list[int] = []

    async def publish(self, subject: str, payload: bytes, reply: str = "") -> None:
        self.sent.append((subject, payload))

    async def remove(self, sequence: int) -> bool:
        self.removed.append(sequence)
        return True


class Bench:
    """A relay with one open request, whose resumptions are queued at once."""

    def __init__(self, max_resumes: int = 1000) -> None:
        self.now = 0.0
        self.bus = RecordingBus()
        self.fleet = Fleet("m", 2.0, lambda: self.now)
        self.relay = Relay(cast(Bus, self.bus), "g-1", self.fleet, GatewayMetrics(["m"]), max_resumes)
        self.attempts = [0]

        async def resume(request: OpenRequest) -> None:
            self.attempts.append(request.attempt)

        self.relay._resume = resume
        job = Job("r-1", [1, 2], len(OUTPUT), Sampling(seed=1), "standard", b"s" * 16, 0.0)
        self.request = OpenRequest(job, asyncio.Event(), 0.0)
        self.relay.add(self.request)

    async def say(self, message: ToGateway) -> None:
        await self.relay._on_to_gateway(messages.encode(message), "")

    async def deltas(self, worker: str, *deltas: Delta) -> None:
        await self.say(Frame(version=1, worker=worker, step=0, deltas=list(deltas)))

    async def settle(self) -> None:
        while self.relay._tasks:
            await asyncio.gather(*self.relay._tasks)


frames = st.tuples(
    st.integers(0, 3),  # attempt
    st.integers(0, len(OUTPUT)),  # index
    st.integers(0, 4),  # tokens
    st.booleans(),  # the end, if it is there
    st.sampled_from(["w-1", "w-2"]),
)


@given(st.lists(frames, max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_frames_give_a_contiguous_history_with_one_end(script: list[tuple[int, int, int, bool, str]]) -> None:
    async def play() -> None:
        bench = Bench()
        ends = 0
        for attempt, index, count, last, worker in script:
            tokens = OUTPUT[index : index + count]
            finish: Any = "length" if last and index + len(tokens) == len(OUTPUT) else None
            before = list(bench.request.tokens)
            ended = bench.request.ending is not None
            await bench.deltas(worker, Delta("r-1", attempt, index, tokens, finish))
            await bench.settle()
            after = bench.request.tokens
            assert after == OUTPUT[: len(after)]
            assert after[: len(before)] == before
            if ended:
                assert after == before
            ends += bench.request.ending is not None and not ended
            assert bench.attempts == list(range(bench.request.attempt + 1))
        assert ends <= 1
        assert (bench.request.ending is None) == (bench.relay.open_requests == 1)
        # whatever happened before, the live attempt can still deliver the rest
        if bench.request.ending is None:
            worker = bench.request.worker or "w-3"
            have = len(bench.request.tokens)
            await bench.deltas(worker, Delta("r-1", bench.request.attempt, have, OUTPUT[have:], "length"))
        assert bench.request.ending == "length"
        assert bench.request.tokens == OUTPUT

    asyncio.run(play())


async def test_an_end_without_tokens_needs_no_index() -> None:
    for finish, error, code in (("expired", None, "timeout"), ("error", "kv_capacity", "kv_capacity"), ("error", "not_finite", "internal")):
        bench = Bench()
        await bench.deltas("w-1", Delta("r-1", 0, 7, [], cast(Any, finish), Extras(error=error)))
        assert bench.request.ending == "failed"
        assert bench.request.failure is not None
        assert bench.request.failure.code == code


async def test_cached_tokens_are_those_of_the_first_attempt_that_spoke() -> None:
    bench = Bench()
    await bench.deltas("w-1", Delta("r-1", 0, 0, OUTPUT[:2], None, Extras(cached_tokens=1, queue_seconds=0.5)))
    await bench.relay._on_fleet_state(messages.encode(state("w-1", leaving=True)), "")
    await bench.deltas("w-2", Delta("r-1", 1, 2, OUTPUT[2:3], None, Extras(cached_tokens=2, queue_seconds=9.0)))
    assert (bench.request.cached_tokens, bench.request.queue_seconds) == (1, 0.5)
    assert bench.request.excluded == ["w-1"]
    assert bench.request.tokens == OUTPUT[:3]


async def test_closing_withdraws_from_where_it_is() -> None:
    queued = Bench()
    queued.request.sequence = 7
    queued.relay.close(queued.request)
    await queued.settle()
    assert (queued.bus.removed, queued.bus.sent) == ([7], [])
    running = Bench()
    await running.say(Accepted(version=1, worker="w-1", request="r-1", attempt=0))
    running.request.sequence = 7
    running.relay.close(running.request)
    running.relay.close(running.request)
    await running.settle()
    assert running.bus.removed == []
    assert [subject for subject, _ in running.bus.sent] == ["hr.control.w-1"]
    for _ in range(5):  # what still comes is cancelled, but not at every frame
        await running.deltas("w-1", Delta("r-1", 0, 0, OUTPUT[:1]))
    await running.settle()
    assert len(running.bus.sent) == 1


def state(worker: str, **changes: Any) -> WorkerState:
    values: dict[str, Any] = {
        "version": 1,
        "worker": worker,
        "pool": "m",
        "role": "both",
        "block_size": 16,
        "blocks_total": 10,
        "blocks_free": 10,
        "running": 0,
        "waiting": 0,
        "slots": 8,
        "queued_prefill_tokens": 0,
        "context_tokens": 100,
        "prefill_tokens_per_second": 0.0,
        "decode_tokens_per_second": 0.0,
        "step": 0,
        "healthy": True,
    }
    return WorkerState(**(values | changes))


def test_the_fleet_knows_who_is_alive() -> None:
    now = 0.0
    fleet = Fleet("m", 2.0, lambda: now)
    assert (fleet.alive(), fleet.context_tokens(), fleet.block_size(), fleet.least_loaded([])) == ([], None, None, None)
    fleet.beat(state("w-1", running=3, context_tokens=50))
    fleet.beat(state("w-2", running=1))
    fleet.beat(state("w-3", draining=True))
    fleet.beat(state("w-4", healthy=False))
    fleet.beat(state("w-5", pool="other"))
    fleet.heard("w-6")
    assert [one.worker for one in fleet.alive()] == ["w-1", "w-2"]
    assert (fleet.context_tokens(), fleet.block_size()) == (100, 16)
    assert fleet.least_loaded([]) == "w-2"
    assert fleet.least_loaded(["w-2"]) == "w-1"
    assert not fleet.lost("w-6")
    assert fleet.lost("w-9")
    now = 1.9
    fleet.heard("w-1")
    now = 3.0
    assert [one.worker for one in fleet.alive()] == ["w-1"]
    assert (fleet.lost("w-1"), fleet.lost("w-2")) == (False, True)
    fleet.forgive()
    assert not fleet.lost("w-2")
    fleet.left("w-2")
    fleet.beat(state("w-2"))  # a heartbeat that was under way
    fleet.heard("w-2")
    assert fleet.lost("w-2")


def test_an_unwell_worker_is_lost_later_than_a_silent_one() -> None:
    now = 0.0
    fleet = Fleet("m", 2.0, lambda: now)
    fleet.beat(state("w-1"))
    for now in range(1, 10):  # noqa: B007  # the clock reads it
        fleet.beat(state("w-1", healthy=False))
        assert not fleet.alive()
        assert not fleet.lost("w-1")
    for now in range(10, 12):  # noqa: B007
        fleet.beat(state("w-1", healthy=False))
    assert fleet.lost("w-1")


@pytest.mark.parametrize("tokens", [[], OUTPUT[:3]])
async def test_the_last_resume_ends_with_a_failure(tokens: list[int]) -> None:
    bench = Bench(max_resumes=0)
    await bench.deltas("w-1", Delta("r-1", 0, 0, tokens))
    bench.relay.lose(bench.request, "w-1")
    assert bench.request.ending == "failed"
    assert bench.request.failure is not None
    assert bench.request.failure.code == "worker_lost"


async def test_a_broken_task_ends_its_request(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()

    async def broken() -> None:
        raise KeyError("a bug of ours")

    bench.relay.spawn(broken(), bench.request)
    with pytest.raises(KeyError):
        await bench.settle()
    await asyncio.sleep(0)
    assert bench.request.failure == Failure("internal")
    assert bench.relay.open_requests == 0
    assert "a bug of ours" in caplog.text
