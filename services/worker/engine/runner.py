"""Runs a step plan: one flat batch through the decoder, then the sampler. Between the scheduler's Python and the backend's tensors."""

from __future__ import annotations

import numpy as np
import torch

from services.worker.backends import Batch
from services.worker.engine.sampler import sample
from services.worker.engine.sequence import StepPlan
from services.worker.models.decoder import Decoder


class Runner:
    """Owns the decoder and its KV cache of `blocks` blocks."""

    def __init__(self, decoder: Decoder, blocks: int, block_size: int) -> None:
        self.decoder = decoder
        self.block_size = block_size
        self.cache = decoder.new_cache(blocks, block_size)

    def run(self, plan: StepPlan) -> list[int | None]:
        """Execute `plan` and return one token for each of `plan.sampled` (None: logits not finite)."""
        logits = self.decoder.forward(self.batch(plan), self.cache)
        sampled = plan.sampled
        return sample(logits, [entry.sequence.sampling for entry in sampled], [entry.start + entry.count for entry in sampled])

    def batch(self, plan: StepPlan) -> Batch:
        """Lay the entries of `plan` end to end."""
        size, device = self.block_size, self.decoder.backend.device
        tokens = np.empty(plan.tokens, dtype=np.int64)
        positions = np.empty(plan.tokens, dtype=np.int64)
        slots = np.empty(plan.tokens, dtype=np.int64)
        table = np.zeros((len(plan.entries), max(len(entry.sequence.blocks) for entry in plan.entries)), dtype=np.int32)
        starts, rows = [0], []
        for i, entry in enumerate(plan.entries):
            sequence, begin, end = entry.sequence, starts[-1], starts[-1] + entry.count
            tokens[begin:end] = sequence.tokens[entry.start : entry.start + entry.count]
            positions[begin:end] = where = np.arange(entry.start, entry.start + entry.count)
            table[i, : len(sequence.blocks)] = sequence.blocks
            slots[begin:end] = table[i, where // size].astype(np.int64) * size + where % size
            starts.append(end)
            if entry.samples:
                rows.append(end - 1)
        return Batch(
            tokens=torch.from_numpy(tokens).to(device),
            positions=torch.from_numpy(positions).to(device),
            slots=torch.from_numpy(slots).to(device),
            query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
            lengths=torch.tensor([entry.start + entry.count for entry in plan.entries], dtype=torch.int32, device=device),
            block_table=torch.from_numpy(table).to(device),
            sample_rows=torch.tensor(rows, dtype=torch.int64, device=device),
        )
