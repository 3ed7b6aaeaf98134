"""Which worker has which blocks cached. Knows hashes and event sequences; knows no load, no wire, no clock (times are passed in).

Each worker numbers its block events 1, 2, 3…; a snapshot numbered n is its whole cache after event n. A worker is in step while every
event heard was the next one. Out of step (new, or an event was missed) its blocks are served approximately, and events are also kept
aside until a snapshot arrives to which they can be applied.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shared.messages import BlockEvents, BlockSnapshot


@dataclass(slots=True)
class _Assembly:
    """A snapshot of which the parts before `next_part` have arrived."""

    sequence: int
    parts: int
    next_part: int = 0
    hashes: set[bytes] = field(default_factory=set)


@dataclass(slots=True)
class _Worker:
    bit: int  # 1 << its position in the masks
    capacity: int  # blocks; it cannot cache more
    held: set[bytes] = field(default_factory=set)
    expected: OrderedDict[bytes, float] = field(default_factory=OrderedDict)  # hash -> when to stop expecting it, soonest first
    sequence: int | None = None  # of the last event applied; None: out of step
    later: list[BlockEvents] = field(default_factory=list)  # out of step only: a run of events without gaps
    later_hashes: int = 0
    assembly: _Assembly | None = None


class PrefixIndex:
    """A flat map from block hash to a bit mask of workers. Memory is bounded by the capacities of the workers added."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}
        self._names: list[str | None] = []  # by bit position; None: free
        self._held: dict[bytes, int] = {}
        self._expected: dict[bytes, int] = {}

    def workers(self) -> list[str]:
        """Return the workers followed."""
        return list(self._workers)

    @property
    def blocks(self) -> int:
        """How many different hashes are known to be cached somewhere."""
        return len(self._held)

    def add(self, worker: str, capacity_blocks: int) -> None:
        """Start to follow `worker`, out of step. One followed already stays as it is."""
        if worker in self._workers:
            return
        if None in self._names:
            position = self._names.index(None)
            self._names[position] = worker
        else:
            position = len(self._names)
            self._names.append(worker)
        self._workers[worker] = _Worker(1 << position, capacity_blocks)

    def remove(self, worker: str) -> None:
        """Forget `worker` and all its blocks; unknown ones are ignored."""
        known = self._workers.pop(worker, None)
        if known is None:
            return
        _clear(self._held, known.held, known.bit)
        _clear(self._expected, known.expected, known.bit)
        self._names[known.bit.bit_length() - 1] = None

    def needs_snapshot(self, worker: str) -> bool:
        """Whether `worker` is followed but out of step."""
        known = self._workers.get(worker)
        return known is not None and known.sequence is None

    def doubt(self, worker: str) -> None:
        """Events may have been lost without a later one to show it: take `worker` for out of step."""
        known = self._workers.get(worker)
        if known is not None:
            known.sequence = None

    def apply(self, events: BlockEvents) -> bool:
        """Apply the news of a followed worker (that of others is ignored). True when it came right after a gap."""
        known = self._workers.get(events.worker)
        if known is None:
            return False
        self._drop(known, events.removed)
        self._store(known, events.stored)
        gap = False
        if known.sequence is not None:
            if events.sequence == known.sequence + 1:
                known.sequence = events.sequence
                return False
            known.sequence = None
            gap = True
        self._keep_aside(known, events)
        return gap

    def apply_snapshot(self, snapshot: BlockSnapshot) -> bool:
        """Collect one part. True when it completed a snapshot that was needed and the worker is now in step.

        Parts come in order on one connection; any other part than the next one ends the collection, so that parts of two snapshots
        never mix, and part 0 starts a new one.
        """
        known = self._workers.get(snapshot.worker)
        if known is None or snapshot.part >= snapshot.parts:
            return False
        if known.sequence is not None:
            if snapshot.sequence <= known.sequence:  # another router asked
                return False
            known.sequence = None  # it knows of events that never came
        if snapshot.part == 0:
            known.assembly = _Assembly(snapshot.sequence, snapshot.parts)
        assembly = known.assembly
        if assembly is None or (assembly.sequence, assembly.parts, assembly.next_part) != (
            snapshot.sequence,
            snapshot.parts,
            snapshot.part,
        ):
            known.assembly = None
            return False
        assembly.hashes.update(snapshot.hashes[: max(0, known.capacity - len(assembly.hashes))])
        assembly.next_part += 1
        if assembly.next_part < assembly.parts:
            return False
        known.assembly = None
        return self._replace(known, assembly)

    def expect(self, worker: str, hashes: Iterable[bytes], until: float) -> None:
        """Count `hashes` of a prompt just placed on `worker` as cached there, until events confirm it or `expire(now >= until)`.

        `until` must not be less than in an earlier call.
        """
        known = self._workers.get(worker)
        if known is None:
            return
        for name in hashes:
            if name in known.held:
                continue
            known.expected[name] = until
            known.expected.move_to_end(name)
            self._expected[name] = self._expected.get(name, 0) | known.bit
        while len(known.expected) > known.capacity:
            oldest, _until = known.expected.popitem(last=False)
            _clear(self._expected, (oldest,), known.bit)

    def expire(self, now: float) -> None:
        """Stop expecting what has not been confirmed in time."""
        for known in self._workers.values():
            while known.expected:
                oldest = next(iter(known.expected))
                if known.expected[oldest] > now:
                    break
                del known.expected[oldest]
                _clear(self._expected, (oldest,), known.bit)

    def matched_blocks(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Return for each worker that has any the number of leading `hashes` that it has (or is expected to have) cached."""
        return self._runs(hashes, self._expected)

    def confirmed_blocks(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Return the same without those that are only expected."""
        return self._runs(hashes, {})

    def _runs(self, hashes: Sequence[bytes], expected: Mapping[bytes, int]) -> dict[str, int]:
        matched: dict[str, int] = {}
        held = self._held
        alive = held.get(hashes[0], 0) | expected.get(hashes[0], 0) if hashes else 0
        if not alive:
            return matched
        for length, name in enumerate(hashes):
            mask = held.get(name, 0)
            if alive & ~mask:  # look further only where the common case fails
                mask |= expected.get(name, 0)
                lost = alive & ~mask
                if lost:
                    self._note(matched, lost, length)
                    alive &= mask
                    if not alive:
                        return matched
        self._note(matched, alive, len(hashes))
        return matched

    def _note(self, matched: dict[str, int], mask: int, length: int) -> None:
        while mask:
            position = (mask & -mask).bit_length() - 1
            mask &= mask - 1
            worker = self._names[position]
            if worker is not None:
                matched[worker] = length

    def _store(self, known: _Worker, hashes: Iterable[bytes]) -> None:
        for name in hashes:
            if name in known.held or len(known.held) >= known.capacity:
                continue
            known.held.add(name)
            self._held[name] = self._held.get(name, 0) | known.bit
            if known.expected.pop(name, None) is not None:
                _clear(self._expected, (name,), known.bit)

    def _drop(self, known: _Worker, hashes: Iterable[bytes]) -> None:
        gone = known.held.intersection(hashes)
        known.held -= gone
        _clear(self._held, gone, known.bit)

    def _keep_aside(self, known: _Worker, events: BlockEvents) -> None:
        known.later_hashes += len(events.stored) + len(events.removed)
        # a lost snapshot must not let the run grow for ever; a newer snapshot will do without it
        if (known.later and events.sequence != known.later[-1].sequence + 1) or known.later_hashes > 4 * known.capacity:
            known.later.clear()
            known.later_hashes = len(events.stored) + len(events.removed)
        known.later.append(events)

    def _replace(self, known: _Worker, snapshot: _Assembly) -> bool:
        self._drop(known, known.held - snapshot.hashes)
        self._store(known, snapshot.hashes)
        missed = [events for events in known.later if events.sequence > snapshot.sequence]
        for events in missed:
            self._drop(known, events.removed)
            self._store(known, events.stored)
        if missed and missed[0].sequence != snapshot.sequence + 1:
            return False  # what happened between the snapshot and the events kept aside is not known
        known.sequence = missed[-1].sequence if missed else snapshot.sequence
        known.later.clear()
        known.later_hashes = 0
        return True

    def check(self) -> None:
        """Verify that the map and the workers' own sets agree.

        Raises:
            RuntimeError: they do not.
        """
        for flat, of_worker in ((self._held, lambda w: w.held), (self._expected, lambda w: set(w.expected))):
            wanted: dict[bytes, int] = {}
            for known in self._workers.values():
                for name in of_worker(known):
                    wanted[name] = wanted.get(name, 0) | known.bit
                if len(of_worker(known)) > known.capacity:
                    raise RuntimeError("prefix index: a worker has more blocks than its capacity")
            if wanted != flat:
                raise RuntimeError("prefix index: the map and the workers' sets disagree")


def _clear(masks: dict[bytes, int], hashes: Iterable[bytes], bit: int) -> None:
    for name in hashes:
        rest = masks[name] & ~bit
        if rest:
            masks[name] = rest
        else:
            del masks[name]
