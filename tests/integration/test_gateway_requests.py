"""From a client to a worker on a real bus: refusal, deadline, placement, and clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from shared import messages, subjects
from shared.messages import RouteReply
from tests.support.gateways import (
    COMPLETIONS,
    MakeGateway,
    MakeWorker,
    RunningGateway,
    body,
    counter,
    events,
    expected_text,
    heard,
    open_stream,
    queued_messages,
    stream,
    text_of,
    until,
)

# refusal and waiting


async def test_a_full_queue_refuses_at_once_while_a_stream_goes_on(make_gateway: MakeGateway, make_worker: MakeWorker) -> None:
    running = await make_gateway(queue_depth=3)
    busy = await make_worker()
    await heard(running)
    busy.slots = 1
    await busy.bus.ensure_work_stream(3)
    busy.go.clear()
    going = asyncio.create_task(stream(running.client, COMPLETIONS, body()))
    await until(lambda: len(busy.running) == 1)
    await asyncio.sleep(0.15)  # a pull that was under way may still bring one more
    waiting: list[asyncio.Task[Any]] = []
    for _ in range(4):
        waiting.append(asyncio.create_task(stream(running.client, COMPLETIONS, body())))
        await asyncio.sleep(0.05)
    seconds = []
    for i in range(6):
        started = time.monotonic()
        refused = await running.client.post(COMPLETIONS, json=body(stream=i % 2 == 0))
        seconds.append(time.monotonic() - started)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "overloaded"
        assert int(refused.headers["retry-after"]) >= 1
    assert sorted(seconds)[2] < 0.05  # with room for a busy test machine
    assert counter(running, "headrace_refused_total", reason="queue_full") >= 2
    busy.slots = 100
    busy.go.set()
    text = expected_text(running, [5, 6, 7], 40)
    assert text_of(await going) == text
    results = await asyncio.gather(*waiting, return_exceptions=True)
    admitted = [chunks for chunks in results if not isinstance(chunks, BaseException)]
    assert len(admitted) >= 3
    assert all(text_of(chunks) == text for chunks in admitted)


async def test_many_long_prompts_of_one_request_take_turns_with_others(make_gateway: MakeGateway, make_worker: MakeWorker) -> None:
    running = await make_gateway(queue_depth=4)  # fewer than there are prompts: what has begun waits for room
    worker = await make_worker()
    await heard(running)
    await worker.bus.ensure_work_stream(4)
    worker.go.clear()
    prompts = [[i, *range(5000)] for i in range(12)]
    many = asyncio.create_task(stream(running.client, COMPLETIONS, body(prompt=prompts, max_tokens=2)))
    await until(lambda: len(worker.works) == 1)
    short = asyncio.create_task(stream(running.client, COMPLETIONS, body(max_tokens=2)))
    await until(lambda: len(worker.works) == 2)
    await asyncio.sleep(0.2)
    assert [len(work.tokens) for work in worker.works] == [5001, 3]
    worker.go.set()
    chunks = await many
    assert [text_of(chunks, i) for i in range(12)] == [expected_text(running, prompt, 2) for prompt in prompts]
    assert text_of(await short) == expected_text(running, [5, 6, 7], 2)


async def test_no_worker_in_time_is_503_and_the_message_leaves_the_queue(make_gateway: MakeGateway) -> None:
    running = await make_gateway(queue_seconds=0.3)
    for streamed in (True, False):
        refused = await running.client.post(COMPLETIONS, json=body(stream=streamed))
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert await queued_messages(running) == 0
    assert counter(running, "headrace_refused_total", reason="timeout") == 2


async def test_expired_at_the_worker_is_503(make_gateway: MakeGateway, make_worker: MakeWorker) -> None:
    running = await make_gateway()
    late = await make_worker()
    late.expire_all = True
    refused = await running.client.post(COMPLETIONS, json=body(stream=True))
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    assert running.gateway.relay.open_requests == 0


async def test_what_fails_anywhere_is_not_tried_elsewhere(make_gateway: MakeGateway, make_worker: MakeWorker) -> None:
    running = await make_gateway()
    small = await make_worker()
    small.fail_with = "kv_capacity"
    refused = await running.client.post(COMPLETIONS, json=body())
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    for code in ("invalid", "not_finite"):
        small.fail_with = code
        assert (await running.client.post(COMPLETIONS, json=body())).status_code == 500
    assert counter(running, "headrace_resumes_total", reason="worker_lost") == 0


async def test_too_large_for_a_message_harms_nobody(
    make_gateway: MakeGateway, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await make_gateway()
    await make_worker()
    monkeypatch.setattr("services.gateway.admission.MAX_MESSAGE_BYTES", 10_000)
    async with open_stream(running) as response:
        refused = await running.client.post(COMPLETIONS, json=body([49_000] * 5000))
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert text_of(await events(response)) == expected_text(running, [5, 6, 7], 40)


# placement


async def test_a_router_places_and_impatience_moves_on(make_gateway: MakeGateway, make_worker: MakeWorker) -> None:
    running = await make_gateway(patience_seconds=0.2, route_seconds=0.5)
    workers = [await make_worker(), await make_worker()]
    await heard(running, 2)
    asked: list[messages.RouteRequest] = []
    choice = workers[1]

    async def route(payload: bytes, reply: str) -> None:
        asked.append(messages.decode_route_request(payload))
        await workers[0].bus.publish(reply, messages.encode(RouteReply(version=1, worker=choice.id)))

    await workers[0].bus.subscribe(subjects.ROUTE, route, queue=subjects.ROUTERS)
    await workers[0].bus.flush()
    prompt = list(range(100, 140))
    for _ in range(6):
        assert (await running.client.post(COMPLETIONS, json=body(prompt))).status_code == 200
    assert (len(workers[0].works), len(workers[1].works)) == (0, 6)
    assert (len(asked), asked[0].prompt_tokens, len(asked[0].hashes)) == (6, 40, 2)
    workers[1].pulling = False
    await asyncio.sleep(0.2)
    answer = await running.client.post(COMPLETIONS, json=body(prompt))
    assert answer.json()["choices"][0]["text"] == expected_text(running, prompt, 40)
    assert [work.attempt for work in workers[0].works] == [1]
    assert counter(running, "headrace_resumes_total", reason="impatience") == 1
    assert await queued_messages(running) == 0


async def test_without_a_router_the_shared_queue_serves(make_gateway: MakeGateway, make_worker: MakeWorker) -> None:
    running = await make_gateway()
    workers = [await make_worker(), await make_worker()]
    await heard(running, 2)
    assert (await running.client.post(COMPLETIONS, json=body(list(range(40))))).status_code == 200
    assert sum(len(one.works) for one in workers) == 1


# disconnects


async def _abandon(running: RunningGateway, ready: Callable[[], bool], *, streamed: bool) -> None:
    async with httpx.AsyncClient(base_url=running.url, headers=running.client.headers) as client:
        request = asyncio.create_task(client.post(COMPLETIONS, json=body(stream=streamed, max_tokens=1000)))
        await until(ready)
        request.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await request


@pytest.mark.parametrize("streamed", [True, False])
async def test_leaving_while_queued_takes_the_message_back(make_gateway: MakeGateway, streamed: bool) -> None:
    running = await make_gateway()
    opened = running.gateway.relay._open
    await _abandon(running, lambda: any(request.sequence for request in opened.values()), streamed=streamed)
    await until(lambda: not opened)
    async with asyncio.timeout(1):
        while await queued_messages(running):
            await asyncio.sleep(0.01)
    assert counter(running, "headrace_requests_total", model="m", outcome="cancelled") == 1


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("state", ["prefilling", "running"])
async def test_leaving_cancels_at_the_worker(make_gateway: MakeGateway, make_worker: MakeWorker, streamed: bool, state: str) -> None:
    running = await make_gateway()
    busy = await make_worker()
    await heard(running)
    other = asyncio.create_task(stream(running.client, COMPLETIONS, body(max_tokens=100)))
    await until(lambda: len(busy.running) == 1)
    if state == "prefilling":
        busy.go.clear()
        await _abandon(running, lambda: len(busy.running) == 2, streamed=streamed)
    else:
        known = {delta.request for _, delta in busy.sent}
        await _abandon(running, lambda: sum(delta.request not in known for _, delta in busy.sent) > 5, streamed=streamed)
    await until(lambda: len(busy.cancels) == 1, 1)
    busy.go.set()
    await until(lambda: len(busy.running) <= 1)
    assert text_of(await other) == expected_text(running, [5, 6, 7], 100)
    assert len(busy.cancels) == 1


async def test_leaving_between_queue_and_acceptance_is_caught_late(make_gateway: MakeGateway, make_worker: MakeWorker) -> None:
    running = await make_gateway()
    slow = await make_worker()
    slow.before_accept.clear()
    await _abandon(running, lambda: len(slow.works) == 1, streamed=True)
    await until(lambda: running.gateway.relay.open_requests == 0)
    slow.before_accept.set()
    await until(lambda: len(slow.cancels) == 1, 1)
    await until(lambda: not slow.running)


async def test_a_refusal_right_after_acceptance_is_still_a_status(make_gateway: MakeGateway, make_worker: MakeWorker) -> None:
    running = await make_gateway()
    small = await make_worker()
    small.fail_with = "kv_capacity"
    refused = await running.client.post(COMPLETIONS, json=body(stream=True))
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    small.fail_with, small.expire_all, small.accept_expired = None, True, True
    refused = await running.client.post(COMPLETIONS, json=body(stream=True))
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")


async def test_leaving_is_no_error_in_the_log(make_gateway: MakeGateway, make_worker: MakeWorker, caplog: pytest.LogCaptureFixture) -> None:
    running = await make_gateway()
    busy = await make_worker()
    for streamed in (True, False):
        await _abandon(running, lambda: bool(busy.running), streamed=streamed)
        await until(lambda: not busy.running)
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]
