"""Draws follow the analytic distribution and depend on (logits, seed, position) alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.worker.engine.sampler import sample, uniform
from shared.messages import Sampling

DRAWS = 40_000


def distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Temperature, then top-k, then top-p of what is left: the textbook way, over the whole vocabulary."""
    probability = torch.softmax(logits.double() / sampling.temperature, -1)
    ranked, ids = probability.sort(descending=True)
    if sampling.top_k:
        ranked[sampling.top_k :] = 0
    ranked /= ranked.sum()
    ranked[(ranked.cumsum(-1) - ranked) >= sampling.top_p] = 0
    return torch.zeros_like(probability).scatter(0, ids, ranked / ranked.sum())


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "vocabulary"),
    [
        (1.0, 1.0, 0, 50),
        (0.5, 1.0, 0, 50),
        (2.0, 0.8, 0, 50),
        (1.0, 1.0, 5, 50),
        (1.3, 0.7, 9, 50),
        (2.0, 0.95, 0, 2000),
        (2.0, 0.9, 700, 2000),
    ],
)
def test_matches_the_distribution(temperature: float, top_p: float, top_k: int, vocabulary: int) -> None:
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary + top_k)) * 2
    sampling = Sampling(seed=12345, temperature=temperature, top_p=top_p, top_k=top_k)
    expected = distribution(logits, sampling).numpy() * DRAWS
    drawn: list[int | None] = []
    for start in range(0, DRAWS, 1000):
        drawn += sample(logits.expand(1000, -1), [sampling] * 1000, list(range(start, start + 1000)))
    observed = np.bincount(np.array(drawn, dtype=np.int64), minlength=vocabulary)
    assert observed[expected == 0].sum() == 0
    common = expected >= 5
    rest_expected, rest_observed = expected[~common].sum(), observed[~common].sum()
    chi = ((observed[common] - expected[common]) ** 2 / expected[common]).sum()
    degrees = common.sum() - 1
    if rest_expected >= 5:
        chi, degrees = chi + (rest_observed - rest_expected) ** 2 / rest_expected, degrees + 1
    # Wilson–Hilferty: chi-square's 1 − 1e-5 quantile
    assert chi < degrees * (1 - 2 / (9 * degrees) + 4.265 * (2 / (9 * degrees)) ** 0.5) ** 3


def test_alone_or_in_a_mixed_batch() -> None:
    logits = torch.randn(32, 3000, generator=torch.Generator().manual_seed(3)) * 3
    samplings = [
        Sampling(seed=i * 7, temperature=[0.0, 0.7, 1.0, 1.5][i % 4], top_p=[1.0, 0.9, 0.5][i % 3], top_k=[0, 40, 1][i % 3])
        for i in range(32)
    ]
    together = sample(logits, samplings, list(range(32)))
    alone = [sample(logits[i : i + 1], [samplings[i]], [i])[0] for i in range(32)]
    assert together == alone
    assert all(together[i] == int(logits[i].argmax()) for i in range(32) if samplings[i].temperature == 0 or samplings[i].top_k == 1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_give_no_token(bad: float) -> None:
    logits = torch.zeros(3, 10)
    logits[1, 4] = bad
    logits[2] = -torch.inf
    greedy, hot = Sampling(seed=0, temperature=0), Sampling(seed=0)
    assert sample(logits, [greedy] * 3, [0] * 3)[1:] == [None, None]
    mixed = sample(logits, [hot] * 3, [0] * 3)
    assert mixed[1:] == [None, None]
    assert mixed[0] is not None


def test_a_masked_token_is_never_drawn() -> None:
    logits = torch.full((500, 64), -torch.inf)
    logits[:, 7] = logits[:, 63] = 0.0
    assert set(sample(logits, [Sampling(seed=5)] * 500, list(range(500)))) == {7, 63}


def test_uniform_numbers() -> None:
    seeds = np.arange(100, dtype=np.uint64).repeat(1000)
    positions = np.tile(np.arange(1000, dtype=np.uint64), 100)
    u = uniform(seeds, positions)
    assert ((u >= 0) & (u < 1)).all()
    assert len(np.unique(u)) == u.size
    assert abs(u.mean() - 0.5) < 0.005
    grid = u.reshape(100, 1000)
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.02
