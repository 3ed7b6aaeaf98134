"""Runs a step plan: one flat batch through the decoder, then the sampler. Between the scheduler's Python and the backend's tensors."""

from __future__ import annotations

import numpy as np
import torch

from services.worker.backends import Batch
from services.worker.engine.sampler import logprobs, sample
from services.worker.engine.sequence import StepOutput, StepPlan
from services.worker.models.decoder import Decoder
from shared.messages import TokenLogprobs

_SCORED_ROWS = 64  # of prompts, whose logits are computed at once: 12 MB for a vocabulary of 49 152


class Runner:
    """Owns the decoder and its KV cache of `blocks` blocks."""

    def __init__(self, decoder: Decoder, blocks: int, block_size: int) -> None:
        self.decoder = decoder
        self.block_size = block_size
        self.cache = decoder.new_cache(blocks, block_size)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepOutput:
        """Execute `plan`."""
        sequences = [entry.sequence for entry in plan.sampled]
        states = self.decoder.forward(self.batch(plan), self.cache)
        draws = sample(self.decoder.logits(states[: len(sequences)]), sequences) if sequences else []
        return StepOutput(draws, self._score(plan, states[len(sequences) :]))

    def _score(self, plan: StepPlan, states: torch.Tensor) -> list[TokenLogprobs]:
        """Return the log-probabilities of the prompt tokens that follow `states`, some rows at a time: logits are large."""
        wanted = [(entry.sequence, position) for entry in plan.entries for position in entry.scored]
        result: list[TokenLogprobs] = []
        for first in range(0, len(wanted), _SCORED_ROWS):
            rows = wanted[first : first + _SCORED_ROWS]
            tokens = torch.tensor([sequence.tokens[position + 1] for sequence, position in rows], device=states.device)
            counts = [sequence.sampling.prompt_logprobs or 0 for sequence, _ in rows]
            result += logprobs(self.decoder.logits(states[first : first + len(rows)]), tokens, counts)
        return result

    def batch(self, plan: StepPlan) -> Batch:
        """Lay the entries of `plan` end to end."""
        size, device = self.block_size, self.decoder.backend.device
        tokens = np.empty(plan.tokens, dtype=np.int64)
        positions = np.empty(plan.tokens, dtype=np.int64)
        slots = np.empty(plan.tokens, dtype=np.int64)
        table = np.zeros((len(plan.entries), max(len(entry.sequence.blocks) for entry in plan.entries)), dtype=np.int32)
        starts, sampled, scored = [0], [], []
        for i, entry in enumerate(plan.entries):
            sequence, begin, end = entry.sequence, starts[-1], starts[-1] + entry.count
            tokens[begin:end] = sequence.tokens[entry.start : entry.start + entry.count]
            positions[begin:end] = where = np.arange(entry.start, entry.start + entry.count)
            table[i, : len(sequence.blocks)] = sequence.blocks
            slots[begin:end] = table[i, where // size].astype(np.int64) * size + where % size
            starts.append(end)
            if entry.samples:
                sampled.append(end - 1)
            scored += [begin + position - entry.start for position in entry.scored]
        return Batch(
            tokens=torch.from_numpy(tokens).to(device),
            positions=torch.from_numpy(positions).to(device),
            slots=torch.from_numpy(slots).to(device),
            query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
            lengths=torch.tensor([entry.start + entry.count for entry in plan.entries], dtype=torch.int32, device=device),
            block_table=torch.from_numpy(table).to(device),
            output_rows=torch.tensor(sampled + scored, dtype=torch.int64, device=device),
        )
