"""A sequence: one request's tokens and how far the engine has got with them. Plain data; the scheduler alone changes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shared.messages import Finish, Sampling, TokenLogprobs


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
    scored: int = 0  # leading prompt tokens whose log-probabilities were reported, where they are wanted

    @property
    def pending(self) -> int:
        """Tokens still to be run before the next one can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def to_score(self) -> int:
        """Prompt tokens whose log-probabilities are wanted: all, or none."""
        return self.prompt_length if self.sampling.prompt_logprobs is not None else 0


@dataclass(frozen=True, slots=True)
class Entry:
    """A sequence's share of a step: run `count` tokens from position `start`; sample the next one if that reaches the last token."""

    sequence: Sequence
    start: int
    count: int
    samples: bool

    @property
    def scored(self) -> range:
        """Positions in this share whose next token is of the prompt and still to be scored: that token's log-probability is wanted."""
        return range(max(self.start, self.sequence.scored - 1), min(self.start + self.count, self.sequence.to_score - 1))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step runs: decodes, then chunks of started prefills, then new sequences."""

    entries: list[Entry]
    tokens: int
    preempted: int

    @property
    def sampled(self) -> list[Entry]:
        return [entry for entry in self.entries if entry.samples]


DrawError = Literal["not_finite", "nothing_allowed"]


@dataclass(frozen=True, slots=True)
class Draw:
    """A sampled token; or why there is none: logits with NaN or infinity, or every token forbidden by the request itself."""

    token: int | None
    error: DrawError | None = None
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step computed: one draw for each of `plan.sampled`, and the log-probabilities of each entry's `scored`, in order."""

    draws: list[Draw]
    scored: list[TokenLogprobs] = field(default_factory=list)


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
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of `tokens`, where they are wanted
    scored_from: int = 0  # the prompt position of `scored[0]`
    scored: list[TokenLogprobs] = field(default_factory=list)
