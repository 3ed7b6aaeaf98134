"""Draws follow the analytic distribution and depend on (logits, seed, position) alone."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.engine.sampler import sample, uniform
from services.worker.engine.sequence import Draw, Sequence
from shared.messages import Sampling

DRAWS = 40_000


def sequence(sampling: Sampling, prompt: list[int], output: list[int] | None = None) -> Sequence:
    return Sequence("r", 0, "g", prompt + (output or []), len(prompt), 1000, sampling, b"s" * 16, 0.0)


def tokens(logits: torch.Tensor, samplings: list[Sampling], positions: list[int] | range) -> list[int | None]:
    rows = [sequence(one, [0] * position) for one, position in zip(samplings, positions, strict=True)]
    return [draw.token for draw in sample(logits.clone(), rows)]


def distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Temperature, min-p, then top-k, then top-p of what is left: the textbook way, over the whole vocabulary."""
    probability = torch.softmax(logits.double() / sampling.temperature, -1)
    ranked, ids = probability.sort(descending=True)
    ranked[ranked < sampling.min_p * ranked[0]] = 0
    if sampling.top_k:
        ranked[sampling.top_k :] = 0
    ranked /= ranked.sum()
    ranked[(ranked.cumsum(-1) - ranked) >= sampling.top_p] = 0
    return torch.zeros_like(probability).scatter(0, ids, ranked / ranked.sum())


def assert_drawn_from(expected: np.ndarray[tuple[int], np.dtype[np.float64]], drawn: list[int | None]) -> None:
    """Chi-square test of the draws against expected counts."""
    observed = np.bincount(np.array(drawn, dtype=np.int64), minlength=len(expected))
    assert observed[expected == 0].sum() == 0
    common = expected >= 5
    rest_expected, rest_observed = expected[~common].sum(), observed[~common].sum()
    chi = ((observed[common] - expected[common]) ** 2 / expected[common]).sum()
    degrees = common.sum() - 1
    if rest_expected >= 5:
        chi, degrees = chi + (rest_observed - rest_expected) ** 2 / rest_expected, degrees + 1
    # Wilson–Hilferty: chi-square's 1 − 1e-5 quantile
    assert chi < degrees * (1 - 2 / (9 * degrees) + 4.265 * (2 / (9 * degrees)) ** 0.5) ** 3


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k", "min_p", "vocabulary"),
    [
        (1.0, 1.0, 0, 0.0, 50),
        (0.5, 1.0, 0, 0.0, 50),
        (2.0, 0.8, 0, 0.0, 50),
        (1.0, 1.0, 5, 0.0, 50),
        (1.3, 0.7, 9, 0.0, 50),
        (1.0, 1.0, 0, 0.05, 50),
        (1.5, 0.8, 20, 0.02, 50),
        (2.0, 0.95, 0, 0.0, 2000),
        (2.0, 0.9, 700, 0.0, 2000),
        (2.0, 1.0, 0, 0.01, 2000),
        (2.0, 0.9, 900, 0.001, 2000),
    ],
)
def test_matches_the_distribution(temperature: float, top_p: float, top_k: int, min_p: float, vocabulary: int) -> None:
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary + top_k)) * 2
    sampling = Sampling(seed=12345, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    drawn: list[int | None] = []
    for start in range(0, DRAWS, 1000):
        drawn += tokens(logits.expand(1000, -1), [sampling] * 1000, range(start, start + 1000))
    assert_drawn_from(distribution(logits, sampling).numpy() * DRAWS, drawn)


def adjusted(logits: torch.Tensor, one: Sequence) -> torch.Tensor:
    """Penalties and bias the textbook way, token by token."""
    logits, asked, output = logits.double().clone(), one.sampling, one.tokens[one.prompt_length :]
    for token in set(one.tokens):
        logits[token] = logits[token] / asked.repetition_penalty if logits[token] > 0 else logits[token] * asked.repetition_penalty
    for token in set(output):
        logits[token] -= asked.frequency_penalty * output.count(token) + asked.presence_penalty
    for token, bias in asked.logit_bias.items():
        logits[token] += bias
    return logits


PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.8},
    {"presence_penalty": 1.2},
    {"frequency_penalty": -0.7},
    {"presence_penalty": -0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    {"logit_bias": {3: 2.5, 7: -100.0, 11: -1.0}},
    {"logit_bias": {3: 2.5}, "frequency_penalty": 1.0, "min_p": 0.05},
]


@pytest.mark.parametrize("asked", PENALTIES, ids=[" ".join(one) for one in PENALTIES])
def test_penalised_draws_match_the_distribution(asked: dict[str, Any]) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(9))
    rows = [sequence(Sampling(seed=i, **asked), [1, 2, 3, 3, 1], [3, 5, 5, 5, 7]) for i in range(DRAWS)]
    expected = distribution(adjusted(logits, rows[0]), rows[0].sampling).numpy() * DRAWS
    drawn: list[int | None] = []
    for start in range(0, DRAWS, 1000):
        drawn += [draw.token for draw in sample(logits.repeat(1000, 1), rows[start : start + 1000])]
    assert_drawn_from(expected, drawn)


