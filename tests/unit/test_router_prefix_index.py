"""The prefix index against a naive one, and the rules of being in step."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.prefix_index import PrefixIndex
from shared.messages import BlockEvents, BlockSnapshot

WORKERS = ["w-a", "w-b", "w-c"]
UNIVERSE = 12  # hashes
CAPACITY = 8  # blocks


def h(number: int) -> bytes:
    return number.to_bytes(16, "big")


def hs(*numbers: int) -> list[bytes]:
    return [h(number) for number in numbers]


def events(worker: str, sequence: int, stored: list[bytes] | None = None, removed: list[bytes] | None = None) -> BlockEvents:
    return BlockEvents(1, worker, sequence, stored or [], removed or [])


def snapshot(worker: str, sequence: int, hashes: list[bytes], part: int = 0, parts: int = 1) -> BlockSnapshot:
    return BlockSnapshot(1, worker, sequence, part, parts, hashes)


def in_step_index(worker: str = "w-a", *numbers: int, capacity: int = 100) -> PrefixIndex:
    index = PrefixIndex()
    index.add(worker, capacity)
    assert index.apply_snapshot(snapshot(worker, 0, hs(*numbers)))
    return index


# the naive reference: one set per worker, and a scan


def naive_matched(caches: dict[str, set[bytes]], hashes: list[bytes]) -> dict[str, int]:
    lengths = {}
    for worker, cache in caches.items():
        length = 0
        while length < len(hashes) and hashes[length] in cache:
            length += 1
        if length:
            lengths[worker] = length
    return lengths


@dataclass
class ScriptedWorker:
    """A worker whose cache is the truth, with a lossy wire of its own to the index."""

    name: str
    cache: set[bytes] = field(default_factory=set)
    sequence: int = 0
    wire: list[BlockEvents | BlockSnapshot] = field(default_factory=list)

    def change(self, stored: set[bytes], removed: set[bytes]) -> None:
        removed &= self.cache
        stored = set(sorted(stored - (self.cache - removed))[: CAPACITY - len(self.cache - removed)])
        self.cache = (self.cache - removed) | stored
        self.sequence += 1
        self.wire.append(BlockEvents(1, self.name, self.sequence, sorted(stored), sorted(removed)))

    def send_snapshot(self, parts: int) -> None:
        names = sorted(self.cache)
        self.wire += [snapshot(self.name, self.sequence, names[part::parts], part, parts) for part in range(parts)]


numbers = st.sets(st.integers(0, UNIVERSE - 1).map(h), max_size=4)
steps = st.one_of(
    st.tuples(st.just("change"), st.sampled_from(WORKERS), numbers, numbers),
    st.tuples(st.just("snapshot"), st.sampled_from(WORKERS), st.integers(1, 3)),
    st.tuples(st.just("deliver"), st.sampled_from(WORKERS), st.integers(1, 4)),
    st.tuples(st.just("lose"), st.sampled_from(WORKERS)),
    st.tuples(st.just("leave"), st.sampled_from(WORKERS)),
    st.tuples(st.just("doubt"), st.sampled_from(WORKERS)),
    st.tuples(st.just("ask"), st.lists(st.integers(0, UNIVERSE - 1).map(h), max_size=6)),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(steps, max_size=60))
def test_in_step_the_index_is_the_naive_one_under_gaps_resyncs_and_removals(script: list[tuple[object, ...]]) -> None:
    index = PrefixIndex()
    workers: dict[str, ScriptedWorker] = {}
    history: dict[str, dict[int, set[bytes]]] = {}  # worker -> event -> its cache after that event
    heard: dict[str, int] = {}  # highest event delivered

    def start(name: str) -> ScriptedWorker:
        if name not in workers:
            workers[name] = ScriptedWorker(name)
            history[name] = {0: set()}
            heard[name] = 0
            index.add(name, CAPACITY)
        return workers[name]

    def caches_in_step() -> dict[str, set[bytes]]:
        return {name: history[name][heard[name]] for name in workers if not index.needs_snapshot(name)}

    for step in script:
        match step:
            case ("change", str(name), set(stored), set(removed)):
                worker = start(name)
                worker.change(set(stored), set(removed))
                history[name][worker.sequence] = set(worker.cache)
            case ("snapshot", str(name), int(parts)):
                start(name).send_snapshot(parts)
            case ("deliver", str(name), int(count)):
                worker = start(name)
                for message in worker.wire[:count]:
                    if isinstance(message, BlockEvents):
                        index.apply(message)
                        heard[name] = message.sequence
                    else:
                        index.apply_snapshot(message)
                        if not index.needs_snapshot(name):
                            heard[name] = max(heard[name], message.sequence)
                del worker.wire[:count]
            case ("lose", str(name)):
                worker = start(name)
                del worker.wire[:1]
            case ("leave", str(name)):
                index.remove(name)
                workers.pop(name, None)
            case ("doubt", str(name)):
                index.doubt(name)
            case ("ask", list(asked)):
                got = index.matched_blocks(asked)
                wanted = naive_matched(caches_in_step(), asked)
                assert {name: got[name] for name in got if not index.needs_snapshot(name)} == wanted
                assert set(got) <= set(workers)
        index.check()

    # whatever happened: with nothing lost any more, one snapshot brings every worker into step, and the index is the truth
    for worker in workers.values():
        worker.wire.clear()
        worker.send_snapshot(2)
        worker.change({h(1), h(2)}, {h(3)})
        for message in worker.wire:
            if isinstance(message, BlockEvents):
                assert not index.apply(message)
            else:
                index.apply_snapshot(message)
        assert not index.needs_snapshot(worker.name)
    for first in range(UNIVERSE):
        asked = hs(*range(first, UNIVERSE))
        assert index.matched_blocks(asked) == naive_matched({worker.name: worker.cache for worker in workers.values()}, asked)
    for name in list(workers):
        index.remove(name)
    assert index.blocks == 0


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(WORKERS), numbers, st.sampled_from(["store", "drop", "expect", "expire"])), max_size=40),
    st.lists(st.integers(0, UNIVERSE - 1).map(h), max_size=8),
)
def test_expected_blocks_count_until_they_expire(script: list[tuple[str, set[bytes], str]], asked: list[bytes]) -> None:
    index = PrefixIndex()
    held: dict[str, set[bytes]] = {name: set() for name in WORKERS}
    expected: dict[str, dict[bytes, float]] = {name: {} for name in WORKERS}
    sequence = dict.fromkeys(WORKERS, 0)
    for name in WORKERS:
        index.add(name, UNIVERSE)
        index.apply_snapshot(snapshot(name, 0, []))
    for now, (name, chosen, action) in enumerate(script):
        if action == "expect":
            index.expect(name, sorted(chosen), now + 3.0)
            expected[name] |= dict.fromkeys(chosen - held[name], now + 3.0)
        elif action == "expire":
            index.expire(float(now))
            expected = {worker: {b: until for b, until in blocks.items() if until > now} for worker, blocks in expected.items()}
        else:
            sequence[name] += 1
            stored, removed = (chosen, set[bytes]()) if action == "store" else (set[bytes](), chosen)
            index.apply(events(name, sequence[name], sorted(stored), sorted(removed)))
            held[name] = (held[name] | stored) - removed
            expected[name] = {b: until for b, until in expected[name].items() if b not in stored}
        index.check()
        caches = {worker: held[worker] | set(expected[worker]) for worker in WORKERS}
        for hashes in (asked, *([h(number)] for number in range(UNIVERSE))):
            assert index.matched_blocks(hashes) == naive_matched(caches, hashes)
            assert index.confirmed_blocks(hashes) == naive_matched(held, hashes)


def test_matched_is_the_leading_run() -> None:
    index = in_step_index("w-a", 1, 2, 4)
    index.add("w-b", 100)
    index.apply_snapshot(snapshot("w-b", 7, hs(1, 2, 3, 4)))
    assert index.matched_blocks(hs(1, 2, 3, 4, 5)) == {"w-a": 2, "w-b": 4}
    assert index.matched_blocks(hs(1, 2)) == {"w-a": 2, "w-b": 2}
    assert index.matched_blocks(hs(3)) == {"w-b": 1}
    assert index.matched_blocks(hs(9, 1)) == {}
    assert index.matched_blocks([]) == {}


def test_expected_and_held_blocks_join_into_one_run() -> None:
    index = in_step_index("w-a", 1, 3)
    index.expect("w-a", hs(1, 2, 3, 4), until=5.0)
    assert index.matched_blocks(hs(1, 2, 3, 4, 5)) == {"w-a": 4}
    index.apply(events("w-a", 1, stored=hs(2)))
    index.expire(5.0)
    assert index.matched_blocks(hs(1, 2, 3, 4, 5)) == {"w-a": 3}


def test_a_renewed_expectation_does_not_keep_others_alive() -> None:
    index = in_step_index()
    index.expect("w-a", hs(1), until=1.0)
    index.expect("w-a", hs(2), until=2.0)
    index.expect("w-a", hs(1), until=3.0)
    index.expire(2.0)
    assert index.matched_blocks(hs(1)) == {"w-a": 1}
    assert index.matched_blocks(hs(2)) == {}


def test_a_new_worker_is_out_of_step_whatever_its_first_event_is() -> None:
    index = PrefixIndex()
    index.add("w-a", 100)
    assert index.needs_snapshot("w-a")
    index.apply(events("w-a", 1, stored=hs(1)))
    assert index.needs_snapshot("w-a")
    assert index.matched_blocks(hs(1)) == {"w-a": 1}, "served approximately meanwhile"


@pytest.mark.parametrize("sequence", [0, 3, 5, 9], ids=["backwards", "repeated", "one missing", "many missing"])
def test_any_event_but_the_next_is_a_gap(sequence: int) -> None:
    index = in_step_index()
    assert [index.apply(events("w-a", number)) for number in (1, 2, 3)] == [False] * 3
    assert index.apply(events("w-a", sequence, stored=hs(1)))
    assert index.needs_snapshot("w-a")
    assert not index.apply(events("w-a", sequence + 1)), "one gap is reported once"
    assert index.apply_snapshot(snapshot("w-a", sequence + 1, hs(5)))
    assert index.matched_blocks(hs(5)) == {"w-a": 1}
    assert index.matched_blocks(hs(1)) == {}


def test_events_between_the_parts_of_a_snapshot_are_applied_after_it() -> None:
    index = PrefixIndex()
    index.add("w-a", 100)
    index.apply(events("w-a", 4, stored=hs(1)))
    assert not index.apply_snapshot(snapshot("w-a", 4, hs(1, 2), 0, 2))
    index.apply(events("w-a", 5, stored=hs(9), removed=hs(1)))
    assert index.apply_snapshot(snapshot("w-a", 4, hs(3), 1, 2))
    assert index.matched_blocks(hs(2, 3, 9)) == {"w-a": 3}
    assert index.matched_blocks(hs(1)) == {}
    assert not index.apply(events("w-a", 6)), "event 5 was counted"


def test_a_snapshot_followed_by_a_gap_does_not_count() -> None:
    index = PrefixIndex()
    index.add("w-a", 100)
    index.apply_snapshot(snapshot("w-a", 4, hs(1), 0, 2))
    index.apply(events("w-a", 6, stored=hs(3)))
    assert not index.apply_snapshot(snapshot("w-a", 4, hs(2), 1, 2))
    assert index.needs_snapshot("w-a")
    assert index.matched_blocks(hs(1, 2, 3)) == {"w-a": 3}, "what is known is served"
    assert index.apply_snapshot(snapshot("w-a", 6, hs(2)))
    assert index.matched_blocks(hs(1)) == {}


def test_a_gap_between_the_parts_of_a_snapshot_does_not_count_either() -> None:
    index = PrefixIndex()
    index.add("w-a", 100)
    index.apply_snapshot(snapshot("w-a", 4, hs(1), 0, 2))
    index.apply(events("w-a", 5, stored=hs(3)))
    index.apply(events("w-a", 7, stored=hs(4)))
    assert not index.apply_snapshot(snapshot("w-a", 4, hs(2), 1, 2))
    assert index.needs_snapshot("w-a")


def test_parts_of_two_snapshots_never_mix() -> None:
    index = PrefixIndex()
    index.add("w-a", 100)
    index.apply_snapshot(snapshot("w-a", 4, hs(1), 0, 2))
    assert not index.apply_snapshot(snapshot("w-a", 5, hs(2), 1, 2))
    assert not index.apply_snapshot(snapshot("w-a", 4, hs(2), 1, 2)), "the collection had ended"
    assert index.needs_snapshot("w-a")
    assert index.matched_blocks(hs(1)) == {}
    index.apply_snapshot(snapshot("w-a", 5, hs(6), 0, 2))
    index.apply_snapshot(snapshot("w-a", 5, hs(7), 0, 2))  # asked twice: starts again
    assert index.apply_snapshot(snapshot("w-a", 5, hs(8), 1, 2))
    assert index.matched_blocks(hs(6)) == {}
    assert index.matched_blocks(hs(7, 8)) == {"w-a": 2}


def test_a_snapshot_for_another_router_is_ignored_unless_it_reveals_a_loss() -> None:
    index = in_step_index("w-a", 1)
    index.apply(events("w-a", 1, stored=hs(2)))
    assert not index.apply_snapshot(snapshot("w-a", 0, []))
    assert index.matched_blocks(hs(1, 2)) == {"w-a": 2}
    assert index.apply_snapshot(snapshot("w-a", 3, hs(7)))
    assert index.matched_blocks(hs(1, 2)) == {}
    assert index.matched_blocks(hs(7)) == {"w-a": 1}


def test_nonsense_and_news_of_strangers_change_nothing() -> None:
    index = in_step_index("w-a", 1)
    assert not index.apply(events("w-x", 1, stored=hs(5)))
    assert not index.apply_snapshot(snapshot("w-x", 1, hs(5)))
    assert not index.apply_snapshot(snapshot("w-a", 9, hs(5), 0, 0))
    assert not index.apply_snapshot(snapshot("w-a", 9, hs(5), 3, 2))
    index.expect("w-x", hs(5), 1.0)
    index.remove("w-x")
    index.doubt("w-x")
    assert index.matched_blocks(hs(5)) == {}
    assert not index.needs_snapshot("w-a")
    assert not index.needs_snapshot("w-x")


def test_memory_is_bounded_by_capacity() -> None:
    index = in_step_index(capacity=10)
    for number in range(1, 200):
        index.apply(events("w-a", number, stored=hs(number)))
    index.expect("w-a", hs(*range(300, 500)), 1.0)
    index.check()
    assert index.blocks == 10
    index.doubt("w-a")
    for number in range(200, 400):
        index.apply(events("w-a", number, removed=hs(number)))
    assert sum(len(kept.removed) for kept in index._workers["w-a"].later) <= 41
    index.apply_snapshot(snapshot("w-a", 399, hs(*range(1000, 2000))))
    index.check()
    assert index.blocks == 10


def test_a_removed_workers_place_is_reused_without_its_blocks() -> None:
    index = in_step_index("w-a", 1, 2)
    index.expect("w-a", hs(3), 9.0)
    index.add("w-b", 100)
    index.remove("w-a")
    assert index.blocks == 0
    index.add("w-c", 100)
    index.check()
    assert index.matched_blocks(hs(1, 2, 3)) == {}
    assert index.workers() == ["w-b", "w-c"]
