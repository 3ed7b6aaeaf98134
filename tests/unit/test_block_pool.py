"""The block pool's invariants under every kind of use."""

from __future__ import annotations

import pytest

from services.worker.engine.block_pool import BlockPool, OutOfBlocks
from shared.hashing import block_hashes, cache_salt

NAMES = block_hashes(b"salt" * 4, list(range(8 * 4)), 4)


def filled(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.allocate(count)
    for block, name in zip(blocks, NAMES, strict=False):
        pool.publish(block, name)
    return blocks


def test_allocates_lowest_first_and_refuses_whole() -> None:
    pool = BlockPool(4, 4)
    assert pool.allocate(3) == [0, 1, 2]
    with pytest.raises(OutOfBlocks):
        pool.allocate(2)
    assert pool.free == 1
    pool.check([[0, 1, 2]])


def test_released_content_is_found_again_and_shared() -> None:
    pool = BlockPool(8, 4)
    first = filled(pool, 3)
    pool.release(first)
    assert pool.free == 8
    assert pool.match(NAMES) == first
    assert pool.unreferenced(first) == 3
    pool.acquire(first)
    pool.acquire(first[:1])
    assert pool.free == 5
    pool.check([first, first[:1]])


def test_evicts_tails_first_and_least_recently_used() -> None:
    pool = BlockPool(4, 4)
    blocks = filled(pool, 4)
    pool.release(blocks)
    pool.allocate(1)
    assert pool.match(NAMES) == blocks[:3]
    pool.acquire(blocks[:1])
    pool.release(blocks[:1])  # used again: now the youngest
    pool.allocate(2)
    assert pool.match(NAMES) == blocks[:1]


def test_equal_blocks_are_offered_once() -> None:
    pool = BlockPool(4, 4)
    one, two = pool.allocate(1), pool.allocate(1)
    pool.publish(one[0], NAMES[0])
    pool.publish(two[0], NAMES[0])
    assert pool.take_events() == ([NAMES[0]], [])
    pool.release(two)
    assert pool.match(NAMES) == one
    pool.check([one])


def test_events_are_the_net_change() -> None:
    pool = BlockPool(2, 4)
    blocks = filled(pool, 2)
    assert pool.take_events() == (NAMES[:2], [])
    pool.release(blocks)
    again = pool.allocate(1)
    pool.publish(again[0], NAMES[5])
    pool.release(again)
    pool.allocate(2)
    assert pool.take_events() == ([], [NAMES[1], NAMES[0], NAMES[5]])
    assert pool.hashes() == []


def test_releasing_too_often_is_an_error() -> None:
    pool = BlockPool(2, 4)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(RuntimeError, match="released more often"):
        pool.release(blocks)


def test_check_sees_a_lost_reference() -> None:
    pool = BlockPool(2, 4)
    pool.allocate(1)
    with pytest.raises(RuntimeError, match="1 references, sequences hold 0"):
        pool.check([])


def test_hashes_separate_salts_and_positions() -> None:
    secret = b"server secret"
    ours, theirs = cache_salt(secret, "a", "pool"), cache_salt(secret, "b", "pool")
    assert cache_salt(secret, "ab", "c") != cache_salt(secret, "a", "bc")
    tokens = [7] * 12
    assert len(set(block_hashes(ours, tokens, 4) + block_hashes(theirs, tokens, 4))) == 6
    assert block_hashes(ours, tokens[:11], 4) == block_hashes(ours, tokens, 4)[:2]
