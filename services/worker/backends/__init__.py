"""The one hardware seam. Everything a decoder needs from a device stands here; scheduler, cache and sampler logic are the same on all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

Linear = Callable[[torch.Tensor], torch.Tensor]  # [tokens, in] -> [tokens, out]


@dataclass(frozen=True, slots=True)
class Batch:
    """The flat batch of one step: all new tokens of all sequences, concatenated, and where their keys and values live.

    Tensors are on the backend's device. Position i of sequence s lies in block `block_table[s, i // block_size]`.
    """

    tokens: torch.Tensor  # int64 [tokens]
    positions: torch.Tensor  # int64 [tokens]
    slots: torch.Tensor  # int64 [tokens]: block × block_size + offset, where a token's key and value are written
    query_starts: torch.Tensor  # int32 [sequences + 1]: sequence s owns tokens query_starts[s] … query_starts[s + 1]
    lengths: torch.Tensor  # int32 [sequences]: keys that its last token attends to, itself included
    block_table: torch.Tensor  # int32 [sequences, most blocks of one]: block ids, at least enough for its length
    output_rows: torch.Tensor  # int64 [rows]: tokens whose states are wanted


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer, in a layout that is the backend's own."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Cosines and sines, each float32 [positions, head_dim]."""

    cosines: torch.Tensor
    sines: torch.Tensor


class Backend(Protocol):
    """Operators in one dtype on one device. Hidden states are [tokens, features]."""

    device: torch.device
    dtype: torch.dtype

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Prepare a projection by `weight` [out, in]; the backend may keep it in a layout of its own."""

    def gated_linear(self, gate: torch.Tensor, up: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Prepare SiLU(x × gate) × (x × up), of weights [out, in]; `bias` [2 × out] holds the gate's, then the other's."""

    def head(self, weight: torch.Tensor) -> Linear:
        """Prepare the projection to logits, by `weight` [vocabulary, in]; its result is float32."""

    def cache(self, blocks: int, block_size: int, kv_heads: int, head_dim: int) -> LayerCache:
        """Allocate one layer's pages."""

    def attention(self, qkv: torch.Tensor, rope: RopeTable, cache: LayerCache, batch: Batch) -> torch.Tensor:
        """Rotate queries and keys, write the new keys and values, and attend causally over each sequence's pages.

        `qkv` is [tokens, (heads + 2 × kv_heads) × head_dim]; the result is [tokens, heads × head_dim].
        """

    def norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """RMSNorm (arXiv 1910.07467)."""

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (RMSNorm of x + residual, x + residual)."""
