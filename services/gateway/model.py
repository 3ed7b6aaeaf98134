"""What a gateway knows of the model it serves: its names, tokenizer, context length and end tokens. Reads files; loads no weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from services.gateway.text import Tokenizer
from shared.messages import MAX_REQUEST_TOKENS
from shared.model_files import ModelError


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """How tokens are drawn where a request does not say: as the model's makers recommend, else as OpenAI's API does."""

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit

    @classmethod
    def of(cls, generation: dict[str, Any]) -> SamplingDefaults:
        """Take what a generation_config.json recommends; what is missing or out of the API's range counts as not said."""
        temperature, top_p, top_k = (generation.get(name) for name in ("temperature", "top_p", "top_k"))
        said: dict[str, Any] = {}
        if _is_number(temperature) and 0 <= temperature <= 2:
            said["temperature"] = float(temperature)
        if _is_number(top_p) and 0 < top_p <= 1:
            said["top_p"] = float(top_p)
        if _is_number(top_k) and isinstance(top_k, int) and 0 <= top_k < 1 << 31:
            said["top_k"] = top_k
        return cls(**said)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model in the API."""

    name: str  # in the API
    pool: str  # in subjects and metrics
    tokenizer: Tokenizer
    context_tokens: int  # prompt + output, as the model was trained
    vocabulary_size: int
    eos_ids: tuple[int, ...]
    sampling: SamplingDefaults
    created: int  # Unix seconds

    @classmethod
    def load(cls, folder: Path, name: str, pool: str) -> ServedModel:
        """Read a folder in Hugging Face layout.

        Raises:
            ModelError: a file is missing or broken.
        """
        config = _read_json(folder / "config.json")
        config = config.get("text_config") or config
        generation = _read_json(folder / "generation_config.json") if (folder / "generation_config.json").exists() else {}
        tokenizer = Tokenizer.load(folder)
        eos = [*_ids(generation.get("eos_token_id")), *_ids(config.get("eos_token_id")), *tokenizer.eos_ids]
        context = config.get("max_position_embeddings")
        vocabulary = config.get("vocab_size")
        return cls(
            name=name,
            pool=pool,
            tokenizer=tokenizer,
            context_tokens=min(context, MAX_REQUEST_TOKENS) if isinstance(context, int) and context > 0 else MAX_REQUEST_TOKENS,
            vocabulary_size=vocabulary if isinstance(vocabulary, int) and vocabulary > 0 else tokenizer.vocabulary_size,
            eos_ids=tuple(dict.fromkeys(eos))[:64],
            sampling=SamplingDefaults.of(generation),
            created=int((folder / "config.json").stat().st_mtime),
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: not a JSON object")
    return content


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _ids(value: Any) -> list[int]:
    return [id for id in (value if isinstance(value, list) else [value]) if isinstance(id, int) and not isinstance(id, bool)]
