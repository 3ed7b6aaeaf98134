"""Drives scheduler and runner directly, without threads or a bus, checking every invariant after every step."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from services.worker.backends.cpu import CpuBackend, load_operators
from services.worker.engine.block_pool import BlockPool
from services.worker.engine.runner import Runner
from services.worker.engine.scheduler import Scheduler
from services.worker.engine.sequence import Sequence
from services.worker.models.decoder import Decoder
from services.worker.models.description import describe
from services.worker.models.loader import open_weights
from shared.messages import Sampling

BLOCK_TOKENS = 16
GREEDY = Sampling(seed=0, temperature=0)


def load_decoder(folder: Path, dtype: torch.dtype, *, compiled: bool | None = None) -> Decoder:
    """Load a model folder on the CPU backend, by default with its C++ operators if they can be had."""
    description = describe(folder)
    backend = CpuBackend(dtype, compiled=load_operators() if compiled is None else compiled)
    return Decoder(description, open_weights(folder, description, dtype, backend.device), backend)


@dataclass
class Bench:
    """One engine without its loop. `run` may be called again: the prefix cache stays warm."""

    decoder: Decoder
    blocks: int = 2048
    slots: int = 16
    step_tokens: int = 512
    preempted: int = 0
    steps: int = 0
    mixed_steps: int = 0  # steps that held both a decode and a part of a prefill
    scheduler: Scheduler = field(init=False)
    runner: Runner = field(init=False)

    def __post_init__(self) -> None:
        pool = BlockPool(self.blocks, BLOCK_TOKENS)
        context = self.decoder.description.context_tokens
        self.scheduler = Scheduler(pool, slots=self.slots, step_tokens=self.step_tokens, context_tokens=context)
        self.runner = Runner(self.decoder, self.blocks, BLOCK_TOKENS)

    def run(self, prompts: list[list[int]], new_tokens: int, samplings: list[Sampling] | None = None) -> list[list[int]]:
        """Return each prompt's output, in the order of `prompts`, which is also their order of arrival."""
        samplings = samplings or [GREEDY] * len(prompts)
        sequences = [
            Sequence(f"r{i}", 0, "g", list(prompt), len(prompt), new_tokens, samplings[i], b"0" * 16, float(i))
            for i, prompt in enumerate(prompts)
        ]
        for sequence in sequences:
            self.scheduler.add(sequence)
        while self.scheduler.has_work:
            plan = self.scheduler.plan()
            counts = [entry.count for entry in plan.entries]
            self.mixed_steps += min(counts) == 1 < max(counts)
            self.preempted += plan.preempted
            self.steps += 1
            self.scheduler.commit(plan, self.runner.run(plan))
            self.scheduler.check()
        if self.scheduler.pool.free != self.blocks:
            raise RuntimeError("blocks are referenced although nothing is live")
        return [sequence.tokens[sequence.prompt_length :] for sequence in sequences]
