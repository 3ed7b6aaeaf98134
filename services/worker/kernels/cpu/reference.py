"""The C++ operators in torch, with the same arguments: the standard they are tested against, and the way without a compiler.

Cache pages are `keys` [kv_heads, blocks, head_dim, LANES] and `values` [kv_heads, blocks, LANES, head_dim].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from services.worker.kernels import cpu as kernels


def linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, features: int, wide: bool) -> torch.Tensor:
    """Return `x` [rows, in] times a packed weight, [rows, features], in float32 if `wide`."""
    weight = kernels.unpack(packed, x.shape[1]).flatten(0, 1)[:features]
    return F.linear(x.float(), weight.float()) if wide else F.linear(x, weight, bias)


def gated_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, features: int) -> torch.Tensor:
    """Return SiLU(x × gate) × (x × up), [rows, features]; `bias` holds the gate's, then the other's."""
    gate, up = (one.flatten(0, 1)[:features] for one in kernels.unpack(packed, x.shape[1]).unflatten(1, (2, -1)).unbind(1))
    return gated_silu(F.linear(x, torch.cat([gate, up]), bias))


def gated_silu(gate_up: torch.Tensor) -> torch.Tensor:
    """Return SiLU(first half) × second half along the last dimension."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return RMSNorm (arXiv 1910.07467) of each row."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return weight * wide.to(x.dtype)


def add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (RMSNorm of x + residual, x + residual)."""
    residual = x + residual
    return norm(residual, weight, epsilon), residual


def attention(
    qkv: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    table: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Rotate queries and keys, write the new keys and values to their slots, and attend causally over each sequence's pages.

    `qkv` [tokens, (heads + 2 × kv_heads) × head_dim]; `cosines` and `sines` float32 [positions, head_dim]; `positions` and `slots` int64
    [tokens]; `starts` int32 [sequences + 1]; `lengths` int32 [sequences]; `table` int32 [sequences, blocks].
    Returns [tokens, heads × head_dim].
    """
    kv_heads, _, dim, lanes = keys.shape
    tokens = qkv.shape[0]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    q, k, v = qkv.view(tokens, -1, dim).split([heads, kv_heads, kv_heads], dim=1)
    c, s = cosines[positions][:, None].to(qkv.dtype), sines[positions][:, None].to(qkv.dtype)
    q, k = _rotate(q, c, s), _rotate(k, c, s)
    keys.transpose(2, 3)[:, slots // lanes, slots % lanes] = k.transpose(0, 1)
    values[:, slots // lanes, slots % lanes] = v.transpose(0, 1)
    out = torch.empty_like(q)
    borders = starts.tolist()
    for i, length in enumerate(lengths.tolist()):
        pages = table[i, : -(-length // lanes)].long()
        seen_keys = keys.index_select(1, pages).transpose(2, 3).flatten(1, 2)[:, :length]
        seen_values = values.index_select(1, pages).flatten(1, 2)[:, :length]
        out[borders[i] : borders[i + 1]] = _attend(q[borders[i] : borders[i + 1]], seen_keys, seen_values)
    return out.view(tokens, heads * dim)


def _rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cosines + torch.cat([-high, low], dim=-1) * sines


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
