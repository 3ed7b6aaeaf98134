"""Servers that all integration tests share; a test that breaks one starts its own."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from shared.bus import Bus
from shared.model_files import ModelFolder
from tests.support.gateways import MakeGateway, MakeWorker, RunningGateway, running_gateway
from tests.support.scripted_worker import ScriptedWorker
from tests.support.servers import ServerProcess, nats_server, valkey_server


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A Valkey server."""
    with valkey_server(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A NATS server with an empty queue."""
    with nats_server(tmp_path_factory.mktemp("nats")) as server:
        yield server


@pytest.fixture
async def make_gateway(smollm: ModelFolder, nats: ServerProcess, valkey: ServerProcess) -> AsyncIterator[MakeGateway]:
    """Starts gateways of model `m` with these settings; they stop with the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(**settings: Any) -> RunningGateway:
            return await stack.enter_async_context(running_gateway(smollm.path, nats.url, valkey.url, **settings))

        yield make


@pytest.fixture
async def make_worker(nats: ServerProcess) -> AsyncIterator[MakeWorker]:
    """Starts scripted workers of pool `m`; they stop with the test."""
    workers: list[ScriptedWorker] = []

    async def make() -> ScriptedWorker:
        workers.append(ScriptedWorker(await Bus.connect(nats.url, "worker"), "m", step_seconds=0.005))
        await workers[-1].start()
        return workers[-1]

    yield make
    for one in workers:
        await one.stop()
        await one.bus.close()