def test_what_is_banned_never_comes() -> None:
    logits = torch.zeros(6, 10)
    logits[:, 4], logits[:, 5] = 9.0, 5.0
    greedy: dict[str, Any] = {"seed": 0, "temperature": 0}
    rows = [
        sequence(Sampling(**greedy, stop_token_ids=[4], min_tokens=2), [1], [2]),
        sequence(Sampling(**greedy, stop_token_ids=[4], min_tokens=2), [1], [2, 2]),
        sequence(Sampling(**greedy, bad_words=[[4]]), [1]),
        sequence(Sampling(**greedy, bad_words=[[2, 3, 4]]), [1], [2, 3]),
        sequence(Sampling(**greedy, bad_words=[[2, 3, 4]]), [2, 3]),
        sequence(Sampling(**greedy, bad_words=[[2, 3, 4], [99]], logit_bias={4: -100.0, 1000: 100.0}), [1], [3, 2]),
    ]
    assert [draw.token for draw in sample(logits, rows)] == [5, 4, 5, 5, 4, 5]


def test_nothing_left_to_draw_is_an_error_of_that_row_alone() -> None:
    everything = Sampling(seed=0, stop_token_ids=[0, 1, 2], min_tokens=1)
    assert sample(torch.zeros(2, 3), [sequence(everything, [1]), sequence(Sampling(seed=0, temperature=0), [1])]) == [
        Draw(None, "nothing_allowed"),
        Draw(0),
    ]


def test_logprobs_are_the_models_own() -> None:
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(1))
    logits[0, 17] = -torch.inf
    expected = torch.log_softmax(logits.double(), -1)
    rows = [
        sequence(Sampling(seed=1, temperature=0.5, logprobs=3, logit_bias={17: 100.0}), [5]),
        sequence(Sampling(seed=2, temperature=0), [5]),
        sequence(Sampling(seed=3, temperature=0, logprobs=0), [5]),
    ]
    first, second, third = sample(logits.clone(), rows)
    assert first.logprobs is not None
    assert first.logprobs.top == expected[0].topk(3).indices.tolist()
    assert first.logprobs.top_logprobs == pytest.approx(expected[0].topk(3).values.tolist(), abs=1e-5)
    assert first.token is not None
    assert first.logprobs.logprob == pytest.approx(max(float(expected[0, first.token]), -9999.0), abs=1e-5)
    assert second == Draw(int(logits[1].argmax()))
    assert third.logprobs is not None
    assert third.logprobs.logprob == pytest.approx(float(expected[2].max()), abs=1e-5)
    assert third.logprobs.top == third.logprobs.top_logprobs == []


def test_alone_or_in_a_mixed_batch() -> None:
    chance = Random(3)
    logits = torch.randn(32, 49152, generator=torch.Generator().manual_seed(3)) * 3
    rows = [
        sequence(
            Sampling(
                seed=i * 7,
                temperature=[0.0, 0.7, 1.0, 1.5][i % 4],
                top_p=[1.0, 0.9, 0.5][i % 3],
                top_k=[0, 40, 1, 0, 3000][i % 5],
                logprobs=[None, 0, 5][i % 3],
                **{"min_p": [0.0, 0.0, 0.01][i % 3]} | (PENALTIES[i % 9] if i % 9 < len(PENALTIES) else {}),
            ),
            chance.choices(range(3000), k=50),
            chance.choices(range(3000), k=i),
        )
        for i in range(32)
    ]
    together = sample(logits.clone(), rows)
    alone = [sample(logits[i : i + 1].clone(), [rows[i]])[0] for i in range(32)]
    assert together == alone  # log-probabilities to the last bit
    plain = [i for i, row in enumerate(rows) if row.sampling.temperature == 0 and i % 9 >= len(PENALTIES)]
    assert len(plain) > 1
    assert all(together[i].token == int(logits[i].argmax()) for i in plain)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_give_no_token(bad: float) -> None:
    logits = torch.zeros(3, 10)
    logits[1, 4] = bad
    logits[2] = -torch.inf
    hot = Sampling(seed=0, logprobs=2)
    for sampling in (Sampling(seed=0, temperature=0), hot):
        draws = sample(logits.clone(), [sequence(sampling, [1])] * 3)
        assert draws[0].token is not None
        assert draws[1:] == [Draw(None, "not_finite")] * 2


def test_a_masked_token_is_never_drawn() -> None:
    logits = torch.full((500, 64), -torch.inf)
    logits[:, 7] = logits[:, 63] = 0.0
    assert set(tokens(logits, [Sampling(seed=5)] * 500, range(500))) == {7, 63}


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
