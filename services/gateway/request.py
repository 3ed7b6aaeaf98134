"""One open request: what was asked, every token so far, which attempt is live. Pure state; the relay and admission change it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Literal

from shared.messages import Extras, Priority, Sampling, WorkRequest

Ending = Literal["stop", "length", "cancelled", "failed"]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request ended without success.

    `code` is one of: queue_full, unavailable, timeout (no worker took it in time), worker_lost (too many times), kv_capacity (no
    worker can ever hold it), invalid (a worker refused it), too_large (for one message), shutting_down, or internal.
    """

    code: Literal["queue_full", "unavailable", "timeout", "worker_lost", "kv_capacity", "invalid", "too_large", "shutting_down", "internal"]
    retry_after_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence to generate, as a client asked for it."""

    request: str
    prompt: list[int]
    max_tokens: int
    sampling: Sampling
    priority: Priority
    salt: bytes
    arrived_at: float  # Unix seconds


@dataclass(slots=True, eq=False)
class OpenRequest:
    """The gateway's side of a request, from admission to its one end."""

    job: Job
    news: asyncio.Event  # set at every change that the response has to look at; may be shared by the requests of one response
    arrived: float  # monotonic seconds
    deadline: float = 0.0  # monotonic seconds: of the live attempt, to be accepted
    attempt: int = 0
    resumes: int = 0
    excluded: list[str] = field(default_factory=list)  # workers that lost it
    placed_on: str | None = None  # the worker whose own queue holds it; None: the shared queue
    sequence: int | None = None  # of the queued message in the stream
    worker: str | None = None  # which accepted the live attempt
    accepted: asyncio.Event = field(default_factory=asyncio.Event)  # of the live attempt; a new one each attempt
    admitted: bool = False  # some attempt was accepted
    tokens: list[int] = field(default_factory=list)  # the output so far
    taken: int = 0  # of which the response has seen so many
    cached_tokens: int | None = None
    queue_seconds: float | None = None
    ending: Ending | None = None
    failure: Failure | None = None

    @property
    def id(self) -> str:
        return self.job.request

    def work(self, gateway: str, pool: str, start_by: float) -> WorkRequest:
        """Return the message for the live attempt: the prompt and all output so far. `start_by` in Unix seconds."""
        return WorkRequest(
            version=1,
            request=self.job.request,
            attempt=self.attempt,
            gateway=gateway,
            pool=pool,
            priority=self.job.priority,
            tokens=self.job.prompt + self.tokens,
            prompt_length=len(self.job.prompt),
            max_tokens=self.job.max_tokens,
            sampling=self.job.sampling,
            salt=self.job.salt,
            arrived_at=self.job.arrived_at,
            start_by=start_by,
        )

    def begin_attempt(self) -> None:
        """Leave the live attempt behind: whatever still comes of it is old."""
        self.attempt += 1
        self.worker = self.placed_on = self.sequence = None
        self.accepted.set()  # wakes whoever waited for the old attempt
        self.accepted = asyncio.Event()

    def accept(self, worker: str) -> None:
        """Note that `worker` runs the live attempt."""
        self.worker = worker
        self.admitted = True
        self.accepted.set()
        self.news.set()

    def append(self, tokens: list[int], extras: Extras | None) -> None:
        """Take new output."""
        self.tokens += tokens
        if extras is not None:  # only the first attempt that produced something tells what the client's prompt cost
            self.cached_tokens = extras.cached_tokens if self.cached_tokens is None else self.cached_tokens
            self.queue_seconds = extras.queue_seconds if self.queue_seconds is None else self.queue_seconds
        if tokens:
            self.news.set()

    def take(self) -> list[int]:
        """Return the output that was not taken yet."""
        new = self.tokens[self.taken :]
        self.taken = len(self.tokens)
        return new

    def complete(self) -> Ending | None:
        """Return how the output so far would end, if a lost worker had only its last word left to say."""
        if self.tokens and self.tokens[-1] in self.job.sampling.stop_token_ids:
            return "stop"
        return "length" if len(self.tokens) >= self.job.max_tokens else None

    def end(self, ending: Ending, failure: Failure | None = None) -> bool:
        """End once; False when it had ended already."""
        if self.ending is not None:
            return False
        self.ending, self.failure = ending, failure
        self.accepted.set()
        self.news.set()
        return True
