"""A real gateway on a real port, inside the test's event loop, so that a test can look at both sides."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from pydantic import SecretStr

from services.gateway.app import create_app
from services.gateway.model import ServedModel
from services.gateway.server import Server, listen
from services.gateway.service import Gateway
from shared import subjects
from shared.bus import Bus
from shared.settings import Settings
from tests.support.scripted_worker import ScriptedWorker, chained

KEY = "test-key"
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class RunningGateway:
    """A gateway and a client for it."""

    gateway: Gateway
    server: Server
    url: str
    client: httpx.AsyncClient


@contextlib.asynccontextmanager
async def running_gateway(folder: Path, nats_url: str, redis_url: str, **settings: Any) -> AsyncIterator[RunningGateway]:
    """Serve the tokenizer in `folder` as model `m` of pool `m` on a free port; `settings` override Settings."""
    chosen = Settings(nats_url=nats_url, redis_url=redis_url, api_key=SecretStr(KEY), **settings)
    bus = await Bus.connect(nats_url, "gateway")
    gateway = Gateway(chosen, _model(folder), bus)
    await gateway.start()
    with listen("127.0.0.1", 0) as listener:
        server = Server(create_app(gateway), gateway.drain, gateway.cut, 2)
        # no signal handlers: the process is the test's
        serving = asyncio.get_running_loop().create_task(server._serve([listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        headers = {"Authorization": f"Bearer {KEY}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as client:
            try:
                yield RunningGateway(gateway, server, url, client)
            finally:
                server.should_exit = True
                await serving
                await gateway.stop()
                await bus.close()


MakeGateway = Callable[..., Awaitable[RunningGateway]]
MakeWorker = Callable[[], Awaitable[ScriptedWorker]]


@functools.cache
def _model(folder: Path) -> ServedModel:
    return ServedModel.load(folder, "m", "m")


async def until(condition: Callable[[], bool], seconds: float = 5) -> None:
    """Wait until `condition` holds, or fail."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def events(response: httpx.Response) -> list[Any]:
    """Return the JSON of every event of a stream; checks that `[DONE]` ends it."""
    parsed: list[Any] = []
    done = False
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            assert not done, "nothing may follow [DONE]"
            if line == "data: [DONE]":
                done = True
            else:
                parsed.append(json.loads(line.removeprefix("data: ")))
    assert done
    return parsed


def text_of(chunks: list[Any], index: int = 0) -> str:
    """Return the joined text of one choice of a stream."""
    pieces = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                pieces.append(choice["delta"].get("content", "") if "delta" in choice else choice["text"])
    return "".join(pieces)


def finish_of(chunks: list[Any], index: int = 0) -> str | None:
    """Return the finish reason of one choice, checking that exactly one chunk carries it."""
    reasons = [
        choice["finish_reason"]
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index and choice["finish_reason"] is not None
    ]
    assert len(reasons) == 1, reasons
    reason: str = reasons[0]
    return reason


async def stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    """Post a streamed request and return its events."""
    async with client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        return await events(response)


# raw requests to a worker that runs its default script


def body(prompt: list[int] | list[list[int]] | None = None, **more: Any) -> dict[str, Any]:
    """A request for 40 tokens after a prompt of token ids."""
    return {"model": "m", "prompt": prompt or [5, 6, 7], "max_tokens": 40, "ignore_eos": True, **more}


def expected_text(running: RunningGateway, prompt: list[int], count: int) -> str:
    """What `count` tokens of the default script make after `prompt`."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(chained(tokens))
    return running.gateway.model.tokenizer.table(tokens[len(prompt) :]).decode("utf-8", "replace")


def counter(running: RunningGateway, name: str, **labels: str) -> float:
    """A metric of the gateway."""
    return running.gateway.metrics.registry.get_sample_value(name, labels) or 0.0


async def queued_messages(running: RunningGateway) -> int:
    """How many messages are in the work queue, delivered ones included."""
    info = await running.gateway.bus._js.stream_info(subjects.WORK_STREAM)
    count: int = info.state.messages
    return count


async def heard(running: RunningGateway, count: int = 1) -> None:
    """Wait until the gateway knows of so many live workers."""
    await until(lambda: len(running.gateway.fleet.alive()) == count)


@contextlib.asynccontextmanager
async def open_stream(running: RunningGateway, **more: Any) -> AsyncIterator[httpx.Response]:
    """Post a streamed request and give its response, headers read."""
    async with running.client.stream("POST", COMPLETIONS, json=body(stream=True, **more)) as response:
        assert response.status_code == 200, await response.aread()
        yield response
