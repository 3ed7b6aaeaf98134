"""Which tokens of which sequences the next step runs. Pure Python: no tensors, no clock, no I/O.

There are no phases (after vLLM v1): each sequence's `computed` chases its `tokens`, so chunked prefill, prefix hits, preemption and
resumption are one case. The order within a step is Sarathi's (arXiv 2403.02310): decodes, then started prefills, then new sequences.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import replace
from itertools import islice, pairwise

from services.worker.engine.block_pool import BlockPool
from services.worker.engine.sequence import Draw, Entry, Progress, Sequence, StepOutput, StepPlan
from shared.hashing import extend_hashes
from shared.messages import PRIORITIES, Finish, Priority

PRIORITY_HANDICAP_SECONDS = 30.0  # a request overtakes those of the next class that arrived up to so much earlier: batch always moves


class NeverFits(ValueError):
    """The sequence could not run even if it had the whole pool to itself."""


def order(priority: Priority, arrived_seconds: float) -> float:
    """Return the sort key of a request: earlier and more urgent is lower. It never changes, so waiting lists stay sorted."""
    return arrived_seconds + PRIORITIES.index(priority) * PRIORITY_HANDICAP_SECONDS


def _key(sequence: Sequence) -> float:
    return sequence.order


class Scheduler:
    """Continuous batching over one block pool: at most `slots` sequences at once and `step_tokens` tokens in a step."""

    def __init__(self, pool: BlockPool, *, slots: int, step_tokens: int, context_tokens: int) -> None:
        self.pool = pool
        self.slots = slots
        self.step_tokens = step_tokens
        self.context_tokens = min(context_tokens, pool.size * pool.block_size)
        self.running: list[Sequence] = []  # both sorted by order
        self.waiting: list[Sequence] = []
        self._by_request: dict[str, Sequence] = {}
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def queued_prefill_tokens(self) -> int:
        """Tokens that must be run before every sequence here is decoding."""
        return sum(sequence.pending - 1 for sequence in self.running) + sum(sequence.pending for sequence in self.waiting)

    def find(self, request: str) -> Sequence | None:
        """Return the live sequence of a request."""
        return self._by_request.get(request)

    def sequences(self) -> list[Sequence]:
        """Return every live sequence."""
        return [*self.running, *self.waiting]

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            NeverFits: prompt and output together exceed the context or the pool.
            ValueError: the request is here already.
        """
        total = sequence.prompt_length + sequence.max_tokens
        if total > self.context_tokens + 1 or len(sequence.tokens) > self.context_tokens:  # the last token needs no cache
            raise NeverFits(f"{total} tokens, at most {self.context_tokens} fit")
        if sequence.request in self._by_request:
            raise ValueError(f"request {sequence.request} is here already")
        self._by_request[sequence.request] = sequence
        insort(self.waiting, sequence, key=_key)

    def end(self, sequence: Sequence, finish: Finish, error: str | None = None) -> Progress:
        """Remove a live sequence for another reason than its own tokens."""
        self.remove(sequence)
        return Progress(sequence.request, sequence.attempt, sequence.gateway, sequence.output_length, [], finish, error)

    def remove(self, sequence: Sequence) -> None:
        """Forget a live sequence and release its blocks."""
        del self._by_request[sequence.request]
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self._release(sequence)

    def plan(self) -> StepPlan:
        """Choose the next step, allocating the blocks it writes to. An empty plan means that nothing is live."""
        entries: list[Entry] = []
        budget = self.step_tokens
        preempted = 0

        def run(sequence: Sequence) -> None:
            nonlocal budget
            count = min(sequence.pending, budget)
            budget -= count
            entries.append(Entry(sequence, sequence.computed, count, samples=count == sequence.pending))

        for sequence in [one for one in self.running if one.pending == 1]:
            if budget == 0:
                break
            if sequence not in self.running:  # preempted for an older one just now
                continue
            while sequence.computed == len(sequence.blocks) * self.pool.block_size and not self.pool.free:
                preempted += 1
                victim = self.running[-1]
                self._preempt(victim)
                if victim is sequence:
                    break
            else:
                if sequence.computed == len(sequence.blocks) * self.pool.block_size:
                    sequence.blocks += self.pool.allocate(1)
                run(sequence)
        for sequence in self.running:
            if budget == 0:
                break
            if sequence.pending > 1:
                run(sequence)
        while self.waiting and budget and not preempted and len(self.running) < self.slots and self._admit(self.waiting[0]):
            sequence = self.waiting.pop(0)
            insort(self.running, sequence, key=_key)
            run(sequence)
        return StepPlan(entries, self.step_tokens - budget, preempted)

    def commit(self, plan: StepPlan, output: StepOutput) -> list[Progress]:
        """Take over the results of a step. A sequence for which there was no token to draw ends with an error."""
        results = []
        draws, scores = iter(output.draws), iter(output.scored)
        for entry in plan.entries:
            sequence, scored = entry.sequence, entry.scored
            sequence.computed += entry.count
            self._publish(sequence)
            news = Progress(sequence.request, sequence.attempt, sequence.gateway, sequence.output_length, [])
            if scored:
                sequence.scored = scored.stop + 1
                news = replace(news, scored_from=scored.start + 1, scored=list(islice(scores, len(scored))))
            if entry.samples:
                news = self._take(sequence, next(draws), news)
            if entry.samples or scored:
                results.append(news)
            if news.finish:
                self.remove(sequence)
        return results

    def _take(self, sequence: Sequence, draw: Draw, news: Progress) -> Progress:
        """Append a drawn token to its sequence."""
        if draw.token is None:
            return replace(news, finish="error", error=draw.error)
        sequence.tokens.append(draw.token)
        if not sequence.told:
            sequence.told = True
            news = replace(news, cached_tokens=sequence.cached_tokens, queue_seconds=sequence.queue_seconds)
        logprobs = [] if draw.logprobs is None else [draw.logprobs]
        return replace(news, tokens=[draw.token], finish=self._finish(sequence, draw.token), logprobs=logprobs)

    def _finish(self, sequence: Sequence, token: int) -> Finish | None:
        if token in sequence.sampling.stop_token_ids:
            return "stop"
        if sequence.output_length >= sequence.max_tokens or len(sequence.tokens) > self.context_tokens:
            return "length"
        return None

    def _admit(self, sequence: Sequence) -> bool:
        """Give a waiting sequence the blocks of all its present tokens, shared ones first; False if they don't fit now."""
        size = self.pool.block_size
        extend_hashes(sequence.hashes, sequence.salt, sequence.tokens, size)
        most = len(sequence.tokens) - 1  # at least one token must be run to sample
        if sequence.scored < sequence.to_score:
            most = max(sequence.scored - 1, 0)  # or to score the next
        hits = self.pool.match(sequence.hashes[: most // size])
        fresh = -(-len(sequence.tokens) // size) - len(hits)
        headroom = min(len(self.running), max(1, self.pool.size // 64))  # else the next decodes would preempt what was just admitted
        if fresh + self.pool.unreferenced(hits) + headroom > self.pool.free:
            return False
        self.pool.acquire(hits)
        sequence.blocks = hits + self.pool.allocate(fresh)
        sequence.computed = len(hits) * size
        sequence.published = len(hits)
        self.prefix_query_tokens += len(sequence.tokens)
        self.prefix_hit_tokens += sequence.computed
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_length)
        return True

    def _publish(self, sequence: Sequence) -> None:
        full = sequence.computed // self.pool.block_size
        if full > sequence.published:
            extend_hashes(sequence.hashes, sequence.salt, sequence.tokens, self.pool.block_size)
            for i in range(sequence.published, full):
                self.pool.publish(sequence.blocks[i], sequence.hashes[i])
            sequence.published = full

    def _preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's blocks away; it starts over later, from whatever the prefix cache still holds by then."""
        self.running.remove(sequence)
        self._release(sequence)
        insort(self.waiting, sequence, key=_key)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.computed = sequence.published = 0

    def check(self) -> None:
        """Verify every invariant of the scheduler and its pool.

        Raises:
            RuntimeError: one is broken; the message says which.
        """
        self.pool.check(sequence.blocks for sequence in self.running)
        size = self.pool.block_size
        for sequence in self.running:
            if not sequence.computed < len(sequence.tokens) or len(sequence.blocks) * size < sequence.computed:
                raise RuntimeError(f"running {sequence.request}: {sequence.computed} computed of {len(sequence.tokens)}")
        if any(sequence.blocks or sequence.computed for sequence in self.waiting):
            raise RuntimeError("a waiting sequence holds blocks")
        if len(self.running) > self.slots:
            raise RuntimeError("more sequences run than there are slots")
        for group in (self.running, self.waiting):
            if any(a.order > b.order for a, b in pairwise(group)):
                raise RuntimeError("a list is out of order")
        if {id(one) for one in self._by_request.values()} != {id(one) for one in self.sequences()}:
            raise RuntimeError("the index and the lists disagree")
