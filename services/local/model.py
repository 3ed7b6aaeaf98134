"""Finds the model that is to be served, and fetches it when it is missing and known where from."""

from __future__ import annotations

from pathlib import Path

from services.local import fetch
from services.local.console import Console
from shared.model_files import ModelError, ModelFolder, ModelMissing, locate


def find_or_fetch(model: str, state_dir: Path, served_name: str, console: Console) -> ModelFolder:
    """Return the model's folder.

    Raises:
        ModelError: it is missing and cannot be fetched, or it is broken.
    """
    try:
        return locate(model, state_dir, served_name)
    except ModelError as error:
        if model not in fetch.CATALOGUE and not model.startswith("hf:"):
            raise (fetch.unknown(model) if isinstance(error, ModelMissing) else error) from None
    with console.step(f"fetching {model}") as step:
        fetch.pull(model, state_dir, step.note)
    return locate(model, state_dir, served_name)
