"""The CPU backend: C++ operators where there is a compiler, the same in torch where there is none."""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from services.worker.backends import Batch, LayerCache, Linear, RopeTable
from services.worker.kernels import cpu as kernels
from services.worker.kernels.cpu import reference

log = logging.getLogger(__name__)


def load_operators() -> bool:
    """Load the C++ operators, compiling them if need be; False, with a warning, when this machine cannot."""
    try:
        kernels.load()
    except kernels.NotCompiled as error:
        log.warning("slower operators in torch are used, since those in C++ could not be compiled: %s", error)
        return False
    return True


class CpuBackend:
    """See `Backend`. `compiled` takes the C++ operators, which must have been loaded."""

    def __init__(self, dtype: torch.dtype, *, compiled: bool) -> None:
        self.device = torch.device("cpu")
        self.dtype = dtype
        self._ops: ModuleType | Any = torch.ops.headrace if compiled else reference
        self._attention = self._ops.attention
        self._packed = compiled  # not oneDNN, whose choice of kernel, and so whose rounding, depends on the number of rows

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        if self._packed:
            packed, features, op = kernels.pack(weight), weight.shape[0], self._ops.linear
            return lambda x: op(x, packed, bias, features, False)
        return lambda x: F.linear(x, weight, bias)

    def gated_linear(self, gate: torch.Tensor, up: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        if self._packed:
            packed, features, op = kernels.pack_gated(gate, up), gate.shape[0], self._ops.gated_linear
            return lambda x: op(x, packed, bias, features)
        both = self.linear(torch.cat([gate, up]), bias)
        return lambda x: reference.gated_silu(both(x))

    def head(self, weight: torch.Tensor) -> Linear:
        if self._packed:
            packed, features, op = kernels.pack(weight), weight.shape[0], self._ops.linear
            return lambda x: op(x, packed, None, features, True)
        narrow = self.linear(weight, None)
        return lambda x: narrow(x).float()

    def cache(self, blocks: int, block_size: int, kv_heads: int, head_dim: int) -> LayerCache:
        if block_size != kernels.LANES:
            raise ValueError(f"pages hold {kernels.LANES} tokens here, not {block_size}")
        if head_dim % kernels.LANES:
            self._attention = reference.attention
        # no page is read before it was written, so none is touched before it is needed
        return LayerCache(
            torch.empty(kv_heads, blocks, head_dim, block_size, dtype=self.dtype),
            torch.empty(kv_heads, blocks, block_size, head_dim, dtype=self.dtype),
        )

    def attention(self, qkv: torch.Tensor, rope: RopeTable, cache: LayerCache, batch: Batch) -> torch.Tensor:
        out: torch.Tensor = self._attention(
            qkv,
            rope.cosines,
            rope.sines,
            batch.positions,
            batch.slots,
            batch.query_starts,
            batch.lengths,
            batch.block_table,
            cache.keys,
            cache.values,
        )
        return out

    def norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        out: torch.Tensor = self._ops.norm(x, weight, epsilon)
        return out

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
        out: tuple[torch.Tensor, torch.Tensor] = self._ops.add_norm(x, residual, weight, epsilon)
        return out


def has_fast_bfloat16() -> bool:
    """Whether this CPU multiplies bf16 matrices natively; elsewhere torch emulates it, slowly for a batch."""
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
