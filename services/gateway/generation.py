"""One response: its choices (one request each), their text as it grows, and what it cost. Knows no HTTP."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from services.gateway.admission import Admission
from services.gateway.detokenise import Detokenizer, StopMatcher
from services.gateway.relay import Relay
from services.gateway.request import Failure, Job, OpenRequest
from services.gateway.usage import UsageLog, UsageRecord
from shared.telemetry import GatewayMetrics, prompt_bucket


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a response."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def plain(self) -> dict[str, object]:
        """Return OpenAI's form."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Choice:
    """One sequence of a response: turns its request's tokens into text, and decides where the text ends."""

    def __init__(self, index: int, request: OpenRequest, detokenizer: Detokenizer, stops: Sequence[str], relay: Relay) -> None:
        self.index = index
        self.request = request
        self.completion_tokens = 0
        self.finish_reason: str | None = None
        self.first_at = self.last_at = 0.0  # monotonic seconds of the first and last output tokens seen
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops)
        self._stops = bool(stops)
        self._end_tokens = frozenset(request.job.sampling.stop_token_ids)
        self._relay = relay

    @property
    def prefilled(self) -> bool:
        """Whether its prompt no longer stands in anybody's way."""
        return bool(self.request.tokens) or self.request.ending is not None

    @property
    def failure(self) -> Failure | None:
        """Why it ended without success, if it did."""
        return self.request.failure if self.finish_reason is None else None

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None or self.request.ending in ("failed", "cancelled")

    def advance(self) -> str:
        """Return the text that became certain since the last call, and set `finish_reason` at the end."""
        if self.finish_reason is not None:
            return ""
        tokens = self.request.take()
        if tokens:
            self.last_at = time.monotonic()
            self.first_at = self.first_at or self.last_at
        text = self._until_stop(tokens) if self._stops else self._plain(tokens)
        if self._matcher.hit is None and self.request.ending in ("stop", "length"):
            text += self._matcher.push(self._detokenizer.flush()) + self._matcher.flush()
            self.finish_reason = self.request.ending
        if self._matcher.hit is not None:
            self.finish_reason = "stop"
            self._relay.finish(self.request, "stop")
        return text

    def _plain(self, tokens: list[int]) -> str:
        self.completion_tokens += len(tokens)
        return self._detokenizer.push([token for token in tokens if token not in self._end_tokens]) if tokens else ""

    def _until_stop(self, tokens: list[int]) -> str:
        """Go token by token, so that those after the stop string are not counted."""
        pieces: list[str] = []
        for token in tokens:
            self.completion_tokens += 1
            if token not in self._end_tokens:
                pieces.append(self._matcher.push(self._detokenizer.push([token])))
                if self._matcher.hit is not None:
                    break
        return "".join(pieces)

    def usage(self) -> Usage:
        """Return the tokens so far."""
        prompt = len(self.request.job.prompt)
        return Usage(prompt, self.completion_tokens, min(self.request.cached_tokens or 0, prompt))


