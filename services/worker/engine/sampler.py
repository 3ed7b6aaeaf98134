"""From logits to token ids, vectorised over the batch. A draw depends on the row's logits, its sequence, its seed and its position alone.

Sampling is by inverse CDF with one uniform number per draw, taken from a counter-based generator keyed on (seed, position): no state,
so neither batch mates nor chunking, preemption or resumption on another worker can change a draw. For the same reason every sum over a
vocabulary is one that torch makes row by row.
"""

from __future__ import annotations

from collections.abc import Sequence as List

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.engine.logits import adjust
from services.worker.engine.sequence import Draw, Sequence
from shared.messages import Sampling, TokenLogprobs

_CANDIDATES = 256  # a nucleus rarely holds more; only rows whose nucleus does are sorted completely
_LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot say; OpenAI's choice


def uniform(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each (seed, position): SplitMix64's finaliser (Steele et al., OOPSLA 2014) over both, top 53 bits."""

    def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    golden = np.uint64(0x9E3779B97F4A7C15)
    bits = mix(mix(seeds + golden) + (positions + np.uint64(1)) * golden)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample(logits: torch.Tensor, sequences: List[Sequence]) -> list[Draw]:
    """Return the next token of each sequence, given `logits` [sequences, vocabulary] float32, which are used up.

    A row with NaN or +infinity, or nothing but -infinity, gets no token: it must never pass for token 0.
    """
    finite = torch.isfinite(logits.amax(-1)).tolist()  # the maximum propagates NaN
    asked = [i for i, one in enumerate(sequences) if finite[i] and one.sampling.logprobs is not None]
    raw = logits[asked] if asked else None  # of the model itself, as in vLLM: what is done to the logits is the client's own doing
    adjust(logits, sequences)
    best, tokens = torch.max(logits, dim=-1)
    possible = (best > -torch.inf).tolist()
    rows = [i for i, one in enumerate(sequences) if finite[i] and possible[i] and one.sampling.temperature > 0 and one.sampling.top_k != 1]
    if rows:
        chosen = [sequences[i] for i in rows]
        tokens[rows] = _draw(
            logits if len(rows) == len(sequences) else logits[rows], [one.sampling for one in chosen], [len(one.tokens) for one in chosen]
        )
    found: dict[int, TokenLogprobs] = {}
    if raw is not None:
        found = dict(zip(asked, logprobs(raw, tokens[asked], [sequences[i].sampling.logprobs or 0 for i in asked]), strict=True))
    draws = []
    for i, token in enumerate(tokens.tolist()):
        if not finite[i]:
            draws.append(Draw(None, "not_finite"))
        elif not possible[i]:
            draws.append(Draw(None, "nothing_allowed"))
        else:
            draws.append(Draw(token, None, found.get(i)))
    return draws


def logprobs(logits: torch.Tensor, tokens: torch.Tensor, counts: List[int]) -> list[TokenLogprobs]:
    """Return for each row of `logits` [rows, vocabulary] the log-probability of its token and those of its `counts[row]` best ones."""
    logged = torch.log_softmax(logits, dim=-1).clamp_min(_LEAST_LOGPROB)
    chosen = logged.gather(1, tokens[:, None])[:, 0].tolist()
    best, ids = torch.topk(logged, min(max(counts), logits.shape[-1]), dim=-1)
    return [
        TokenLogprobs(logprob, top[:count], values[:count])
        for logprob, top, values, count in zip(chosen, ids.tolist(), best.tolist(), counts, strict=True)
    ]


def _draw(logits: torch.Tensor, samplings: List[Sampling], positions: List[int]) -> torch.Tensor:
    u = torch.from_numpy(uniform(np.array([one.seed for one in samplings], dtype=np.uint64), np.array(positions, dtype=np.uint64))).to(
        logits.device
    )
    temperature = torch.tensor([one.temperature for one in samplings], dtype=torch.float32, device=logits.device)
    probabilities = torch.softmax(logits / temperature[:, None].clamp_min(1e-5), dim=-1)
    tokens = torch.empty(len(samplings), dtype=torch.int64, device=logits.device)
    limited = [i for i, one in enumerate(samplings) if one.top_k or one.top_p < 1 or one.min_p]
    free = [i for i, one in enumerate(samplings) if not (one.top_k or one.top_p < 1 or one.min_p)]
    if free:
        tokens[free] = _invert(probabilities if len(free) == len(samplings) else probabilities[free], u[free])
    width = min(_CANDIDATES, logits.shape[-1])
    while limited:  # each round looks at more candidates for the rows that need them
        picks, decided = _draw_limited(probabilities[limited], [samplings[i] for i in limited], u[limited], width)
        for pick, i, good in zip(picks, limited, decided, strict=True):
            if good:
                tokens[i] = pick
        limited = [i for i, good in zip(limited, decided, strict=True) if not good]
        width = min(width * 16, logits.shape[-1])
    return tokens


def _draw_limited(probabilities: torch.Tensor, samplings: List[Sampling], u: torch.Tensor, width: int) -> tuple[torch.Tensor, list[bool]]:
    """Draw from the `width` likeliest tokens of each row: first min-p, then top-k, then the nucleus (top-p) of what those leave.

    Returns a token per row, and whether it may count: whether no token beyond the candidates could have been kept.
    """
    device, vocabulary = probabilities.device, probabilities.shape[-1]
    share, ids = torch.topk(probabilities, width, dim=-1)
    share = share.double()
    k = torch.tensor([min(one.top_k or vocabulary, vocabulary) for one in samplings], device=device)
    p = torch.tensor([one.top_p for one in samplings], dtype=torch.float64, device=device)
    least = torch.tensor([one.min_p for one in samplings], dtype=torch.float64, device=device) * share[:, 0]
    whole = (k <= width) | (share[:, -1] < least)  # all that min-p and top-k keep is among the candidates
    share = share.masked_fill((torch.arange(width, device=device) >= k[:, None]) | (share < least[:, None]), 0)
    before = share.cumsum(-1) - share
    kept_share = torch.where(whole, share.sum(-1), 1.0)
    kept = share.masked_fill(before >= (p * kept_share)[:, None], 0)
    decided = whole | ((k == vocabulary) & (least == 0) & (share.sum(-1) >= p))
    return torch.gather(ids, 1, _invert(kept, u)[:, None])[:, 0], decided.tolist()


def _invert(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Return for each row the index where its cumulative weight first exceeds u × total; never an index of zero weight."""
    cumulative = weights.double().cumsum(-1)
    target = (u * cumulative[:, -1])[:, None]
    index = torch.searchsorted(cumulative, target, right=True)[:, 0]
    last = (weights > 0).int().flip(-1).argmax(-1)  # rounding could carry u × total past the end
    return torch.minimum(index, weights.shape[-1] - 1 - last)
