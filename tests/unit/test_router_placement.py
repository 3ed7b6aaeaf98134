"""The placement function, by table."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from services.router.placement import Decision, Load, choose, cost
from shared.messages import RouteRequest


def load(worker: str, **changes: Any) -> Load:
    fields: dict[str, Any] = {
        "worker": worker,
        "block_size": 16,
        "batch": 0,
        "free_slots": 8,
        "free_blocks": 1000,
        "queued_prefill_tokens": 0,
        "context_tokens": 8192,
    }
    return Load(**(fields | changes))


def request(prompt_tokens: int, excluded: list[str] | None = None) -> RouteRequest:
    return RouteRequest(1, "pool", prompt_tokens, [], excluded or [])


TABLE: list[tuple[str, RouteRequest, list[Load], dict[str, int], Decision]] = [
    # nobody
    ("an empty fleet", request(100), [], {}, Decision(None, "no_worker")),
    ("everyone is excluded", request(100, ["a"]), [load("a")], {"a": 3}, Decision(None, "no_worker")),
    ("no slot", request(100), [load("a", free_slots=0)], {"a": 3}, Decision(None, "no_room")),
    ("more on the way than slots", request(100), [load("a", free_slots=-2)], {"a": 3}, Decision(None, "no_room")),
    ("a block too few", request(100), [load("a", free_blocks=6)], {"a": 3}, Decision(None, "no_room")),
    ("just enough blocks", request(100), [load("a", free_blocks=7)], {"a": 3}, Decision("a", "placed", 48, 52)),
    ("prompt fills the context", request(100), [load("a", context_tokens=100)], {"a": 3}, Decision(None, "no_room")),
    # one
    ("one idle worker", request(100), [load("a")], {}, Decision("a", "placed", 0, 100)),
    ("one left", request(100, ["a"]), [load("a"), load("b")], {}, Decision("b", "placed", 0, 100)),
    ("a match on the only worker", request(100), [load("a")], {"a": 1}, Decision("a", "placed", 16, 84)),
    # cache against load: new × (1 + batch) + queued
    ("the holder of the prefix", request(1000), [load("a"), load("b")], {"b": 50}, Decision("b", "placed", 800, 200)),
    ("the longer prefix", request(1000), [load("a"), load("b")], {"a": 49, "b": 50}, Decision("b", "placed", 800, 200)),
    ("holder busy but worth it", request(1000), [load("a"), load("b", batch=3)], {"b": 50}, Decision("b", "placed", 800, 200)),
    ("holder too busy: 200 × 6", request(1000), [load("a"), load("b", batch=5)], {"b": 50}, Decision("a", "placed", 0, 1000)),
    (
        "holder's queue too long: 200 + 900",
        request(1000),
        [load("a"), load("b", queued_prefill_tokens=900)],
        {"b": 50},
        Decision("a", "placed", 0, 1000),
    ),
    ("holder without room", request(1000), [load("a"), load("b", free_slots=0)], {"b": 50}, Decision("a", "placed", 0, 1000)),
    ("holder excluded", request(1000, ["b"]), [load("a"), load("b")], {"b": 50}, Decision("a", "placed", 0, 1000)),
    ("no match, the smaller batch", request(100), [load("a", batch=2), load("b", batch=1)], {}, Decision("b", "placed", 0, 100)),
    ("no match, the shorter queue", request(100), [load("a", queued_prefill_tokens=1), load("b")], {}, Decision("b", "placed", 0, 100)),
    ("own block size", request(100), [load("a"), load("b", block_size=32)], {"a": 2, "b": 2}, Decision("b", "placed", 64, 36)),
    # the borders
    ("all cached: the last token is computed", request(64), [load("a"), load("b")], {"a": 4}, Decision("a", "placed", 63, 1)),
    ("a match of an unknown worker", request(100), [load("a")], {"z": 5}, Decision("a", "placed", 0, 100)),
]


@pytest.mark.parametrize(("asked", "loads", "matched", "wanted"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_choice(asked: RouteRequest, loads: list[Load], matched: dict[str, int], wanted: Decision) -> None:
    for seed in range(5):  # none of these depends on luck
        assert choose(asked, loads, matched, matched, Random(seed)) == wanted
        assert choose(asked, loads[::-1], matched, matched, Random(seed)) == wanted


def test_cost() -> None:
    assert cost(load("a", batch=3, queued_prefill_tokens=50), 10) == 10 * 4 + 50
    assert cost(load("a", batch=3, queued_prefill_tokens=50), 10, pending_tokens=30) == 10 * 4 + 20
    assert cost(load("a", batch=3, queued_prefill_tokens=50), 10, pending_tokens=80) == 10 * 4


@pytest.mark.parametrize(
    ("confirmed", "wanted"),
    [(0, "a"), (60, "a"), (100, "b")],
    ids=["all being computed", "a part is there", "all there: the queue is someone else's"],
)
def test_a_prefix_being_computed_is_no_queue_to_flee_from(confirmed: int, wanted: str) -> None:
    computing = load("a", batch=1, queued_prefill_tokens=1620 if confirmed == 100 else 1620 - 16 * confirmed)
    decision = choose(request(1620), [computing, load("b")], {"a": 100}, {"a": confirmed} if confirmed else {}, Random(1))
    assert decision.worker == wanted


def test_equal_costs_are_broken_evenly_and_only_among_the_cheapest() -> None:
    random = Random(1)
    matched = dict.fromkeys("abcd", 1)
    loads = [load("a", batch=1), *(load(name) for name in "bcd")]
    chosen = Counter(choose(request(100), loads, matched, matched, random).worker for _ in range(3000))
    assert set(chosen) == {"b", "c", "d"}
    assert all(abs(count - 1000) < 150 for count in chosen.values())


def test_a_new_prompt_has_no_favourite() -> None:
    random = Random(2)
    chosen = Counter(choose(request(1000), [load("a"), load("b")], {}, {}, random).worker for _ in range(1000))
    assert min(chosen["a"], chosen["b"]) > 400
