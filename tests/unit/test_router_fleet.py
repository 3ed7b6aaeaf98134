"""Liveness and optimistic accounting, with time as a number."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from services.router.fleet import FORGET_SECONDS, SETTLE_SECONDS, STALE_SECONDS, Fleet
from services.router.placement import Load, choose
from shared.messages import RouteRequest, WorkerState

IDLE = WorkerState(
    version=1,
    worker="w-a",
    pool="pool",
    role="both",
    block_size=16,
    blocks_total=1000,
    blocks_free=1000,
    running=0,
    waiting=0,
    slots=8,
    queued_prefill_tokens=0,
    context_tokens=8192,
    prefill_tokens_per_second=0.0,
    decode_tokens_per_second=0.0,
    step=1,
    healthy=True,
)


def state(worker: str = "w-a", **changes: Any) -> WorkerState:
    return msgspec.structs.replace(IDLE, worker=worker, **changes)


def only(fleet: Fleet, now: float) -> Load:
    (load,) = fleet.available("pool", now)
    return load


def test_load_of_a_heartbeat() -> None:
    fleet = Fleet()
    assert fleet.hear(state(running=2, waiting=1, blocks_free=300, queued_prefill_tokens=70), 0.0) == "new"
    assert only(fleet, 1.0) == Load("w-a", 16, 3, 5, 300, 70, 8192)
    assert fleet.available("other", 1.0) == []


@pytest.mark.parametrize("change", [{"draining": True}, {"healthy": False}, {"role": "decode"}], ids=str)
def test_unfit_workers_get_nothing_new_but_are_known(change: dict[str, Any]) -> None:
    fleet = Fleet()
    fleet.hear(state(**change), 0.0)
    assert fleet.available("pool", 0.1) == []
    assert fleet.fresh(0.1) == ["w-a"]
    fleet.hear(state(), 0.2)
    assert len(fleet.available("pool", 0.3)) == 1


def test_stale_returned_forgotten() -> None:
    fleet = Fleet()
    fleet.hear(state(), 0.0)
    assert len(fleet.available("pool", STALE_SECONDS)) == 1
    assert fleet.available("pool", STALE_SECONDS + 0.01) == [], "a silent worker is not an idle one"
    assert fleet.forget_silent(FORGET_SECONDS) == []
    assert fleet.hear(state(), 10.0) == "returned"
    assert fleet.hear(state(), 10.5) == "known"
    assert fleet.forget_silent(10.5 + FORGET_SECONDS + 0.01) == ["w-a"]
    assert fleet.hear(state(), 50.0) == "new"


def test_goodbye() -> None:
    fleet = Fleet()
    fleet.hear(state(), 0.0)
    assert fleet.hear(state(leaving=True), 0.1) == "left"
    assert fleet.available("pool", 0.1) == []
    assert fleet.hear(state(leaving=True), 0.2) == "stranger"


def test_placements_count_at_once() -> None:
    fleet = Fleet()
    fleet.hear(state(), 0.0)
    fleet.place("w-a", prompt_tokens=100, new_tokens=60, now=0.1)
    fleet.place("w-a", prompt_tokens=10, new_tokens=10, now=0.1)
    assert only(fleet, 0.2) == Load("w-a", 16, 2, 6, 1000 - 7 - 1, 70, 8192)
    fleet.place("w-gone", 100, 100, 0.2)  # it left while the decision was made


def test_a_heartbeat_does_not_swallow_a_placement_it_cannot_know() -> None:
    fleet = Fleet()
    fleet.hear(state(), 0.0)
    fleet.place("w-a", 100, 100, 0.49)
    fleet.hear(state(), 0.5)
    assert only(fleet, 0.5).batch == 1, "sent before the worker could have pulled it"
    fleet.hear(state(), 1.0)
    assert only(fleet, 1.0).batch == 0, "never arrived: cancelled, or moved to the shared subject"


def test_growth_absorbs_so_that_nothing_counts_twice() -> None:
    fleet = Fleet()
    fleet.hear(state(), 0.0)
    for _ in range(3):
        fleet.place("w-a", 100, 100, 0.1)
    fleet.hear(state(running=2, queued_prefill_tokens=200, blocks_free=986), 0.15)
    assert only(fleet, 0.15) == Load("w-a", 16, 3, 5, 1000 - 3 * 7, 300, 8192)
    fleet.hear(state(running=3), 0.2)
    assert only(fleet, 0.2).batch == 3
    fleet.hear(state(running=0), 0.3)
    assert only(fleet, 0.3).batch == 0, "shrinking never makes the count negative"


def test_growth_and_age_do_not_absorb_twice() -> None:
    fleet = Fleet()
    fleet.hear(state(), 0.0)
    fleet.place("w-a", 100, 100, 0.0)
    fleet.place("w-a", 100, 100, 0.45)
    fleet.hear(state(running=1), SETTLE_SECONDS + 0.2)
    assert only(fleet, 0.5).batch == 2, "the older one is the one that grew"


def test_a_burst_between_heartbeats_spreads() -> None:
    fleet, random = Fleet(), Random(3)
    for name in ("w-a", "w-b", "w-c", "w-d"):
        fleet.hear(state(name), 0.0)
    placed: dict[str, int] = {}
    for _ in range(16):
        decision = choose(RouteRequest(1, "pool", 400, []), fleet.available("pool", 0.1), {}, {}, random)
        assert decision.worker is not None
        fleet.place(decision.worker, 400, decision.new_tokens, 0.1)
        placed[decision.worker] = placed.get(decision.worker, 0) + 1
    assert placed == dict.fromkeys(("w-a", "w-b", "w-c", "w-d"), 4)


def test_a_just_started_worker_gets_its_share_and_not_everything() -> None:
    fleet, random = Fleet(), Random(4)
    fleet.hear(state("w-old", running=4), 0.0)
    fleet.hear(state("w-new"), 0.0)
    chosen = []
    for _ in range(8):
        decision = choose(RouteRequest(1, "pool", 400, []), fleet.available("pool", 0.1), {}, {}, random)
        if decision.worker is not None:
            fleet.place(decision.worker, 400, decision.new_tokens, 0.1)
            chosen.append(decision.worker)
    assert chosen.count("w-old") >= 3
    assert chosen.count("w-new") >= 3
