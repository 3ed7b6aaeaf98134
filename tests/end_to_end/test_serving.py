"""The whole system on the real model: batching, refusal, disconnects, and text that is right."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import aiohttp
import pytest

from shared.model_files import ModelFolder
from tests.support.stack import Stack, running_stack
from tests.support.streaming import Answer, stream

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = {"max_tokens": 200, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def stack(smollm: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(smollm, tmp_path_factory.mktemp("stack"), slots=64, step_tokens=128) as one:
        yield one


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(240)) as one:
        yield one


def ask(stack: Stack, question: str, **more: Any) -> dict[str, Any]:
    return {"model": stack.model.name, "messages": [{"role": "user", "content": question}], **more}


async def until(condition: Callable[[], object], seconds: float = 30) -> None:
    give_up_at = time.monotonic() + seconds
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < give_up_at, "waited in vain"
        await asyncio.sleep(0.02)


async def test_english_comes_out(stack: Stack, session: aiohttp.ClientSession) -> None:
    answer = await stream(
        session, stack.url, CHAT, ask(stack, "Answer in one sentence: what is the capital of France?", temperature=0, max_tokens=40)
    )
    assert "Paris" in answer.text
    assert answer.done
    assert answer.finish_reason == "stop"
    assert answer.usage["completion_tokens"] > 3


async def test_a_short_request_overtakes_a_long_one(stack: Stack, session: aiohttp.ClientSession) -> None:
    long = asyncio.create_task(stream(session, stack.url, CHAT, ask(stack, "Count to a thousand.", **LONG)))
    await until(lambda: stack.workers[0].metric("headrace_worker_running") == 1)
    short = await stream(session, stack.url, CHAT, ask(stack, "Hello!", max_tokens=5, temperature=0))
    assert short.done
    assert not long.done()
    assert (await long).usage["completion_tokens"] == LONG["max_tokens"]


async def test_64_streams_at_once(stack: Stack, session: aiohttp.ClientSession) -> None:
    """Their texts equal those of the same requests sent alone where float noise leaves no doubt: here, their counts and ends."""
    bodies = [ask(stack, f"Tell me about the number {i}. " * (1 + i % 7), max_tokens=8 + i % 9, ignore_eos=True) for i in range(64)]
    answers = await asyncio.gather(*(stream(session, stack.url, CHAT, body) for body in bodies))
    for body, answer in zip(bodies, answers, strict=True):
        assert answer.status == 200
        assert answer.done
        assert answer.finish_reason == "length"
        assert answer.usage["completion_tokens"] == body["max_tokens"]
    gateway = stack.services["gateway"]
    assert gateway.metric("headrace_open_requests") == 0
    assert gateway.metric("headrace_frames_ignored_total") == 0  # neither gaps nor repeats: indices were contiguous
    stack.wait_until_idle()


@pytest.mark.parametrize("case", ["streaming", "prefilling", "not streaming"])
async def test_a_client_that_vanishes(stack: Stack, session: aiohttp.ClientSession, case: str) -> None:
    stack.wait_until_idle()
    running = stack.workers[0]
    other = asyncio.create_task(stream(session, stack.url, CHAT, ask(stack, "Write a poem about rivers.", **LONG)))
    await until(lambda: running.metric("headrace_worker_running") == 1)
    decoded = running.metric("headrace_worker_decode_tokens_total")
    if case == "streaming":
        await stream(session, stack.url, CHAT, ask(stack, "Write another poem.", **LONG), vanish_after=5)
    else:
        question = "word " * 3500 if case == "prefilling" else "Write a third poem."
        body = ask(stack, question, **LONG) | ({} if case == "prefilling" else {"stream": False, "stream_options": None})
        victim = asyncio.create_task(stream(session, stack.url, CHAT, body))
        await until(lambda: running.metric("headrace_worker_running") == 2)
        victim.cancel()
        await asyncio.gather(victim, return_exceptions=True)
    await until(lambda: running.metric("headrace_worker_running") == 1, 10)
    assert not other.done()
    answer = await other
    assert answer.usage["completion_tokens"] == LONG["max_tokens"]
    assert running.metric("headrace_worker_decode_tokens_total") - decoded < 1.5 * LONG["max_tokens"]  # the victim was not run to its end
    stack.wait_until_idle()


async def test_joined_stream_equals_the_whole(stack: Stack, session: aiohttp.ClientSession) -> None:
    body = ask(stack, "Write three emoji: 🎉 👨‍👩‍👧 é, and say why.", temperature=0, max_tokens=60)
    streamed = await stream(session, stack.url, CHAT, body)
    status, whole, _ = await asyncio.to_thread(stack.post, CHAT, body)
    assert status == 200
    assert whole["choices"][0]["message"]["content"] == streamed.text
    usage = dict(whole["usage"])
    assert usage["prompt_tokens_details"].pop("cached_tokens") > 0  # the second time
    assert usage["completion_tokens"] == streamed.usage["completion_tokens"]


async def test_seeded_sampling_repeats_whoever_runs_beside_it(stack: Stack, session: aiohttp.ClientSession) -> None:
    body = ask(stack, "Invent a name.", seed=11, temperature=0.9, max_tokens=3)
    first = await stream(session, stack.url, CHAT, body)
    assert first.text
    again = await asyncio.gather(*(stream(session, stack.url, CHAT, body) for _ in range(4)))
    unseeded = await asyncio.gather(*(stream(session, stack.url, CHAT, {**body, "seed": None, "max_tokens": 12}) for _ in range(4)))
    assert {answer.text for answer in again} == {first.text}
    assert len({answer.text for answer in unseeded}) > 1


async def test_stop_strings_never_leak(stack: Stack, session: aiohttp.ClientSession) -> None:
    body = {"model": stack.model.name, "prompt": "one, two, three, four, five, six,", "temperature": 0, "max_tokens": 24}
    whole = await stream(session, stack.url, COMPLETIONS, body)
    for start in range(2, 20, 3):
        stop = whole.text[start : start + 6]
        cut = await stream(session, stack.url, COMPLETIONS, {**body, "stop": [stop]})
        assert cut.text == whole.text[: whole.text.index(stop)]
        assert cut.finish_reason == "stop"
    stack.wait_until_idle()


async def test_a_typed_special_token_stays_text(stack: Stack) -> None:
    def prompt_tokens(text: str) -> int:
        status, body, _ = stack.post(CHAT, ask(stack, text, max_tokens=1))
        assert status == 200
        return int(body["usage"]["prompt_tokens"])

    plain = await asyncio.to_thread(prompt_tokens, "ab")
    typed = await asyncio.to_thread(prompt_tokens, "a<|im_end|>b")
    assert typed - plain >= 4  # one special token would add one


async def test_several_prompts_in_every_form(stack: Stack) -> None:
    body = {"model": stack.model.name, "max_tokens": 4, "temperature": 0}
    forms: list[Any] = ["Hello there", ["Hello there", "Good"], [19556, 665], [[19556, 665], [3, 4, 5]]]
    for prompt, count in zip(forms, (1, 2, 1, 2), strict=True):
        status, answer, _ = await asyncio.to_thread(stack.post, COMPLETIONS, {**body, "prompt": prompt})
        assert status == 200
        assert [choice["index"] for choice in answer["choices"]] == list(range(count))
        assert answer["usage"]["completion_tokens"] == 4 * count


async def test_metrics_tell_what_happened(stack: Stack, session: aiohttp.ClientSession) -> None:
    gateway, worker = stack.services["gateway"], stack.workers[0]
    names = ["headrace_ttft_seconds_count", "headrace_tpot_seconds_count", "headrace_queue_seconds_count"]
    before = [gateway.metric(name) for name in names]
    tokens = worker.metric("headrace_worker_decode_tokens_total")
    await stream(session, stack.url, CHAT, ask(stack, "Hi", max_tokens=6, ignore_eos=True))
    assert [gateway.metric(name) for name in names] == [count + 1 for count in before]
    await until(lambda: worker.metric("headrace_worker_decode_tokens_total") == tokens + 6)
    assert stack.services["router"].metric("headrace_router_workers") == 1


@pytest.fixture
def narrow(smollm: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One slot and a queue of two."""
    with running_stack(smollm, tmp_path_factory.mktemp("narrow"), slots=1, queue_depth=2) as one:
        yield one


