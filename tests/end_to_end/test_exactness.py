"""The engine's greedy output on the real model equals transformers' in float32, token for token, however it was scheduled."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from services.worker.backends.cpu import load_operators
from services.worker.engine.sequence import Entry, Sequence, StepPlan
from services.worker.models.decoder import Decoder
from shared.messages import Sampling
from shared.model_files import ModelFolder
from tests.support.engine import GREEDY, Bench, load_decoder
from tests.support.oracle import greedy_choices, load_oracle, oracle_logits

# chosen around block borders (16), chunk borders (256) and up to 3000
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 127, 128, 129, 255, 256, 257]
LENGTHS += [300, 400, 511, 512, 513, 700, 1000, 1025, 2000, 3000]
NEW_TOKENS = 16


@pytest.fixture(scope="module")
def decoder(smollm: ModelFolder) -> Decoder:
    torch.set_num_threads(2)
    return load_decoder(smollm.path, torch.float32)


@pytest.fixture(scope="module")
def oracle(smollm: ModelFolder) -> Any:
    return load_oracle(smollm.path)


@pytest.fixture(scope="module")
def prompts(smollm: ModelFolder) -> list[list[int]]:
    """30 prompts of English from the licence that comes with this project, in mixed order of length."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    tokens = Tokenizer.from_file(str(smollm.path / "tokenizer.json")).encode(text * 3).ids
    chance = random.Random(7)
    result = []
    for length in chance.sample(LENGTHS, len(LENGTHS)):
        start = chance.randrange(len(tokens) - length)
        result.append(tokens[start : start + length])
    return result


@pytest.fixture(scope="module")
def outputs(decoder: Decoder, prompts: list[list[int]]) -> list[list[int]]:
    """16 at a time, in chunks of at most 256, decodes mixed with prefills."""
    bench = Bench(decoder, slots=16, step_tokens=256)
    result = bench.run(prompts, NEW_TOKENS)
    assert bench.mixed_steps > 5
    return result


def test_equals_transformers(oracle: Any, prompts: list[list[int]], outputs: list[list[int]]) -> None:
    assert sorted(len(prompt) for prompt in prompts) == sorted(LENGTHS)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output) == NEW_TOKENS
        assert greedy_choices(oracle, prompt, output) == output, f"prompt of {len(prompt)} tokens"


def test_same_on_a_warm_prefix_cache_and_with_other_chunks(decoder: Decoder, prompts: list[list[int]], outputs: list[list[int]]) -> None:
    bench = Bench(decoder, slots=7, step_tokens=450)
    assert bench.run(prompts, NEW_TOKENS) == outputs
    cold_hits = bench.scheduler.prefix_hit_tokens
    assert bench.run(prompts, NEW_TOKENS) == outputs
    assert bench.scheduler.prefix_hit_tokens - cold_hits > 0.9 * sum(len(prompt) - 16 for prompt in prompts)


def test_same_under_forced_preemption(decoder: Decoder, oracle: Any, prompts: list[list[int]]) -> None:
    """Each of these ends with 4 or 5 blocks, and the pool has 7."""
    chosen = [prompt for prompt in prompts if 15 <= len(prompt) <= 33]
    bench = Bench(decoder, blocks=7, slots=16, step_tokens=64)
    outputs = bench.run(chosen, 40)
    assert bench.preempted >= 3
    for prompt, output in zip(chosen, outputs, strict=True):
        assert greedy_choices(oracle, prompt, output) == output, f"prompt of {len(prompt)} tokens"


def test_sampled_output_does_not_depend_on_scheduling(decoder: Decoder, prompts: list[list[int]]) -> None:
    chosen = [prompt for prompt in prompts if len(prompt) <= 66]
    samplings = [Sampling(seed=i, temperature=0.8, top_p=[1.0, 0.9][i % 2], top_k=[0, 40][i % 3 == 0]) for i in range(len(chosen))]
    crowded = Bench(decoder, blocks=8, step_tokens=64).run(chosen, 10, samplings)
    alone = [Bench(decoder, blocks=64).run([prompt], 10, [sampling])[0] for prompt, sampling in zip(chosen, samplings, strict=True)]
    assert crowded == alone


def test_bfloat16_output_does_not_depend_on_scheduling(smollm: ModelFolder, prompts: list[list[int]]) -> None:
    """Near ties are common in bf16: one differently rounded sum would show within so many tokens."""
    if not load_operators():
        pytest.skip("torch's own products depend on the number of rows")
    decoder = load_decoder(smollm.path, torch.bfloat16)
    chosen = [prompt for prompt in prompts if len(prompt) <= 700]
    crowded = Bench(decoder, slots=16, step_tokens=200).run(chosen, 48)
    alone = [Bench(decoder, blocks=64).run([prompt], 48)[0] for prompt in chosen]
    assert crowded == alone


def test_bfloat16_logits_stay_close(smollm: ModelFolder, oracle: Any, prompts: list[list[int]]) -> None:
    """Bound: mean KL(float32 ‖ bfloat16) under 2e-3 and the same top token at 95 % of positions, over 500 positions of text."""
    decoder = load_decoder(smollm.path, torch.bfloat16)
    prompt = next(prompt for prompt in prompts if len(prompt) == 513)
    expected = torch.log_softmax(oracle_logits(oracle, prompt, 500), -1)
    bench = Bench(decoder)
    sequence = Sequence("r", 0, "g", prompt, len(prompt), 1, GREEDY, b"0" * 16, 0.0)
    sequence.blocks = bench.scheduler.pool.allocate(-(-len(prompt) // 16))
    batch = bench.runner.batch(StepPlan([Entry(sequence, 0, len(prompt), True)], len(prompt), 0))
    batch = replace(batch, output_rows=torch.arange(len(prompt) - 500, len(prompt)))
    got = torch.log_softmax(decoder.logits(decoder.forward(batch, bench.runner.cache)), -1)
    divergence = (expected.exp() * (expected - got)).sum(-1)
    assert float(divergence.mean()) < 2e-3
    assert float((expected.argmax(-1) == got.argmax(-1)).float().mean()) > 0.95
