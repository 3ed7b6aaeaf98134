"""From logits to token ids, vectorised over the batch. A draw depends on the row's logits, its seed and its position alone.

Sampling is by inverse CDF with one uniform number per draw, taken from a counter-based generator keyed on (seed, position): no state,
so neither batch mates nor chunking, preemption or resumption on another worker can change a draw.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from shared.messages import Sampling

_CANDIDATES = 256  # a nucleus rarely holds more; only rows whose nucleus does are sorted completely


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each (seed, position): SplitMix64's finaliser (Steele et al., OOPSLA 2014) over both, top 53 bits."""

    def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    golden = np.uint64(0x9E3779B97F4A7C15)
    bits = mix(mix(seeds + golden) + (positions + np.uint64(1)) * golden)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> list[int | None]:
    """Return one token id per row of `logits` [rows, vocabulary], for positions `positions` in prompt + output.

    A row with NaN or +infinity, or nothing but -infinity, gets None: it must never pass for token 0.
    """
    best, tokens = torch.max(logits, dim=-1)
    finite = torch.isfinite(best).tolist()  # the maximum propagates NaN
    rows = [i for i, one in enumerate(samplings) if finite[i] and one.temperature > 0 and one.top_k != 1]
    if rows:
        chosen = [samplings[i] for i in rows]
        drawn = _draw(logits if len(rows) == len(samplings) else logits[rows], chosen, [positions[i] for i in rows])
        tokens[rows] = drawn
    return [int(token) if good else None for token, good in zip(tokens.tolist(), finite, strict=True)]


def _draw(logits: torch.Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> torch.Tensor:
    u = torch.from_numpy(uniform(np.array([one.seed for one in samplings], dtype=np.uint64), np.array(positions, dtype=np.uint64))).to(
        logits.device
    )
    temperature = torch.tensor([one.temperature for one in samplings], dtype=torch.float32, device=logits.device)
    scaled = logits.float() / temperature[:, None].clamp_min(1e-5)
    tokens = torch.empty(len(samplings), dtype=torch.int64, device=logits.device)
    limited = [i for i, one in enumerate(samplings) if one.top_k or one.top_p < 1]
    free = [i for i, one in enumerate(samplings) if not (one.top_k or one.top_p < 1)]
    if free:
        weights = torch.softmax(scaled[free], dim=-1)
        tokens[free] = _invert(weights, u[free])
    vocabulary = logits.shape[-1]
    width = min(_CANDIDATES, vocabulary)
    while limited:  # each round sorts more candidates for the rows that need them
        undecided = []
        rows = scaled[limited]
        values, ids = torch.topk(rows, width, dim=-1)
        share = torch.exp(values - torch.logsumexp(rows, dim=-1, keepdim=True))  # true probabilities of the candidates
        k = torch.tensor([min(samplings[i].top_k or vocabulary, vocabulary) for i in limited], device=logits.device)
        p = torch.tensor([samplings[i].top_p for i in limited], dtype=torch.float64, device=logits.device)
        share = share.double().masked_fill(torch.arange(width, device=logits.device) >= k[:, None], 0)
        within_k = torch.where(k <= width, share.sum(-1), torch.ones_like(p))  # the nucleus is taken of what top-k leaves (all: 1)
        before = share.cumsum(-1) - share
        kept = share.masked_fill(before >= (p * within_k)[:, None], 0)
        enough = (k <= width) | ((k == vocabulary) & (share.sum(-1) >= p))
        picks = torch.gather(ids, 1, _invert(kept, u[limited])[:, None])[:, 0]
        for row, i in enumerate(limited):
            if bool(enough[row]):
                tokens[i] = picks[row]
            else:
                undecided.append(i)
        limited, width = undecided, min(width * 16, vocabulary)
    return tokens


def _invert(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Return for each row the index where its cumulative weight first exceeds u × total; never an index of zero weight."""
    cumulative = weights.double().cumsum(-1)
    target = (u * cumulative[:, -1])[:, None]
    index = torch.searchsorted(cumulative, target, right=True)[:, 0]
    last = (weights > 0).int().flip(-1).argmax(-1)  # rounding could carry u × total past the end
    return torch.minimum(index, weights.shape[-1] - 1 - last)
