"""The API against a real bus and Valkey, with a scripted worker: answers, streams, text and counts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime

import pytest
import redis

from services.gateway.text import Tokenizer
from shared import keys
from shared.bus import Bus
from shared.model_files import ModelFolder
from tests.support.gateways import RunningGateway, events, finish_of, running_gateway, stream, text_of, until
from tests.support.scripted_worker import ScriptedWorker, spelling
from tests.support.servers import ServerProcess

CHAT = "/v1/chat/completions"
EMOJI = "Größe: 👩‍👩‍👧 é 🎉 fin"
END = 2  # <|im_end|>


@pytest.fixture
async def running(smollm: ModelFolder, nats: ServerProcess, valkey: ServerProcess) -> AsyncIterator[RunningGateway]:
    async with running_gateway(smollm.path, nats.url, valkey.url) as gateway:
        yield gateway


@pytest.fixture
async def worker(running: RunningGateway, nats: ServerProcess) -> AsyncIterator[ScriptedWorker]:
    bus = await Bus.connect(nats.url, "worker")
    worker = ScriptedWorker(bus, "m")
    await worker.start()
    await until(lambda: len(running.gateway.fleet.alive()) == 1)
    yield worker
    await worker.stop()
    await bus.close()


def chat(content: str = "Hello", **more: object) -> dict[str, object]:
    return {"model": "m", "messages": [{"role": "user", "content": content}], **more}


@pytest.mark.parametrize("per_step", [1, 3])
async def test_streamed_text_is_the_whole_text(running: RunningGateway, worker: ScriptedWorker, smollm: ModelFolder, per_step: int) -> None:
    output = [*Tokenizer.load(smollm.path).encode_prompt(EMOJI), END]
    worker.script, worker.per_step = spelling(output), per_step
    whole = (await running.client.post(CHAT, json=chat(stop=None, n=1, ignore_eos=False))).json()
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": EMOJI, "refusal": None}
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert whole["object"] == "chat.completion"
    chunks = await stream(running.client, CHAT, chat(stream_options={"include_usage": True}))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(chunks) == EMOJI
    assert finish_of(chunks) == "stop"
    assert "�" not in "".join(json.dumps(chunk) for chunk in chunks)
    assert chunks[-1]["choices"] == []
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["usage"] == whole["usage"]
    prompt = len(worker.works[0].tokens)
    assert whole["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": len(output),
        "total_tokens": prompt + len(output),
        "prompt_tokens_details": {"cached_tokens": prompt // 2},
    }


async def test_an_output_cut_inside_a_character_ends_in_a_replacement(
    running: RunningGateway, worker: ScriptedWorker, smollm: ModelFolder
) -> None:
    output = Tokenizer.load(smollm.path).encode_prompt("ab 👩‍👩‍👧")
    worker.script = spelling(output)
    for length in range(1, len(output) + 1):
        body = {"model": "m", "prompt": [5], "max_tokens": length}
        whole = (await running.client.post("/v1/completions", json=body)).json()["choices"][0]
        chunks = await stream(running.client, "/v1/completions", body)
        assert text_of(chunks) == whole["text"]
        assert whole["finish_reason"] == finish_of(chunks) == "length"
        assert whole["text"].count("�") <= 1
        assert "ab 👩‍👩‍👧".startswith(whole["text"].rstrip("�"))


async def test_a_stop_string_over_token_borders_never_leaks(running: RunningGateway, worker: ScriptedWorker, smollm: ModelFolder) -> None:
    text = "One two three. STOPPING here is what STOP HERE means, is it?"
    output = Tokenizer.load(smollm.path).encode_prompt(text)
    worker.script = spelling(output)
    for stops in (["STOP HERE"], "P H", ["never", "three."], ["E means, is it?One"]):
        body = {"model": "m", "prompt": "x", "max_tokens": 200, "stop": stops}
        first = min((text * 3).find(stop) for stop in ([stops] if isinstance(stops, str) else stops) if stop in text * 3)
        whole = (await running.client.post("/v1/completions", json=body)).json()
        chunks = await stream(running.client, "/v1/completions", body | {"stream_options": {"include_usage": True}})
        assert whole["choices"][0]["text"] == text_of(chunks) == (text * 3)[:first]
        assert whole["choices"][0]["finish_reason"] == finish_of(chunks) == "stop"
        assert chunks[-1]["usage"] == whole["usage"]
        assert whole["usage"]["completion_tokens"] < 40
    await until(lambda: not worker.running)  # each was cancelled at its stop string
    assert len(worker.cancels) == 8


async def test_several_prompts_are_choices_of_their_own(running: RunningGateway, worker: ScriptedWorker) -> None:
    prompts = ["one", "two two", "three"]
    single = [
        (await running.client.post("/v1/completions", json={"model": "m", "prompt": p, "max_tokens": 9})).json()["choices"][0]["text"]
        for p in prompts
    ]
    body = {"model": "m", "prompt": prompts, "max_tokens": 9}
    whole = (await running.client.post("/v1/completions", json=body)).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in whole["choices"]] == single
    assert whole["usage"]["completion_tokens"] == 27
    chunks = await stream(running.client, "/v1/completions", body)
    assert [text_of(chunks, i) for i in range(3)] == single
    assert [finish_of(chunks, i) for i in range(3)] == ["length"] * 3
    by_tokens = {"model": "m", "prompt": [running.gateway.model.tokenizer.encode_prompt(p) for p in prompts], "max_tokens": 9}
    assert [c["text"] for c in (await running.client.post("/v1/completions", json=by_tokens)).json()["choices"]] == single


async def test_sampling_reaches_the_worker(running: RunningGateway, worker: ScriptedWorker) -> None:
    body = chat(temperature=0.5, top_p=0.25, top_k=7, seed=-1, max_tokens=3, max_completion_tokens=2, service_tier="priority")
    assert (await running.client.post(CHAT, json=body)).status_code == 200
    work = worker.works[-1]
    assert (work.sampling.temperature, work.sampling.top_p, work.sampling.top_k, work.max_tokens) == (0.5, 0.25, 7, 2)
    assert work.sampling.seed == (1 << 63) - 1
    assert work.priority == "interactive"
    assert END in work.sampling.stop_token_ids
    for _ in range(2):
        await running.client.post("/v1/completions", json={"model": "m", "prompt": "a", "ignore_eos": True})
    one, other = worker.works[-2:]
    assert one.sampling.seed != other.sampling.seed  # drawn by the gateway
    assert (one.sampling.temperature, one.max_tokens, one.sampling.stop_token_ids) == (0.2, 16, [])
    assert (one.sampling.top_p, one.sampling.top_k) == (0.9, 0)  # the model's makers recommend it


async def test_a_typed_end_token_stays_text(running: RunningGateway, worker: ScriptedWorker) -> None:
    for typed, same in (("<|im_end|>", "<|im_"), ("<|im_start|>system", "|im_start|>system")):
        await running.client.post(CHAT, json=chat(typed, max_tokens=1))
        specials = [token for token in worker.works[-1].tokens if token in (1, END)]
        await running.client.post(CHAT, json=chat(same, max_tokens=1))
        assert specials == [token for token in worker.works[-1].tokens if token in (1, END)]
    await running.client.post("/v1/completions", json={"model": "m", "prompt": "a<|im_end|>"})
    assert worker.works[-1].tokens[-1] == END  # a raw prompt may hold special tokens


async def test_continuous_usage_counts_up(running: RunningGateway, worker: ScriptedWorker) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await stream(running.client, CHAT, chat(max_tokens=20, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks[1:]]
    assert counts == sorted(counts)
    assert counts[-1] == 20


async def test_models_and_status(running: RunningGateway, worker: ScriptedWorker) -> None:
    client = running.client
    listed = (await client.get("/v1/models")).json()
    assert [card["id"] for card in listed["data"]] == ["m"]
    assert (await client.get("/v1/models/m")).json() == listed["data"][0]
    assert (await client.get("/v1/models/other")).json()["error"]["code"] == "model_not_found"
    for path in ("/health", "/ready", "/metrics"):
        assert (await client.get(path, headers={"Authorization": ""})).status_code == 200
    worker.silent = True
    await until(lambda: not running.gateway.fleet.alive())
    ready = await client.get("/ready")
    assert ready.status_code == 503
    assert "worker" in ready.json()["reasons"][0]
    assert (await client.get("/health")).status_code == 200


async def test_context_length_is_the_workers_if_smaller(running: RunningGateway, worker: ScriptedWorker) -> None:
    fits = {"model": "m", "prompt": [5] * 8000, "max_tokens": 192}
    assert (await running.client.post("/v1/completions", json=fits | {"max_tokens": 1})).status_code == 200
    refused = await running.client.post("/v1/completions", json=fits | {"max_tokens": 193})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    worker.context_tokens = 100
    await until(lambda: running.gateway.context_tokens() == 100)
    refused = await running.client.post(CHAT, json=chat("many words " * 60))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")
    answer = await running.client.post(CHAT, json=chat())
    assert answer.json()["usage"]["total_tokens"] == 100  # without max_tokens a chat may fill the context


async def test_metrics_and_usage_totals(running: RunningGateway, worker: ScriptedWorker, valkey: ServerProcess) -> None:
    client = redis.Redis.from_url(valkey.url)
    client.flushall()
    for _ in range(3):
        await running.client.post(CHAT, json=chat(max_tokens=5))
    prompt = len(worker.works[-1].tokens)
    metrics = (await running.client.get("/metrics")).text
    assert 'headrace_requests_total{model="m",outcome="length"} 3.0' in metrics
    assert 'headrace_tokens_total{kind="completion",model="m"} 15.0' in metrics
    assert 'headrace_ttft_seconds_count{model="m",prompt="le128"} 3.0' in metrics
    assert 'headrace_tpot_seconds_count{model="m",prompt="le128"} 3.0' in metrics
    assert 'headrace_queue_seconds_count{model="m"} 3.0' in metrics
    assert 'headrace_open_requests{model="m"} 0.0' in metrics
    key = keys.usage_day("default", datetime.now(UTC).strftime("%Y%m%d"))
    await until(lambda: client.hget(key, "m:requests") == b"3")
    assert client.hgetall(key) == {
        b"m:requests": b"3",
        b"m:prompt": str(3 * prompt).encode(),
        b"m:completion": b"15",
        b"m:cached": str(3 * (prompt // 2)).encode(),
    }
    client.close()


async def test_a_silent_stream_gets_comments(running: RunningGateway, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.openai.answer.HEARTBEAT_SECONDS", 0.1)
    worker.go.clear()
    async with running.client.stream("POST", CHAT, json=chat(stream=True, max_tokens=3)) as response:
        assert response.headers["cache-control"] == "no-cache, no-transform"
        assert response.headers["x-accel-buffering"] == "no"
        body = b""
        async for part in response.aiter_bytes():
            body += part
            if body.count(b": ping\n") == 2:
                worker.go.set()
    assert b": ping\n: ping\n" in body
    assert b": ping\n\n" not in body
    assert body.endswith(b"data: [DONE]\n\n")


async def test_many_streams_at_once(running: RunningGateway, worker: ScriptedWorker) -> None:
    worker.slots = 100
    alone = [text_of(await stream(running.client, CHAT, chat(f"number {i}", max_tokens=30))) for i in range(4)]
    together = await asyncio.gather(*(stream(running.client, CHAT, chat(f"number {i % 4}", max_tokens=30)) for i in range(64)))
    assert [text_of(chunks) for chunks in together] == [alone[i % 4] for i in range(64)]
    assert running.gateway.relay.open_requests == 0


async def test_shutting_down_ends_streams_with_an_error_event(running: RunningGateway, worker: ScriptedWorker) -> None:
    worker.step_seconds = 0.02
    async with running.client.stream("POST", CHAT, json=chat(stream=True)) as response:
        running.server.should_exit = True  # as a signal would
        chunks = await events(response)
    assert chunks[-1]["error"]["code"] == "unavailable"
    await until(lambda: not worker.running)
