"""HTTP as clients meet it: the error envelope everywhere, keys, limits of header, body and time, and the process's own start and end."""

from __future__ import annotations

import asyncio
import gzip
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import redis.asyncio

from services.gateway import server as server_module
from services.gateway import usage
from services.gateway.usage import UsageRecord
from shared import keys
from shared.model_files import ModelFolder
from tests.support.gateways import KEY, RunningGateway, running_gateway, until
from tests.support.servers import ServerProcess, free_port, valkey_server

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"


@pytest.fixture
async def running(smollm: ModelFolder, nats: ServerProcess, valkey: ServerProcess) -> AsyncIterator[RunningGateway]:
    async with running_gateway(smollm.path, nats.url, valkey.url, max_body_bytes=100_000) as gateway:
        yield gateway


def assert_envelope(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status
    assert response.headers["content-type"].startswith("application/json")
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["code"] == code
    return error


async def test_every_error_has_the_envelope(running: RunningGateway) -> None:
    client = running.client
    assert_envelope(await client.get("/nothing"), 404, "not_found")
    assert_envelope(await client.get("/v1/models/other"), 404, "model_not_found")
    wrong_method = await client.get(CHAT)
    assert_envelope(wrong_method, 405, "method_not_allowed")
    assert wrong_method.headers["allow"] == "POST"
    assert_envelope(await client.post("/v1/models", json={}), 405, "method_not_allowed")
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    assert assert_envelope(await client.post(CHAT, json=body | {"model": "other"}), 404, "model_not_found")["param"] == "model"
    assert assert_envelope(await client.post(CHAT, json=body | {"n": 2}), 400, "unsupported_value")["param"] == "n"
    assert_envelope(await client.post(CHAT, content=b'{"model": NaN}'), 400, "invalid_json")
    assert_envelope(await client.post(CHAT, content=b'{"model": "\\udc00"}'), 400, "invalid_json")
    assert_envelope(await client.post(CHAT, content=b" " * 100_001), 413, "request_too_large")

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield b" " * 1000

    assert_envelope(await client.post(CHAT, content=chunks()), 413, "request_too_large")
    prompt = {"model": "m", "prompt": [49152]}
    assert assert_envelope(await client.post("/v1/completions", json=prompt), 400, "invalid_value")["param"] == "prompt[0]"
    assert_envelope(await client.post("/v1/completions", json=prompt | {"prompt": [-1]}), 400, "invalid_value")
    assert_envelope(await client.post("/v1/completions", json=prompt | {"prompt": [5], "max_tokens": 8192}), 400, "context_length_exceeded")
    several = await client.post("/v1/completions", json=prompt | {"prompt": [[1], [2, 49152]]})
    assert assert_envelope(several, 400, "invalid_value")["param"] == "prompt[1][1]"
    packed = await client.post(CHAT, content=gzip.compress(b"{}"), headers={"Content-Encoding": "gzip"})
    assert_envelope(packed, 415, "unsupported_encoding")
    plain = await client.post(CHAT, json=body | {"model": "other"}, headers={"Content-Encoding": "identity"})
    assert_envelope(plain, 404, "model_not_found")
    metrics = (await client.get("/metrics")).text
    assert 'headrace_refused_total{reason="invalid"} 7.0' in metrics


async def test_a_text_too_long_for_the_context_is_not_even_tokenised(running: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    async def tokenise(*_: object) -> None:
        raise AssertionError("tokenised")

    monkeypatch.setattr(running.gateway, "tokenise", tokenise)
    running.gateway.settings.max_body_bytes = 10_000_000
    tokenizer, text = running.gateway.model.tokenizer, "y" * 5_000_000
    assert 8192 < tokenizer.fewest_tokens(len(text)) <= len(text)
    chat = await running.client.post(CHAT, json={"model": "m", "messages": [{"role": "user", "content": text}]})
    assert assert_envelope(chat, 400, "context_length_exceeded")["param"] == "messages"
    completion = await running.client.post("/v1/completions", json={"model": "m", "prompt": ["a", text]})
    assert assert_envelope(completion, 400, "context_length_exceeded")["param"] == "prompt"


async def test_a_bug_answers_500_in_the_envelope(running: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: object) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(running.gateway, "check_model", bug)
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    error = assert_envelope(await running.client.post(CHAT, json=body), 500, "internal_error")
    assert "secret" not in error["message"]


@pytest.mark.parametrize("presented", ["", "Bearer", "Bearer wrong", "Bearer " + KEY + "x", "Basic " + KEY, KEY, "Bearer \xff"])
@pytest.mark.parametrize("path", ["/v1/models", "/nothing"])
async def test_everything_needs_the_key(running: RunningGateway, presented: str, path: str) -> None:
    headers = {b"Authorization": presented.encode("latin-1")}
    async with httpx.AsyncClient(base_url=running.url) as client:
        assert_envelope(await client.get(path, headers=headers), 401, "invalid_api_key")
        assert (await client.get("/v1/models", headers={"Authorization": f"bearer  {KEY}"})).status_code == 200


async def _talk(url: str, *parts: bytes, pause: float = 0.0) -> bytes:
    """Send raw bytes and return everything that comes back until the server closes."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for part in parts:
        writer.write(part)
        await asyncio.sleep(pause)
    answer = b""
    try:
        async with asyncio.timeout(5):
            while data := await reader.read(65536):
                answer += data
    except ConnectionError:
        pass
    writer.close()
    return answer


async def test_slow_and_large_headers_end_the_connection(running: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HEADER_SECONDS", 0.3)
    started = time.monotonic()
    assert await _talk(running.url, b"GET /health HTTP/1.1\r\nHost: x\r\n") == b""
    assert await _talk(running.url) == b""
    assert time.monotonic() - started < 3
    large = b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X-A: " + b"a" * 40_000 + b"\r\n\r\n"
    assert b" 431 " in (await _talk(running.url, large)).split(b"\r\n")[0]
    many = b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X-A: aaaaaaaaaaaaaaaa\r\n" * 3000
    assert b" 431 " in (await _talk(running.url, many)).split(b"\r\n")[0]
    assert (await running.client.get("/health")).status_code == 200


async def test_a_slow_body_ends_with_408(running: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.openai.body.RECEIPT_SECONDS", 0.2)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 100\r\n\r\n".encode()
    answer = await _talk(running.url, head, b"{", pause=0.05)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"request_timeout"' in answer


# the process

RUN = "import sys; from services.gateway.app import run; from shared.settings import Settings; sys.exit(run(Settings()))"


def _environment(model: str, state_dir: Path, nats: ServerProcess, valkey: ServerProcess, port: int, **more: str) -> dict[str, str]:
    chosen = {"MODEL": model, "STATE_DIR": str(state_dir), "NATS_URL": nats.url, "REDIS_URL": valkey.url, "PORT": str(port), "API_KEY": KEY}
    return os.environ | {f"HEADRACE_{name}": value for name, value in (chosen | more).items()}


def test_it_refuses_to_start_with_one_line(smollm: ModelFolder, nats: ServerProcess, valkey: ServerProcess, tmp_path: Path) -> None:
    def start(**more: str) -> tuple[int, str]:
        environment = _environment(str(smollm.path), tmp_path, nats, valkey, free_port(), **more)
        done = subprocess.run([sys.executable, "-c", RUN], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stderr

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, said = start(PORT=port)
        assert code == 2
        assert said.count("\n") == 1
        assert port in said
    code, said = start(API_KEY="")
    assert (code, said.count("\n")) == (1, 1)
    assert "HEADRACE_API_KEY" in said
    code, said = start(MODEL="no-such-model")
    assert (code, said.count("\n")) == (1, 1)
    assert "headrace models pull" in said


async def test_sigterm_ends_it_in_order(smollm: ModelFolder, nats: ServerProcess, valkey: ServerProcess, tmp_path: Path) -> None:
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        RUN,
        cwd=ROOT,
        env=_environment(str(smollm.path), tmp_path, nats, valkey, port),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:

            async def up() -> bool:
                try:
                    return (await client.get("/health")).status_code == 200
                except httpx.TransportError:
                    return False

            async with asyncio.timeout(20):
                while not await up():
                    await asyncio.sleep(0.05)
            assert (await client.get("/ready")).status_code == 503  # no worker
        os.kill(process.pid, signal.SIGTERM)
        async with asyncio.timeout(10):
            _, said = await process.communicate()
        assert process.returncode == 0, said
        assert b'"message": "ready"' in said
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_sigterm_while_nats_is_away(smollm: ModelFolder, valkey: ServerProcess, tmp_path: Path) -> None:
    nowhere = ServerProcess([], f"nats://127.0.0.1:{free_port()}", 0)
    environment = _environment(str(smollm.path), tmp_path, nowhere, valkey, free_port())
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", RUN, cwd=ROOT, env=environment, stderr=asyncio.subprocess.PIPE)
    await asyncio.sleep(4)  # it has loaded the model and tries to connect
    os.kill(process.pid, signal.SIGTERM)
    async with asyncio.timeout(5):
        _, said = await process.communicate()
    assert process.returncode == 0, said
    assert b"Traceback" not in said


async def test_valkey_is_not_needed_to_serve(smollm: ModelFolder, nats: ServerProcess) -> None:
    async with running_gateway(smollm.path, nats.url, f"redis://127.0.0.1:{free_port()}/0") as running:
        for _ in range(2):
            running.gateway.usage_log.record(_record())
        ready = await running.client.get("/ready")
        assert ready.json()["degraded"]
        assert not any("alkey" in reason for reason in ready.json()["reasons"])
        lost = running.gateway.metrics.usage_lost
        assert lost._value.get() == 0
        for _ in range(10_010):
            running.gateway.usage_log.record(_record())
        assert lost._value.get() >= 10


async def test_usage_waits_for_valkey(smollm: ModelFolder, nats: ServerProcess, tmp_path: Path) -> None:
    with valkey_server(tmp_path) as valkey:
        valkey.stop()
        async with running_gateway(smollm.path, nats.url, valkey.url) as running:
            running.gateway.usage_log.record(_record())
            await asyncio.sleep(0.1)
            valkey.start()
            await until(lambda: running.gateway.usage_log.reachable and running.gateway.usage_log._queue._unfinished_tasks == 0)  # type: ignore[attr-defined]
            client = redis.Redis.from_url(valkey.url)
            assert [client.hget(key, "m:requests") for key in client.keys("hr:usage:*")] == [b"1"]
            client.close()


def _record() -> Any:
    return UsageRecord("default", "m", 3, 2, 1, time.time())


async def test_a_batch_sent_twice_counts_once(valkey: ServerProcess) -> None:
    """The reply may be lost after Valkey has done the work; sending again must not add again."""
    client = redis.asyncio.Redis.from_url(valkey.url)
    await client.flushall()
    apply = client.register_script(usage._APPLY)
    for _ in range(2):
        await apply(keys=[keys.usage_day("t", "20261130"), keys.usage_batch("t", "b1")], args=[60, 120, "m:prompt", 5, "m:requests", 1])
    assert await client.hgetall(keys.usage_day("t", "20261130")) == {b"m:prompt": b"5", b"m:requests": b"1"}
    assert 0 < await client.ttl(keys.usage_day("t", "20261130")) <= 120
    await client.aclose()
