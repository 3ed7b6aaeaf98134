"""What a gateway knows of the model it serves: its names, tokenizer, context length and end tokens. Reads files; loads no weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.gateway.text import Tokenizer
from shared.messages import MAX_REQUEST_TOKENS
from shared.model_files import ModelError


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model in the API."""

    name: str  # in the API
    pool: str  # in subjects and metrics
    tokenizer: Tokenizer
    context_tokens: int  # prompt + output, as the model was trained
    vocabulary_size: int
    eos_ids: tuple[int, ...]
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


def _ids(value: Any) -> list[int]:
    return [id for id in (value if isinstance(value, list) else [value]) if isinstance(id, int) and not isinstance(id, bool)]
