"""Every setting of every service, each an environment variable HEADRACE_<NAME>."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, ByteSize, Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


def default_state_dir() -> Path:
    """Where `headrace up` keeps models, keys and server data."""
    return Path.home() / ".local" / "share" / "headrace"


def _url(example: str, *schemes: str) -> Callable[[str], str]:
    """Return a check of what is not empty, that does not repeat what it refuses: there may be a password in it."""

    def check(text: str) -> str:
        try:
            parts = urlsplit(text)
            usable = parts.scheme in schemes and (parts.hostname or parts.scheme == "unix") and parts.port != 0
        except ValueError:
            usable = False
        if text and not usable:
            raise ValueError(f"not a URL such as {example}")
        return text

    return check


NatsUrl = Annotated[str, AfterValidator(_url("nats://127.0.0.1:4222", "nats", "tls", "ws", "wss"))]
RedisUrl = Annotated[str, AfterValidator(_url("redis://127.0.0.1:6379/0", "redis", "rediss", "unix"))]


class Settings(BaseSettings):
    """Read once at the start of a process and passed down; nothing else reads the environment."""

    model_config = SettingsConfigDict(env_prefix="HEADRACE_", env_ignore_empty=True, extra="ignore")

    # where things are
    nats_url: NatsUrl = "nats://127.0.0.1:4222"
    redis_url: RedisUrl = "redis://127.0.0.1:6379/0"
    state_dir: Path = Field(default_factory=default_state_dir)
    model: str = Field(default="smollm2-135m", description="a catalogue name, a folder in Hugging Face layout, a GGUF file, or hf:org/name")
    served_name: str = Field(default="", description="the name in the API; by default the model's own")

    # gateway
    host: str = Field(default="127.0.0.1", min_length=1)
    port: int = Field(default=8000, ge=1, le=65535)
    api_key: SecretStr = SecretStr("")
    server_secret: SecretStr = Field(default=SecretStr(""), description="keys the prefix-cache salts; the same on all gateways")
    queue_depth: int = Field(default=256, ge=1, description="messages per work subject before publishers are refused")
    queue_seconds: float = Field(default=60, gt=0, description="longest wait for a worker before a request is refused")
    patience_seconds: float = Field(default=1, gt=0, description="longest wait for the worker that a request was placed on")
    route_seconds: float = Field(default=0.02, gt=0, description="how long to wait for a router's advice")
    max_body_bytes: int = Field(default=4 << 20, ge=1024)
    worker_silence_seconds: float = Field(default=2, gt=0, description="a worker that says nothing for so long is taken for dead")
    max_resumes: int = Field(default=3, ge=0)

    # worker
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    threads: int = Field(default=0, ge=0, description="CPU threads of one worker; 0: all cores, shared among local workers")
    slots: int = Field(default=64, ge=1, le=4096, description="largest batch, in sequences")
    step_tokens: int = Field(default=512, ge=16, description="token budget of one step")
    kv_memory: ByteSize = Field(default=ByteSize(0), description="memory of the KV pool, such as 2GiB; 0: a share of what is free")
    kv_blocks: int = Field(default=0, ge=0, description="blocks of the KV pool; overrides kv_memory")
    gateway_lease_seconds: float = Field(default=10, gt=0, description="work of a gateway silent for so long is dropped")
    drain_seconds: float = Field(default=20, ge=0, description="how long SIGTERM lets running work finish")

    # all
    metrics_port: int = Field(default=0, ge=0, le=65535, description="/metrics and /health of router and worker; 0: any free port")
    log_format: Literal["json", "text"] = "json"
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
