"""The one forward pass: a decoder-only transformer as its description says, over any backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from services.worker.backends import Backend, Batch, LayerCache, Linear, RopeTable
from services.worker.models.description import Description, rope_table

Weights = Callable[[str], torch.Tensor]  # canonical name -> tensor in the backend's dtype; see models/loader.py


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: torch.Tensor
    qkv: Linear
    output: Linear
    mlp_norm: torch.Tensor
    gated: Linear
    down: Linear


class Decoder:
    """Weights in the backend's layouts, and the pass over them."""

    def __init__(self, description: Description, weights: Weights, backend: Backend) -> None:
        self.description = description
        self.backend = backend
        self._embedding = weights("embedding")
        self._layers = [self._layer(f"layers.{i}.", weights) for i in range(description.layers)]
        self._norm = weights("norm")
        self._head = backend.head(self._embedding if description.tied_embeddings else weights("head"))
        divisors = weights("rope_divisors") if description.rope.kind == "stored" else None
        cosines, sines = rope_table(description, description.context_tokens, divisors)
        self._rope = RopeTable(cosines.to(backend.device), sines.to(backend.device))

    def _layer(self, prefix: str, weights: Weights) -> Layer:
        of, backend = self.description, self.backend

        def bias(names: list[str], biased: bool) -> torch.Tensor | None:
            return torch.cat([weights(f"{prefix}{name}.bias") for name in names]) if biased else None

        def fused(names: list[str], biased: bool) -> Linear:
            return backend.linear(torch.cat([weights(f"{prefix}{name}") for name in names]), bias(names, biased))

        return Layer(
            attention_norm=weights(f"{prefix}attention_norm"),
            qkv=fused(["q", "k", "v"], of.attention_bias),
            output=fused(["o"], of.output_bias),
            mlp_norm=weights(f"{prefix}mlp_norm"),
            gated=backend.gated_linear(weights(f"{prefix}gate"), weights(f"{prefix}up"), bias(["gate", "up"], of.mlp_bias)),
            down=fused(["down"], of.mlp_bias),
        )

    def new_cache(self, blocks: int, block_size: int) -> list[LayerCache]:
        """Allocate pages for every layer."""
        of = self.description
        return [self.backend.cache(blocks, block_size, of.kv_heads, of.head_dim) for _ in range(of.layers)]

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: list[LayerCache]) -> torch.Tensor:
        """Run the batch, writing its keys and values to `cache`; return what `logits` takes: the states of `batch.output_rows`."""
        ops, epsilon = self.backend, self.description.norm_epsilon
        residual = self._embedding[batch.tokens]
        x = ops.norm(residual, self._layers[0].attention_norm, epsilon)
        for i, layer in enumerate(self._layers):
            x = layer.output(ops.attention(layer.qkv(x), self._rope, cache[i], batch))
            x, residual = ops.add_norm(x, residual, layer.mlp_norm, epsilon)
            x = layer.down(layer.gated(x))
            last = i + 1 == len(self._layers)
            if last:  # only these rows go on
                x, residual = x[batch.output_rows], residual[batch.output_rows]
            x, residual = ops.add_norm(x, residual, self._norm if last else self._layers[i + 1].attention_norm, epsilon)
        return x

    @torch.inference_mode()
    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits, float32 [rows, vocabulary], of `states` [rows, size]."""
        return self._head(states)
