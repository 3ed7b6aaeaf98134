"""The scheduler alone: order, chunking, preemption, and its invariants through thousands of random histories."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.engine.block_pool import BlockPool
from services.worker.engine.scheduler import NeverFits, Scheduler, order
from services.worker.engine.sequence import Draw, Progress, Sequence, StepOutput
from shared.messages import Sampling

BLOCK = 4
SALT = b"s" * 16


def sequence(name: str, prompt: list[int], most: int, at: float = 0.0, stops: list[int] | None = None) -> Sequence:
    return Sequence(name, 0, "g", list(prompt), len(prompt), most, Sampling(seed=1, stop_token_ids=stops or []), SALT, at)


def scheduler(blocks: int = 64, slots: int = 8, budget: int = 16, context: int = 1000) -> Scheduler:
    return Scheduler(BlockPool(blocks, BLOCK), slots=slots, step_tokens=budget, context_tokens=context)


def step(one: Scheduler, token: int = 9) -> list[Progress]:
    plan = one.plan()
    assert plan.tokens <= one.step_tokens
    result = one.commit(plan, StepOutput([Draw(token)] * len(plan.sampled)))
    one.check()
    return result


def finish_all(one: Scheduler, steps: int = 1000) -> list[Progress]:
    results: list[Progress] = []
    for _ in range(steps):
        if not one.has_work:
            return results
        results += step(one)
    raise AssertionError("work is left after so many steps")


def test_decodes_first_then_started_prefill_then_new_ones() -> None:
    one = scheduler(budget=8)
    one.add(sequence("decode", [1], 9, at=0))
    step(one)
    one.add(sequence("long", [2] * 20, 2, at=1))
    step(one)
    one.add(sequence("new", [3] * 3, 2, at=0.5))
    plan = one.plan()
    assert [(entry.sequence.request, entry.count) for entry in plan.entries] == [("decode", 1), ("long", 7)]


def test_a_short_request_overtakes_a_long_prefill() -> None:
    one = scheduler(budget=8, blocks=200)
    one.add(sequence("decode", [1] * 4, 50))
    step(one)
    one.add(sequence("long", [2] * 300, 2, at=1))
    tokens = [progress.request for _ in range(10) for progress in step(one)]
    assert tokens == ["decode"] * 10


def test_priority_then_age() -> None:
    one = scheduler(slots=1)
    for name, priority, arrived in [("batch", "batch", 0.0), ("standard", "standard", 1.0), ("now", "interactive", 2.0)]:
        one.add(sequence(name, [1], 1, at=order(priority, arrived)))  # type: ignore[arg-type]
    one.add(sequence("old batch", [1], 1, at=order("batch", -100.0)))
    assert [progress.request for progress in finish_all(one)] == ["old batch", "now", "standard", "batch"]


def test_preempts_the_youngest_and_loses_nothing() -> None:
    one = scheduler(blocks=8, context=32)
    one.add(sequence("old", [1] * 8, 20, at=0))
    one.add(sequence("young", [2] * 8, 20, at=1))
    results = finish_all(one)
    for name in ("old", "young"):
        mine = [progress for progress in results if progress.request == name]
        assert [progress.index for progress in mine] == list(range(20))
        assert mine[-1].finish == "length"
    ends = [progress.request for progress in results if progress.finish]
    assert ends == ["old", "young"]
    assert one.pool.free == 8


def test_prefix_is_reused_and_reported_once() -> None:
    one = scheduler()
    one.add(sequence("first", list(range(10)), 1))
    finish_all(one)
    one.add(sequence("second", [*range(8), 99, 98], 2))
    results = finish_all(one)
    assert [progress.cached_tokens for progress in results] == [8, None]
    one.add(sequence("all of it", list(range(8)), 1))
    assert finish_all(one)[0].cached_tokens == 4  # one token must be run to sample the next


def test_stop_token_ends_and_is_delivered() -> None:
    one = scheduler()
    one.add(sequence("stops", [1, 2], 10, stops=[9]))
    (only,) = finish_all(one)
    assert (only.tokens, only.finish) == ([9], "stop")


def test_logits_that_are_not_finite_end_only_their_request() -> None:
    one = scheduler()
    one.add(sequence("bad", [1], 3))
    one.add(sequence("good", [2], 3, at=1))
    plan = one.plan()
    results = one.commit(plan, StepOutput([Draw(None, "not_finite"), Draw(5)]))
    assert [(progress.request, progress.finish, progress.error) for progress in results] == [
        ("bad", "error", "not_finite"),
        ("good", None, None),
    ]
    one.check()


def test_what_can_never_fit_is_refused_at_once() -> None:
    one = scheduler(blocks=4)
    with pytest.raises(NeverFits):
        one.add(sequence("big", [1] * 10, 10))
    one.add(sequence("fits exactly", [1] * 10, 7))
    assert len(finish_all(one)) == 7


def test_a_resumed_request_continues_its_indices() -> None:
    one = scheduler()
    resumed = Sequence("r", 1, "g", [1, 2, 3, 50, 51], 3, 4, Sampling(seed=1), SALT, 0.0)
    one.add(resumed)
    assert [progress.index for progress in finish_all(one)] == [2, 3]


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    blocks=st.integers(4, 24),
    slots=st.integers(1, 6),
    budget=st.integers(1, 40),
)
def test_random_histories(seed: int, blocks: int, slots: int, budget: int) -> None:
    chance = random.Random(seed)
    one = scheduler(blocks, slots, budget, context=blocks * BLOCK)
    expected: dict[str, int] = {}
    seen: dict[str, int] = {}
    ended: set[str] = set()
    cancelled: set[str] = set()
    mirror: set[bytes] = set()

    def record(results: list[Progress]) -> None:
        for progress in results:
            assert progress.request not in ended
            assert progress.index == seen[progress.request]
            seen[progress.request] += len(progress.tokens)
            if progress.finish:
                ended.add(progress.request)
        stored, removed = one.pool.take_events()
        mirror.difference_update(removed)
        mirror.update(stored)
        assert mirror == set(one.pool.hashes())

    for i in range(chance.randint(1, 25)):
        if chance.random() < 0.7:
            prompt = [chance.randint(0, 1)] * chance.randint(1, blocks * BLOCK - 2)
            most = chance.randint(1, blocks * BLOCK - len(prompt))
            expected[f"r{i}"], seen[f"r{i}"] = most, 0
            one.add(sequence(f"r{i}", prompt, most, at=order(chance.choice(["interactive", "standard", "batch"]), i)))
        live = one.sequences()
        if live and chance.random() < 0.2:
            victim = chance.choice(live)
            cancelled.add(victim.request)
            record([one.end(victim, "cancelled")])
        for _ in range(chance.randint(0, 4)):
            if one.has_work:
                record(step(one, token=chance.randint(0, 1)))
        one.check()
    for _ in range(20_000):
        if not one.has_work:
            break
        record(step(one))
    assert ended == set(expected)
    assert all(seen[name] == most for name, most in expected.items() if name not in cancelled)
    assert one.pool.free == blocks
