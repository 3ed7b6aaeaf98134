"""What a request asks to be done to its logits before a token is drawn: penalties, biases, bans. Vectorised over the batch.

In vLLM's order: repetition penalty (CTRL, arXiv 1909.05858) over prompt and output, frequency and presence penalties (OpenAI's) over the
output, bias, and last what must not come: stop tokens before `min_tokens`, and the token that would complete a bad word.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as List

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from services.worker.engine.sequence import Sequence


class _Edits:
    """Places in a batch of logits, with a value for each. Ids outside the vocabulary have no place."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._places: list[NDArray[np.int64]] = []
        self._values: list[NDArray[np.float32]] = []

    def add(self, row: int, ids: ArrayLike, values: ArrayLike) -> None:
        """Note one value per id, or one for all."""
        ids = np.asarray(ids, np.int64)
        known = ids < self._vocabulary
        self._places.append(row * self._vocabulary + ids[known])
        self._values.append(np.broadcast_to(np.asarray(values, np.float32), ids.shape)[known])

    def __bool__(self) -> bool:
        return bool(self._places)

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places in the flattened logits, and the values."""
        places, values = np.concatenate(self._places), np.concatenate(self._values)
        return torch.from_numpy(places).to(device), torch.from_numpy(values).to(device)


def adjust(logits: torch.Tensor, sequences: List[Sequence]) -> None:
    """Change `logits` [sequences, vocabulary] float32, contiguous, in place as each sequence's sampling says."""
    repetition, counted, bias, banned = (_Edits(logits.shape[-1]) for _ in range(4))
    for row, one in enumerate(sequences):
        asked = one.sampling
        if asked.repetition_penalty != 1:
            repetition.add(row, np.unique(np.array(one.tokens)), asked.repetition_penalty)
        if asked.frequency_penalty or asked.presence_penalty:
            ids, counts = np.unique(np.array(one.output, np.int64), return_counts=True)
            counted.add(row, ids, asked.frequency_penalty * counts + asked.presence_penalty)
        if asked.logit_bias:
            bias.add(row, list(asked.logit_bias), list(asked.logit_bias.values()))
        if asked.min_tokens or asked.bad_words:
            banned.add(row, list(_banned(one)), -np.inf)
    flat = logits.view(-1)
    if repetition:
        at, penalty = repetition.tensors(logits.device)
        flat[at] = torch.where(flat[at] > 0, flat[at] / penalty, flat[at] * penalty)
    if counted:
        at, penalty = counted.tensors(logits.device)
        flat[at] -= penalty
    if bias:
        at, values = bias.tensors(logits.device)
        flat[at] += values
    if banned:
        at, values = banned.tensors(logits.device)
        flat[at] = values


def _banned(sequence: Sequence) -> Iterator[int]:
    asked, output = sequence.sampling, sequence.output
    if len(output) < asked.min_tokens:
        yield from asked.stop_token_ids
    for word in asked.bad_words:
        before = word[:-1]
        if not before or output[-len(before) :] == before:
            yield word[-1]
