"""The CPU backend in plain torch: prepacked oneDNN projections in bf16, and attention that reads only the pages it needs."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F

from services.worker.backends import Batch, LayerCache, Linear, RopeTable

_PACK_ROWS = 16  # oneDNN lays a weight out for an expected number of rows; measured to serve other numbers as well


class CpuBackend:
    """See `Backend`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.device = torch.device("cpu")
        self.dtype = dtype
        self._prepack = dtype == torch.bfloat16 and torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        if not self._prepack:
            return lambda x: F.linear(x, weight, bias)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
        apply = torch.ops.mkldnn._linear_pointwise.default
        return lambda x: apply(x, packed, bias, "none", [], "")

    def cache(self, blocks: int, block_size: int, kv_heads: int, head_dim: int) -> LayerCache:
        shape = (kv_heads, blocks, block_size, head_dim)
        # no page is read before it was written, so none is touched before it is needed
        return LayerCache(torch.empty(shape, dtype=self.dtype), torch.empty(shape, dtype=self.dtype))

    def attention(self, qkv: torch.Tensor, rope: RopeTable, cache: LayerCache, batch: Batch) -> torch.Tensor:
        kv_heads, _, block_size, dim = cache.keys.shape
        tokens = qkv.shape[0]
        heads = qkv.shape[1] // dim - 2 * kv_heads
        q, k, v = qkv.view(tokens, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
        cosines, sines = rope.cosines[batch.positions][:, None], rope.sines[batch.positions][:, None]
        q, k = _rotate(q, cosines, sines), _rotate(k, cosines, sines)
        cache.keys.view(kv_heads, -1, dim).index_copy_(1, batch.slots, k.transpose(0, 1))
        cache.values.view(kv_heads, -1, dim).index_copy_(1, batch.slots, v.transpose(0, 1))
        out = torch.empty_like(q)
        for s, length in enumerate(batch.lengths):
            start, end = batch.query_starts[s], batch.query_starts[s + 1]
            pages = batch.blocks[s][: -(-length // block_size)]
            out[start:end] = _attend(q[start:end], _gather(cache.keys, pages, length), _gather(cache.values, pages, length))
        return out.view(tokens, heads * dim)

    def norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        return weight * wide.to(x.dtype)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
        residual = x + residual
        return self.norm(residual, weight, epsilon), residual

    def gated_silu(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


def has_fast_bfloat16() -> bool:
    """Whether this CPU multiplies bf16 matrices natively; where oneDNN only emulates it, float32 is faster for a batch."""
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def _rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cosines + torch.cat([-high, low], dim=-1) * sines


def _gather(pages: torch.Tensor, ids: list[int], length: int) -> torch.Tensor:
    """Return [kv_heads, length, head_dim]: without a copy when the blocks happen to be consecutive."""
    if ids[-1] - ids[0] == len(ids) - 1 and all(b == a + 1 for a, b in pairwise(ids)):
        chosen = pages[:, ids[0] : ids[-1] + 1]
    else:
        chosen = pages.index_select(1, torch.tensor(ids))
    return chosen.flatten(1, 2)[:, :length]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend `q` [new, heads, dim], the last positions, over `k` and `v` [kv_heads, length, dim], causally. Returns [new, heads, dim]."""
    new, heads, dim = q.shape
    kv_heads, length = k.shape[0], k.shape[1]
    group = heads // kv_heads
    if new == 1:  # the heads of a group are rows of one query matrix, so keys are read once
        out = F.scaled_dot_product_attention(q.view(kv_heads, group, dim)[None], k[None], v[None])
        return out.view(1, heads, dim)
    mask = None
    if new < length:
        mask = torch.ones(new, length, dtype=torch.bool).tril(length - new)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], attn_mask=mask, is_causal=mask is None, enable_gqa=group > 1
    )
    return out[0].transpose(0, 1)