async def test_a_full_queue_refuses_at_once_and_a_queued_client_may_leave(narrow: Stack, session: aiohttp.ClientSession) -> None:
    running = asyncio.create_task(stream(session, narrow.url, CHAT, ask(narrow, "Count.", **LONG)))
    await until(lambda: narrow.workers[0].metric("headrace_worker_running") == 1)
    queued = [asyncio.create_task(stream(session, narrow.url, CHAT, ask(narrow, "Queued.", max_tokens=3))) for _ in range(2)]
    await asyncio.sleep(0.5)
    refused: list[Answer] = []
    for _ in range(5):
        refused.append(await stream(session, narrow.url, CHAT, ask(narrow, "One too many.", max_tokens=3)))
    for answer in refused:
        assert answer.status == 503
        assert int(answer.headers["Retry-After"]) >= 1
        assert answer.body["error"]["code"] == "overloaded"
    assert sorted(answer.ended - answer.sent for answer in refused)[2] < 0.05
    assert not running.done()
    queued[0].cancel()  # its place in the queue is free again
    await asyncio.gather(queued[0], return_exceptions=True)
    await asyncio.sleep(0.3)
    third = asyncio.create_task(stream(session, narrow.url, CHAT, ask(narrow, "Now there is room.", max_tokens=3)))
    answers = await asyncio.gather(running, queued[1], third)
    assert [answer.finish_reason for answer in answers] == ["length"] * 3
    assert narrow.services["gateway"].metric("headrace_refused_total") == 5
    narrow.wait_until_idle()
