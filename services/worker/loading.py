"""From settings to a loaded model and a sized KV pool, ready to be driven by an engine."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch
from pydantic import ByteSize

from services.worker.backends.cpu import CpuBackend, has_fast_bfloat16, load_operators
from services.worker.engine.block_pool import BlockPool
from services.worker.engine.runner import Runner
from services.worker.engine.scheduler import Scheduler
from services.worker.models.decoder import Decoder
from services.worker.models.description import Description, describe
from services.worker.models.loader import open_weights
from shared import model_files
from shared.machine import free_memory, total_memory, usable_cores
from shared.settings import Settings

log = logging.getLogger(__name__)

BLOCK_TOKENS = 16
_KV_SHARE = 0.25  # of the memory that is free at start, unless told otherwise
_KV_MOST_BYTES = 4 << 30


class ConfigurationError(ValueError):
    """A setting that this worker cannot run with, in one line."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """A loaded model, ready to be driven."""

    folder: model_files.ModelFolder
    description: Description
    scheduler: Scheduler
    runner: Runner


def build(settings: Settings) -> EngineParts:
    """Load the model and size the KV pool.

    Raises:
        ModelError, UnsupportedModel: there is no such model, or the decoder cannot run it.
        ConfigurationError: device, dtype or memory settings that do not work here.
    """
    began = time.monotonic()
    folder = model_files.locate(settings.model, settings.state_dir, settings.served_name)
    description = describe(folder.path)
    if settings.device == "cuda":
        raise ConfigurationError("device cuda: this build has no GPU backend; use --device cpu")
    torch.set_num_threads(settings.threads or usable_cores())
    compiled = load_operators()
    dtype = _dtype(settings.dtype, compiled=compiled)
    backend = CpuBackend(dtype, compiled=compiled)
    decoder = Decoder(description, open_weights(folder.path, description, dtype, backend.device), backend)
    blocks = _pool_blocks(settings, description.kv_bytes_per_token * dtype.itemsize * BLOCK_TOKENS)
    pool = BlockPool(blocks, BLOCK_TOKENS)
    scheduler = Scheduler(pool, slots=settings.slots, step_tokens=settings.step_tokens, context_tokens=description.context_tokens)
    runner = Runner(decoder, blocks, BLOCK_TOKENS)
    log.info(
        "%s loaded in %.1f s: %s, %d threads, KV pool of %d tokens",
        folder.name,
        time.monotonic() - began,
        str(dtype).removeprefix("torch."),
        torch.get_num_threads(),
        blocks * BLOCK_TOKENS,
    )
    return EngineParts(folder, description, scheduler, runner)


def _dtype(name: str, *, compiled: bool) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if compiled or has_fast_bfloat16() else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def _pool_blocks(settings: Settings, block_bytes: int) -> int:
    """Return how many blocks of `block_bytes` the KV pool gets.

    Raises:
        ConfigurationError: none, or more than this machine could hold.
    """
    memory = settings.kv_memory or min(int(free_memory() * _KV_SHARE), _KV_MOST_BYTES)
    blocks = settings.kv_blocks or memory // block_bytes
    if blocks < 1:
        raise ConfigurationError(f"a KV pool of {_readable(memory)} holds no block, which is {_readable(block_bytes)}")
    if blocks * block_bytes > total_memory():
        raise ConfigurationError(f"a KV pool of {_readable(blocks * block_bytes)}: this machine has {_readable(total_memory())}")
    return blocks


def _readable(size: int) -> str:
    return ByteSize(size).human_readable()