class Generation:
    """All choices of one response."""

    def __init__(
        self,
        jobs: Sequence[Job],
        stops: Sequence[str],
        detokenizer: Callable[[], Detokenizer],
        *,
        arrived: float,
        admission: Admission,
        relay: Relay,
        metrics: GatewayMetrics,
        usage_log: UsageLog,
        pool: str,
        tenant: str,
        prefill_window: int,
    ) -> None:
        """Prepare a response. At most `prefill_window` prompt tokens of it wait for their first output token at once: a response of
        many long prompts takes its turn among the others instead of the whole queue.
        """
        self._news = asyncio.Event()
        self.choices = [Choice(i, OpenRequest(job, self._news, arrived), detokenizer(), stops, relay) for i, job in enumerate(jobs)]
        self._admission = admission
        self._relay = relay
        self._metrics = metrics
        self._usage_log = usage_log
        self._pool = pool
        self._tenant = tenant
        self._prefill_window = prefill_window
        self._to_queue = deque(self.choices)
        self._prefilling: list[Choice] = []
        self._closed = False

    def start(self) -> None:
        """Queue the first choices; the others follow while `changes` is read."""
        self._queue_more(patient=False)

    def _queue_more(self, *, patient: bool) -> None:
        self._prefilling = [choice for choice in self._prefilling if not choice.prefilled]
        waiting = sum(len(choice.request.job.prompt) for choice in self._prefilling)
        while self._to_queue:
            choice = self._to_queue[0]
            waiting += len(choice.request.job.prompt)
            if self._prefilling and waiting > self._prefill_window:
                return
            self._prefilling.append(self._to_queue.popleft())
            self._admission.submit(choice.request, patient=patient)

    async def admitted(self, refusal_seconds: float) -> Failure | None:
        """Wait for the first output; or until a worker has accepted a choice and not refused it for `refusal_seconds`.

        Returns the failure if there is one before.
        """
        accepted_at: float | None = None
        while True:
            self._news.clear()
            requests = [choice.request for choice in self.choices]
            failure = next((request.failure for request in requests if request.failure is not None), None)
            if failure is not None or any(choice.prefilled for choice in self.choices):
                return failure
            if accepted_at is None and any(request.admitted for request in requests):
                accepted_at = time.monotonic()
            try:
                async with asyncio.timeout(None if accepted_at is None else accepted_at + refusal_seconds - time.monotonic()):
                    await self._news.wait()
            except TimeoutError:
                return None

    async def changes(self, silence_seconds: float) -> AsyncIterator[list[tuple[Choice, str]]]:
        """Yield new text per choice until all are done; an empty list after every `silence_seconds` without any.

        Whatever is ready by then comes in one piece.
        """
        pending = self.choices
        yielded_at = time.monotonic()
        while pending:
            self._news.clear()
            changes = [(choice, text) for choice in pending if (text := choice.advance()) or choice.done]
            pending = [choice for choice in pending if not choice.done]
            if changes:
                yield changes
                yielded_at = time.monotonic()
            if not pending:
                return
            self._queue_more(patient=True)
            try:
                async with asyncio.timeout(yielded_at + silence_seconds - time.monotonic()):
                    await self._news.wait()
            except TimeoutError:
                yield []
                yielded_at = time.monotonic()

    def usage(self) -> Usage:
        """Return the tokens of all choices so far."""
        each = [choice.usage() for choice in self.choices]
        return Usage(sum(u.prompt_tokens for u in each), sum(u.completion_tokens for u in each), sum(u.cached_tokens for u in each))

    def close(self) -> None:
        """Stop what still runs and account for everything. Never blocks; the second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._to_queue.clear()
        for choice in self.choices:
            self._relay.close(choice.request)
            self._account(choice)

    def _account(self, choice: Choice) -> None:
        request, metrics, usage = choice.request, self._metrics, choice.usage()
        failure = choice.failure
        if not request.admitted:
            if failure is None:
                metrics.requests.labels(self._pool, "cancelled").inc()
            elif failure.code not in ("too_large", "kv_capacity"):  # those are counted as bad requests
                metrics.refused.labels(failure.code if failure.code in ("queue_full", "timeout") else "unavailable").inc()
            return
        outcome = "error" if failure is not None else choice.finish_reason or "cancelled"
        metrics.requests.labels(self._pool, outcome).inc()
        tokens = {"prompt": usage.prompt_tokens, "cached": usage.cached_tokens, "completion": len(request.tokens)}
        for kind, count in tokens.items():
            metrics.tokens.labels(self._pool, kind).inc(count)
        bucket = prompt_bucket(usage.prompt_tokens)
        if choice.first_at:
            metrics.ttft.labels(self._pool, bucket).observe(choice.first_at - request.arrived)
        if choice.completion_tokens > 1:
            metrics.tpot.labels(self._pool, bucket).observe((choice.last_at - choice.first_at) / (choice.completion_tokens - 1))
        if request.queue_seconds is not None:
            metrics.queue.labels(self._pool).observe(request.queue_seconds)
            self._admission.waited(request.queue_seconds)
        self._usage_log.record(
            UsageRecord(self._tenant, self._pool, usage.prompt_tokens, len(request.tokens), usage.cached_tokens, time.time())
        )
