"""A sequence: one request's tokens and how far the engine has got with them. Plain data; the scheduler alone changes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.messages import Finish, Sampling


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` is prompt followed by output. `computed` of them have their keys and values in `blocks`; the rest are still to be run."""

    request: str
    attempt: int
    gateway: str
    tokens: list[int]
    prompt_length: int
    max_tokens: int
    sampling: Sampling
    salt: bytes
    order: float  # lower goes first: arrival time in seconds plus a handicap per priority class
    wall_arrival: float = 0.0  # Unix seconds at the gateway, for queue-time metrics only
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    hashes: list[bytes] = field(default_factory=list)  # of the full blocks of `tokens`, as far as they were needed
    published: int = 0  # leading blocks known to the prefix cache
    cached_tokens: int | None = None  # prompt tokens found in the prefix cache at first admission
    queue_seconds: float | None = None  # from the gateway to the first step that runs it
    told: bool = False  # whether the two above have been reported

    @property
    def pending(self) -> int:
        """Tokens still to be run before the next one can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length


@dataclass(frozen=True, slots=True)
class Entry:
    """A sequence's share of a step: run `count` tokens from position `start`; sample the next one if that reaches the last token."""

    sequence: Sequence
    start: int
    count: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step runs: decodes, then chunks of started prefills, then new sequences."""

    entries: list[Entry]
    tokens: int
    preempted: int

    @property
    def sampled(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.samples]


@dataclass(frozen=True, slots=True)
class Progress:
    """What a step (or its absence) did to a request, for whoever holds its client. `index` is the output position of `tokens[0]`."""

    request: str
    attempt: int
    gateway: str
    index: int
    tokens: list[int]
    finish: Finish | None = None
    error: str | None = None
    cached_tokens: int | None = None
    queue_seconds: float | None = None
