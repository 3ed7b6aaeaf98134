"""Weights from disk: safetensors in Hugging Face naming, or GGUF. Read one tensor at a time, to need little more memory than the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType

from services.worker.models.decoder import Weights
from services.worker.models.description import Description, UnsupportedModel
from shared.gguf_header import GGUFError, read_header

# canonical name -> (Hugging Face, GGUF); a bias is the same name with `.bias` for `.weight`
_TOP = {
    "embedding": ("model.embed_tokens.weight", "token_embd.weight"),
    "norm": ("model.norm.weight", "output_norm.weight"),
    "head": ("lm_head.weight", "output.weight"),
    "rope_divisors": ("", "rope_freqs.weight"),  # in GGUF only
}
_LAYER = {
    "attention_norm": ("input_layernorm", "attn_norm"),
    "q": ("self_attn.q_proj", "attn_q"),
    "k": ("self_attn.k_proj", "attn_k"),
    "v": ("self_attn.v_proj", "attn_v"),
    "o": ("self_attn.o_proj", "attn_output"),
    "mlp_norm": ("post_attention_layernorm", "ffn_norm"),
    "gate": ("mlp.gate_proj", "ffn_gate"),
    "up": ("mlp.up_proj", "ffn_up"),
    "down": ("mlp.down_proj", "ffn_down"),
}


_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


def open_weights(folder: Path, description: Description, dtype: torch.dtype, device: torch.device) -> Weights:
    """Return a function from a canonical name to its tensor, [out, in] for projections.

    Raises:
        UnsupportedModel: no weights in `folder`, or (from the function) one is missing, misshapen or unreadable.
    """
    shards = sorted(folder.glob("*.safetensors"))
    ggufs = sorted(folder.glob("*.gguf"))
    if shards:
        read = _safetensors(folder, shards)
    elif ggufs:
        read = _gguf(ggufs[0], description)
    else:
        raise UnsupportedModel(f"{folder} holds no *.safetensors and no *.gguf")
    column = 0 if shards else 1

    def weights(name: str) -> torch.Tensor:
        stem, kind = (name.removesuffix(".bias"), "bias") if name.endswith(".bias") else (name, "weight")
        if stem in _TOP:
            stored = _TOP[stem][column]
        else:
            _, layer, part = stem.split(".")
            stored = f"{('model.layers', 'blk')[column]}.{layer}.{_LAYER[part][column]}.{kind}"
        try:
            tensor = read(stored)
        except KeyError:
            raise UnsupportedModel(f"{folder}: tensor {stored} is missing") from None
        expected = _shape(stem, kind, description)
        if tuple(tensor.shape) != expected:
            raise UnsupportedModel(f"{folder}: tensor {stored} has shape {list(tensor.shape)}, expected {list(expected)}")
        return tensor.to(device, dtype)

    return weights


def _shape(stem: str, kind: str, of: Description) -> tuple[int, ...]:
    q, kv = of.heads * of.head_dim, of.kv_heads * of.head_dim
    part = stem.rsplit(".", 1)[-1]
    if part == "rope_divisors":
        return (of.head_dim // 2,)
    rows, columns = {
        "embedding": (of.vocabulary, of.hidden),
        "head": (of.vocabulary, of.hidden),
        "q": (q, of.hidden),
        "k": (kv, of.hidden),
        "v": (kv, of.hidden),
        "o": (of.hidden, q),
        "gate": (of.intermediate, of.hidden),
        "up": (of.intermediate, of.hidden),
        "down": (of.hidden, of.intermediate),
    }.get(part, (of.hidden, 0))
    return (rows,) if kind == "bias" or not columns else (rows, columns)


def _safetensors(folder: Path, shards: list[Path]) -> Callable[[str], torch.Tensor]:
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    try:
        files = {shard.name: safe_open(shard, framework="pt") for shard in shards}
        if index.exists():
            where = {name: files[file] for name, file in json.loads(index.read_text())["weight_map"].items()}
        else:
            where = {name: file for file in files.values() for name in file.keys()}  # noqa: SIM118  # not a dict
    except (SafetensorError, OSError, KeyError, json.JSONDecodeError) as error:
        raise UnsupportedModel(f"{folder}: unreadable weights: {error}") from None
    return lambda name: where[name].get_tensor(name)


def _gguf(path: Path, description: Description) -> Callable[[str], torch.Tensor]:
    from gguf.quants import dequantize

    try:
        tensors = read_header(path).tensors
        data = np.memmap(path, mode="r", dtype=np.uint8).view(np.ndarray)
    except (GGUFError, OSError) as error:
        raise UnsupportedModel(f"{path}: unreadable weights: {error}") from None

    def read(name: str) -> torch.Tensor:
        stored = tensors[name]
        raw = data[stored.offset : stored.offset + stored.size_bytes]
        if stored.kind in _PLAIN:
            tensor = torch.frombuffer(bytearray(raw), dtype=_PLAIN[stored.kind]).view(stored.shape)
        else:
            rows = raw.reshape(*stored.shape[:-1], -1)  # quantised blocks lie along the last dimension
            tensor = torch.from_numpy(dequantize(rows, stored.kind))
        if name.endswith(("attn_q.weight", "attn_k.weight", "attn_q.bias", "attn_k.bias")):
            heads = description.heads if "attn_q" in name else description.kv_heads
            # llama.cpp interleaves the two halves of a head for its kind of RoPE
            tensor = tensor.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        return tensor

    return read
