"""Two workers: prefix-aware placement, life without a router, and a worker that dies."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from shared.model_files import ModelFolder
from tests.support.stack import Stack, running_stack
from tests.support.streaming import stream

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def stack(smollm: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(smollm, tmp_path_factory.mktemp("two"), workers=2, threads=1, dtype="float32") as one:
        yield one


def about(stack: Stack, document: int, question: int) -> dict[str, Any]:
    text = f"Document {document}. " + " ".join(f"Line {i} of {document} says {i * document}." for i in range(40))
    messages = [{"role": "system", "content": text}, {"role": "user", "content": f"Question {question}?"}]
    return {"model": stack.model.name, "messages": messages, "max_tokens": 4, "temperature": 0}


async def test_the_same_prefix_goes_to_the_same_worker(stack: Stack) -> None:
    queries = [worker.metric("headrace_worker_prefix_query_tokens_total") for worker in stack.workers]
    for question in range(4):
        for document in (1, 2, 3):
            status, answer, _ = await asyncio.to_thread(stack.post, CHAT, about(stack, document, question))
            assert status == 200
            details = answer["usage"]["prompt_tokens_details"]
            if question:
                assert details["cached_tokens"] > 0.8 * answer["usage"]["prompt_tokens"]
        await asyncio.sleep(0.2)
    hits = sum(worker.metric("headrace_worker_prefix_hit_tokens_total") for worker in stack.workers)
    looked_up = sum(worker.metric("headrace_worker_prefix_query_tokens_total") for worker in stack.workers) - sum(queries)
    assert hits > 0.6 * looked_up
    assert stack.services["router"].metric("headrace_router_matched_tokens_total") > 0


async def test_a_worker_that_dies_mid_stream(stack: Stack) -> None:
    body: dict[str, Any] = {"model": stack.model.name, "messages": [{"role": "user", "content": "Tell a long story."}]}
    body |= {"max_tokens": 120, "temperature": 0, "ignore_eos": True}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(120)) as session:
        undisturbed = await stream(session, stack.url, CHAT, body)
        streams = [asyncio.create_task(stream(session, stack.url, CHAT, body)) for _ in range(4)]
        give_up_at = time.monotonic() + 20
        while not any(worker.metric("headrace_worker_running") for worker in stack.workers):
            assert time.monotonic() < give_up_at
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)
        name = next(name for name in stack.services if name.startswith("worker") and stack.services[name].metric("headrace_worker_running"))
        stack.services.pop(name).stop(signal.SIGKILL)
        answers = await asyncio.gather(*streams)
    assert [answer.text for answer in answers] == [undisturbed.text] * 4
    assert all(answer.done and answer.usage["completion_tokens"] == 120 for answer in answers)
    assert stack.services["gateway"].metric("headrace_resumes_total") > 0
    stack.start(name)
    await asyncio.to_thread(stack.wait_until_ready)
    stack.wait_until_idle()


async def test_without_a_router(stack: Stack) -> None:
    stack.services.pop("router").stop(signal.SIGKILL)
    for question in range(6):
        status, answer, _ = await asyncio.to_thread(stack.post, CHAT, about(stack, 9, question))
        assert status == 200
        assert answer["choices"][0]["message"]["content"]
