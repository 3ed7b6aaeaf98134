"""The gateway's parts, wired together: what every endpoint works with. Knows no HTTP."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from services.gateway.admission import Admission
from services.gateway.fleet import Fleet
from services.gateway.generation import Generation
from services.gateway.model import ServedModel
from services.gateway.openai.errors import ContextTooLong, ModelNotFound, Unavailable, shorten
from services.gateway.openai.schemas import Options
from services.gateway.relay import Relay
from services.gateway.request import Failure, Job
from services.gateway.usage import UsageLog
from shared import subjects
from shared.bus import Bus, BusUnavailable
from shared.hashing import cache_salt
from shared.keys import DEFAULT_TENANT
from shared.messages import Sampling
from shared.settings import Settings
from shared.telemetry import GatewayMetrics

T = TypeVar("T")

_OFF_LOOP_CHARACTERS = 2000  # about a millisecond of tokenising
_TOKENISING_THREADS = 2
_PREFILL_WINDOW = 8192  # prompt tokens per worker that one response may have in front of its first outputs


class Gateway:
    """One gateway process on a connected bus."""

    def __init__(self, settings: Settings, model: ServedModel, bus: Bus) -> None:
        self.settings = settings
        self.model = model
        self.bus = bus
        self.id = subjects.mint("g")
        self.draining = False
        self.metrics = GatewayMetrics([model.pool])
        self.fleet = Fleet(model.pool, settings.worker_silence_seconds, time.monotonic)
        self.relay = Relay(bus, self.id, self.fleet, self.metrics, settings.max_resumes)
        self.admission = Admission(bus, self.relay, settings, model.pool)
        self.usage_log = UsageLog(settings.redis_url, self.metrics.usage_lost)
        self.metrics.open.labels(model.pool).set_function(lambda: self.relay.open_requests)
        secret = settings.server_secret.get_secret_value() or settings.api_key.get_secret_value()
        self._salt = cache_salt(secret.encode(), DEFAULT_TENANT, model.pool)
        self._threads = ThreadPoolExecutor(_TOKENISING_THREADS, thread_name_prefix="tokenise")

    async def start(self) -> None:
        """Create the work queue if nobody has, and listen.

        Raises:
            BusUnavailable: NATS is away or has no JetStream.
        """
        await self.bus.ensure_work_stream(self.settings.queue_depth)
        self.bus.on_reconnect(self._restore_stream)  # before the relay's: it queues requests again
        await self.relay.start(self.admission.resume)
        self.usage_log.start()

    async def stop(self) -> None:
        """End open requests, say goodbye, write usage totals. The bus stays open."""
        self.draining = True
        await self.relay.stop()
        await self.usage_log.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def drain(self) -> None:
        """Take no new requests; those that are open go on."""
        self.draining = True

    def cut(self) -> None:
        """End every open request now: each client is told."""
        self.relay.fail_all(Failure("shutting_down", 1.0))

    async def _restore_stream(self) -> None:
        for _ in range(20):
            try:
                await self.bus.ensure_work_stream(self.settings.queue_depth)
                return
            except BusUnavailable:
                await asyncio.sleep(0.25)

    # what endpoints need

    def check_model(self, name: str) -> None:
        """Raise ModelNotFound unless this gateway serves `name`."""
        if name != self.model.name:
            raise ModelNotFound(f"The model {shorten(name)} does not exist; this gateway serves '{self.model.name}'.", param="model")

    async def tokenise(self, characters: int, work: Callable[[], T]) -> T:
        """Run `work`, off the event loop when it has many `characters` to go through."""
        if characters <= _OFF_LOOP_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def context_tokens(self) -> int:
        """Return the longest prompt + output that can be served now."""
        return min(self.model.context_tokens, self.fleet.context_tokens() or self.model.context_tokens)

    def check_length(self, characters: int, param: str) -> None:
        """Refuse a text that is too long however it is split, before anybody goes to the trouble.

        Raises:
            ContextTooLong: `characters` cannot fit into the context.
        """
        context, tokens = self.context_tokens(), self.model.tokenizer.fewest_tokens(characters)
        if tokens >= context:
            raise ContextTooLong(
                f"This model's maximum context length is {context} tokens. However, the {characters} characters in the {param} make "
                f"at least {tokens} tokens. Please reduce the length of the {param}.",
                param=param,
            )

    def output_budget(self, prompt_tokens: int, wanted: int | None, default: int | None, param: str) -> int:
        """Return how many tokens may be generated: what was asked for, else `default`, else what the context leaves.

        Raises:
            ContextTooLong: the prompt, or prompt + `wanted`, does not fit.
        """
        context = self.context_tokens()
        room = context - prompt_tokens
        if room < (wanted or 1):
            asked = f"{prompt_tokens} in the {param}, {wanted} in the completion" if wanted else f"{prompt_tokens} in the {param}"
            raise ContextTooLong(
                f"This model's maximum context length is {context} tokens. However, you requested "
                f"{prompt_tokens + (wanted or 0)} tokens ({asked}). Please reduce the length of the {param} or completion.",
                param=param,
            )
        return wanted if wanted is not None else min(room, default or room)

    def generate(
        self, options: Options, prompts: Sequence[list[int]], budgets: Sequence[int], arrived: float, *, at_start: bool
    ) -> Generation:
        """Return a response, not started yet. `arrived` is in monotonic seconds; `budgets` are output tokens per prompt.

        Raises:
            Unavailable: this gateway is shutting down.
        """
        if self.draining:
            raise Unavailable("This server is shutting down.", retry_after_seconds=1)
        now = time.time() - (time.monotonic() - arrived)
        jobs = [
            Job(
                request=subjects.mint("r"),
                prompt=prompt,
                max_tokens=budget,
                sampling=self._sampling(options),
                priority=options.priority,
                salt=self._salt,
                arrived_at=now,
            )
            for prompt, budget in zip(prompts, budgets, strict=True)
        ]
        return Generation(
            jobs,
            options.stops,
            lambda: self.model.tokenizer.detokenizer(at_start=at_start),
            arrived=arrived,
            admission=self.admission,
            relay=self.relay,
            metrics=self.metrics,
            usage_log=self.usage_log,
            pool=self.model.pool,
            tenant=DEFAULT_TENANT,
            prefill_window=_PREFILL_WINDOW * max(1, len(self.fleet.alive())),
        )

    def _sampling(self, options: Options) -> Sampling:
        seed = secrets.randbits(63) if options.seed is None else options.seed & (1 << 63) - 1
        defaults = self.model.sampling
        return Sampling(
            seed=seed,
            temperature=defaults.temperature if options.temperature is None else options.temperature,
            top_p=defaults.top_p if options.top_p is None else options.top_p,
            top_k=defaults.top_k if options.top_k is None else options.top_k,
            stop_token_ids=[] if options.ignore_eos else list(self.model.eos_ids),
        )
