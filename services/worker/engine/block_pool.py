"""Paging of the KV cache: which block belongs to whom, and which unreferenced blocks still hold a prefix worth keeping. No tensors.

Blocks are in one of three states: referenced; cached (unreferenced, its hash known, evictable); unused. Allocation takes the lowest
unused id first, since a compact pool is what caches and huge pages like, and then evicts cached blocks in LRU order.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class OutOfBlocks(Exception):
    """Fewer unreferenced blocks than asked for; nothing was allocated."""


class BlockPool:
    """A pool of `size` blocks of `block_size` tokens each."""

    def __init__(self, size: int, block_size: int) -> None:
        self.size = size
        self.block_size = block_size
        self._references = [0] * size
        self._hash_of: list[bytes | None] = [None] * size
        self._by_hash: dict[bytes, int] = {}
        self._unused = list(range(size))  # a heap
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._stored: list[bytes] = []
        self._removed: list[bytes] = []

    @property
    def free(self) -> int:
        """Blocks that could be allocated now."""
        return len(self._unused) + len(self._evictable)

    @property
    def cached(self) -> int:
        """Blocks whose content the prefix cache can offer."""
        return len(self._by_hash)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks that hold the longest known prefix of `hashes`, without referencing them."""
        blocks = []
        for name in hashes:
            block = self._by_hash.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def unreferenced(self, blocks: Iterable[int]) -> int:
        """Return how many of `blocks` count as free until they are acquired."""
        return sum(not self._references[block] for block in blocks)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Reference blocks returned by `match`."""
        for block in blocks:
            if not self._references[block]:
                del self._evictable[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks with one reference each and unknown content.

        Raises:
            OutOfBlocks: fewer are free.
        """
        if count > self.free:
            raise OutOfBlocks(f"{count} blocks wanted, {self.free} free")
        blocks = []
        for _ in range(count):
            if self._unused:
                block = heapq.heappop(self._unused)
            else:
                block, _none = self._evictable.popitem(last=False)
                self._forget(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block of a sequence. Its tail becomes evictable before its head, which others more likely share."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] < 0:
                raise RuntimeError(f"block {block} released more often than referenced")
            if not self._references[block]:
                if self._hash_of[block] is None:
                    heapq.heappush(self._unused, block)
                else:
                    self._evictable[block] = None

    def publish(self, block: int, name: bytes) -> None:
        """Offer a referenced, completely computed block under its hash. The first of several equal blocks is the one that is offered."""
        if name not in self._by_hash and self._hash_of[block] is None:
            self._by_hash[name] = block
            self._hash_of[block] = name
            self._stored.append(name)

    def take_events(self) -> tuple[list[bytes], list[bytes]]:
        """Return the net change of the cached hashes since the last call, as (stored, removed)."""
        stored = [name for name in dict.fromkeys(self._stored) if name in self._by_hash]
        removed = [name for name in dict.fromkeys(self._removed) if name not in self._by_hash]
        self._stored, self._removed = [], []
        return stored, removed

    def hashes(self) -> list[bytes]:
        """Return the hashes of all cached blocks."""
        return list(self._by_hash)

    def _forget(self, block: int) -> None:
        name = self._hash_of[block]
        if name is not None:
            del self._by_hash[name]
            self._hash_of[block] = None
            self._removed.append(name)

    def check(self, held: Iterable[Sequence[int]]) -> None:
        """Verify every invariant, given the block lists of all live sequences.

        Raises:
            RuntimeError: one is broken; the message says which.
        """
        expected = Counter(block for blocks in held for block in blocks)
        unused, evictable = set(self._unused), set(self._evictable)

        def must(condition: bool, text: str) -> None:
            if not condition:
                raise RuntimeError(f"block pool: {text}")

        must(len(unused) == len(self._unused), "a block is unused twice")
        must(not unused & evictable, "a block is both unused and cached")
        for block in range(self.size):
            count, name = self._references[block], self._hash_of[block]
            must(count == expected[block], f"block {block} has {count} references, sequences hold {expected[block]}")
            must((count == 0) == (block in unused or block in evictable), f"block {block} is lost or free while referenced")
            must((block in evictable) == (count == 0 and name is not None), f"block {block} is evictable without content, or the reverse")
            must(name is None or self._by_hash.get(name) == block, f"block {block} and its hash disagree")
        must(len(self._by_hash) == sum(name is not None for name in self._hash_of), "a hash names a block that does not know it")
