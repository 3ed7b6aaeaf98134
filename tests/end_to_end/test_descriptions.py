"""Every variant that the Llama description covers, on small random models, against transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from services.worker.backends.cpu import load_operators
from services.worker.models.description import UnsupportedModel, describe, from_config, rope_table
from tests.support.engine import Bench, load_decoder
from tests.support.model import tiny_llama_folder
from tests.support.oracle import greedy_choices, load_oracle

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1, "head_dim": 32},
        {"attention_bias": True, "mlp_bias": True},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 500_000.0}},
        {"rope_parameters": {**YARN, "rope_theta": 10_000.0}},
        {"rope_parameters": {**YARN, "rope_theta": 10_000.0, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.1}},
    ],
    ids=str,
)
def test_equals_transformers(tmp_path: Path, overrides: dict[str, Any]) -> None:
    folder = tiny_llama_folder(tmp_path / "model", **overrides)
    oracle = load_oracle(folder)
    chance = random.Random(0)
    prompts = [[chance.randrange(3, 320) for _ in range(length)] for length in (1, 5, 16, 33, 100, 200)]
    for compiled in {False, load_operators()}:
        outputs = Bench(load_decoder(folder, torch.float32, compiled=compiled), blocks=100, step_tokens=48).run(prompts, 24)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert greedy_choices(oracle, prompt, output) == output


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
    ],
)
def test_what_is_not_covered_is_named(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    config = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 16, **change}
    with pytest.raises(UnsupportedModel, match=named):
        from_config(config)


def test_broken_folders_give_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        describe(tmp_path)
    folder = tiny_llama_folder(tmp_path / "model")
    next(folder.glob("*.safetensors")).write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    with pytest.raises(UnsupportedModel, match="unreadable weights"):
        load_decoder(folder, torch.float32)


def test_a_stretch_stored_as_divisors_equals_the_one_described() -> None:
    config = {"model_type": "llama", "vocab_size": 8, "hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
    config |= {"intermediate_size": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "rope_theta": 500_000.0}
    described = from_config({**config, "rope_scaling": LLAMA3})
    stored = from_config({**config, "rope_freqs_in_weights": True})
    plain_sines, stretched_sines = rope_table(from_config(config), 2)[1][1, :32], rope_table(described, 2)[1][1, :32]
    divisors = plain_sines.double().asin() / stretched_sines.double().asin()  # at position 1 an angle is its frequency
    divisors[0] = 1.0  # arcsin of an angle of 1 is exact enough, but not for long contexts
    for ours, theirs in zip(rope_table(stored, 512, divisors), rope_table(described, 512), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=0)
