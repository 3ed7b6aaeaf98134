"""transformers as the oracle: the same weights, read by its own code, float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def load_oracle(folder: Path) -> Any:
    """Load the model in `folder` (safetensors, or a GGUF that transformers dequantises itself)."""
    from transformers import AutoModelForCausalLM

    files = sorted(folder.glob("*.gguf"))
    extra = {"gguf_file": files[0].name} if files else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa", **extra).eval()


@torch.inference_mode()
def oracle_logits(oracle: Any, tokens: list[int], last: int) -> torch.Tensor:
    """Return float32 logits [last, vocabulary] at the last positions of `tokens`."""
    logits: torch.Tensor = oracle(torch.tensor([tokens]), logits_to_keep=last).logits
    return logits[0].float()


def greedy_choices(oracle: Any, prompt: list[int], output: list[int]) -> list[int]:
    """Return what the oracle picks at each position of `output`, given everything before it.

    Equality with `output` is equality of greedy generation, by induction, at the price of one forward pass.
    """
    return [int(token) for token in oracle_logits(oracle, prompt + output[:-1], len(output)).argmax(-1)]
