"""The settings of `headrace up`, and what its services inherit from them. Pure but for reading the environment once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Self

from pydantic import ByteSize, Field, SecretStr, model_validator

from shared.machine import total_memory
from shared.settings import NatsUrl, RedisUrl, Settings

_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class UpSettings(Settings):
    """Every service's settings and the launcher's own; an empty server URL means: start one."""

    nats_url: NatsUrl = ""
    redis_url: RedisUrl = ""
    workers: int = Field(default=1, ge=1, le=64, description="worker processes")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.kv_memory * self.workers > total_memory():
            pools = "a KV pool" if self.workers == 1 else f"{self.workers} KV pools"
            raise ValueError(
                f"{pools} of {self.kv_memory.human_readable()} (HEADRACE_KV_MEMORY): "
                f"this machine has {ByteSize(total_memory()).human_readable()}"
            )
        return self


def environment_of(settings: UpSettings, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a service: ours, with what was set here, by flag or otherwise, as HEADRACE_ variables.

    Paths become absolute, since a service may run in another directory.
    """
    environment = dict(inherited)
    for name in settings.model_fields_set:
        value = getattr(settings, name)
        if isinstance(value, SecretStr):
            value = value.get_secret_value()
        environment[f"HEADRACE_{name.upper()}"] = str(value)
    environment["HEADRACE_STATE_DIR"] = str(settings.state_dir.expanduser().absolute())
    environment["HEADRACE_MODEL"] = absolute_model(settings.model)
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


def absolute_model(model: str) -> str:
    """Return a model that is a path as an absolute one, a name as it is."""
    path = Path(model).expanduser()
    return str(path.absolute()) if path.exists() else model


def threads_per_worker(threads: int, workers: int, cores: int) -> int:
    """Return the CPU threads of each worker: as told, else an even share of the cores."""
    return threads or max(1, cores // workers)


def client_host(host: str) -> str:
    """Return the host part of a URL under which a server that listens on `host` is reached from this machine."""
    address = _WILDCARDS.get(host, host)
    return f"[{address}]" if ":" in address else address
