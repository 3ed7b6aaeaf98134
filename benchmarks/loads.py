"""Loads, and what is measured of them, the same for every system under test."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Load:
    """`concurrency` clients send `requests` prompts, each a common prefix and tokens of its own, and read `output` tokens."""

    name: str
    concurrency: int
    requests: int
    shared_prompt: int  # tokens
    own_prompt: int  # tokens
    output: int  # tokens

    def prompts(self, vocabulary: int, seed: int) -> list[list[int]]:
        """Return token-id prompts; another seed gives others, so that no run profits from an earlier one's cache."""
        chance = random.Random(f"{self.name} {seed}")
        low = min(1000, vocabulary // 2)  # above special tokens

        def some(count: int) -> list[int]:
            return [chance.randrange(low, vocabulary) for _ in range(count)]

        shared = some(self.shared_prompt)
        return [shared + some(self.own_prompt) for _ in range(self.requests)]


LOADS = [
    Load("one client", 1, 4, 0, 128, 128),
    Load("16 clients", 16, 32, 0, 128, 128),
    Load("shared prefix", 8, 24, 1024, 32, 32),
    Load("long prompts", 4, 8, 0, 2048, 16),
]


@dataclass(frozen=True, slots=True)
class Timing:
    """One request: when it was sent and when each of its tokens came, in seconds of one clock."""

    sent: float
    tokens: list[float]

    @property
    def ttft(self) -> float:
        return self.tokens[0] - self.sent

    @property
    def tpot(self) -> float:
        """Mean seconds per token after the first."""
        return (self.tokens[-1] - self.tokens[0]) / max(1, len(self.tokens) - 1)


@dataclass(frozen=True, slots=True)
class Result:
    """One run of a load against one system. Seconds, and output tokens per second over the whole run."""

    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    tokens_per_second: float
    longest_gap: float
    cached_tokens: int


def summarise(timings: list[Timing], elapsed_seconds: float, cached_tokens: int = 0) -> Result:
    """Return the percentiles of a run."""
    ttft, tpot = [one.ttft for one in timings], [one.tpot for one in timings]
    return Result(
        percentile(ttft, 50),
        percentile(ttft, 99),
        percentile(tpot, 50),
        percentile(tpot, 99),
        sum(len(one.tokens) for one in timings) / elapsed_seconds,
        max((b - a for one in timings for a, b in pairwise(one.tokens)), default=0.0),
        cached_tokens,
    )


def percentile(values: list[float], percent: float) -> float:
    """Return a percentile, linearly interpolated."""
    ranked = sorted(values)
    place = (len(ranked) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (place - low)


def median_by(results: list[Result]) -> Result:
    """Return the run with the median throughput."""
    return sorted(results, key=lambda one: one.tokens_per_second)[len(results) // 2]
