"""What distinguishes one decoder-only transformer from another, as data, read from a Hugging Face `config.json`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


class UnsupportedModel(ValueError):
    """The model needs something that the decoder cannot do; the message names it."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding (arXiv 2104.09864) and how it was stretched.

    Kinds: `default`, `linear`, `llama3`, `yarn` (arXiv 2309.00071), `stored` (the weights hold a divisor for each frequency).
    """

    theta: float
    kind: str
    parameters: Mapping[str, float | bool]


@dataclass(frozen=True, slots=True)
class Description:
    """The Llama family: pre-norm blocks of grouped-query attention and a gated SiLU MLP."""

    family: str
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_epsilon: float
    rope: Rope
    tied_embeddings: bool
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    context_tokens: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values per token for one-byte elements; multiply by the element size."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def describe(folder: Path) -> Description:
    """Read `config.json` in `folder`.

    Raises:
        UnsupportedModel: the file is not such a description, or the decoder does not cover it.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
        return from_config(config)
    except (OSError, json.JSONDecodeError) as error:
        raise UnsupportedModel(f"{folder / 'config.json'}: {error}") from None
    except (KeyError, TypeError) as error:
        raise UnsupportedModel(f"{folder / 'config.json'}: missing or odd field {error}") from None


def from_config(config: Mapping[str, Any]) -> Description:
    """Return the description of a Hugging Face configuration.

    Raises:
        UnsupportedModel: a family or feature that the decoder does not cover.
        KeyError: a field is missing.
    """
    family = config["model_type"]
    if family != "llama":
        raise UnsupportedModel(f"model family {family!r} is not supported; supported: llama")
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedModel(f"activation {config['hidden_act']!r} is not supported; supported: silu")
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    rope = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})  # the second name is transformers 5's
    kind = str(rope.pop("rope_type", None) or rope.pop("type", None) or "default")
    theta = float(rope.pop("rope_theta", None) or config.get("rope_theta") or 10_000.0)
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise UnsupportedModel(f"RoPE scaling {kind!r} is not supported; supported: linear, llama3, yarn")
    if config.get("rope_freqs_in_weights"):  # GGUF of Llama 3 stores the stretch itself, as a divisor for each frequency
        kind = "stored"
    rope.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    bias = bool(config.get("attention_bias", False))
    return Description(
        family=family,
        vocabulary=int(config["vocab_size"]),
        hidden=hidden,
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        intermediate=int(config["intermediate_size"]),
        norm_epsilon=float(config["rms_norm_eps"]),
        rope=Rope(theta, kind, {name: value for name, value in rope.items() if isinstance(value, int | float)}),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        context_tokens=int(config["max_position_embeddings"]),
    )


def rope_table(description: Description, positions: int, divisors: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines, float32 [positions, head_dim], the halves of a head sharing their angles (the layout of Hugging Face).

    `divisors` [head_dim / 2] belong to a rope of kind `stored`.
    """
    rope, dim = description.rope, description.head_dim
    frequencies = rope.theta ** -(torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    if divisors is not None:
        frequencies = frequencies / divisors.float().cpu()
    frequencies, scale = _stretch(frequencies, rope, dim)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos() * scale, angles.sin() * scale


def _stretch(frequencies: torch.Tensor, rope: Rope, dim: int) -> tuple[torch.Tensor, float]:
    """Return the scaled frequencies [head_dim / 2] and the factor on cosines and sines."""
    if rope.kind in ("default", "stored"):
        return frequencies, 1.0
    given = rope.parameters
    factor, original = float(given["factor"]), float(given["original_max_position_embeddings"])
    if rope.kind == "linear":
        return frequencies / factor, 1.0
    if rope.kind == "llama3":
        low, high = float(given["low_freq_factor"]), float(given["high_freq_factor"])
        turns = original * frequencies / (2 * math.pi)  # over the original context
        blend = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - blend) * frequencies / factor + blend * frequencies, 1.0

    def dimension_of(rotations: float) -> float:  # the dimension that turns so often over the original context
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = dimension_of(float(given.get("beta_fast") or 32)), dimension_of(float(given.get("beta_slow") or 1))
    if given.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - first) / max(last - first, 0.001)).clamp(0, 1)

    def magnitude(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    attention = given.get("attention_factor")
    if attention is None:
        over, under = given.get("mscale"), given.get("mscale_all_dim")
        attention = magnitude(factor, float(over)) / magnitude(factor, float(under)) if over and under else magnitude(factor)
    return frequencies / factor * ramp + frequencies * (1 - ramp), float(attention)
