"""What may go wrong after a request has started: strange frames, lost workers, a lost NATS server, a gateway that leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from shared import messages, subjects
from shared.bus import Bus
from shared.messages import Accepted, Delta
from shared.model_files import ModelFolder
from tests.support.gateways import (
    COMPLETIONS,
    MakeGateway,
    MakeWorker,
    RunningGateway,
    body,
    counter,
    events,
    expected_text,
    finish_of,
    heard,
    open_stream,
    running_gateway,
    text_of,
    until,
)
from tests.support.scripted_worker import ScriptedWorker, chained
from tests.support.servers import ServerProcess, nats_server

# strange frames


async def test_duplicate_overlapping_and_unknown_frames_change_nothing(make_gateway: MakeGateway, make_worker: MakeWorker) -> None:
    running = await make_gateway()
    busy = await make_worker()
    busy.go.clear()
    async with open_stream(running, max_tokens=10) as response:
        await until(lambda: len(busy.running) == 1)
        work = busy.works[0]
        tokens = [5, 6, 7]
        for _ in range(10):
            tokens.append(chained(tokens))
        output = tokens[3:]

        async def send(attempt: int, index: int, new: list[int], request: str = work.request) -> None:
            await busy.send(work.gateway, Delta(request, attempt, index, new))

        await send(0, 0, output[:2])
        await send(0, 0, output[:2])  # repeated
        await send(0, 1, output[1:4])  # overlapping
        await send(0, 4, [])
        await send(7, 4, [65, 65])  # an attempt that never was
        await send(0, 0, [65], subjects.mint("r"))  # unknown
        await busy.bus.publish(subjects.frames(work.gateway), b"\xc1 not msgpack")
        again = Accepted(version=1, worker=busy.id, request=work.request, attempt=0)
        await busy.bus.publish(subjects.frames(work.gateway), messages.encode(again))
        await send(0, 4, output[4:9])
        await busy.send(work.gateway, Delta(work.request, 0, 9, output[9:], "length"))
        await busy.send(work.gateway, Delta(work.request, 0, 9, output[9:], "length"))
        chunks = await events(response)
    assert text_of(chunks) == expected_text(running, [5, 6, 7], 10)
    assert finish_of(chunks) == "length"
    await until(lambda: counter(running, "headrace_frames_ignored_total", reason="unknown_request") == 2)
    assert counter(running, "headrace_frames_ignored_total", reason="repeat") == 1
    assert counter(running, "headrace_frames_ignored_total", reason="malformed") == 2
    assert counter(running, "headrace_resumes_total", reason="worker_lost") == 0


async def test_a_gap_resumes_from_the_last_token(make_gateway: MakeGateway, make_worker: MakeWorker) -> None:
    running = await make_gateway()
    busy = await make_worker()
    async with open_stream(running, max_tokens=100) as response:
        await until(lambda: len(busy.sent) > 5)
        work = busy.works[0]
        index = max(delta.index for _, delta in busy.sent) + 50
        await busy.send(work.gateway, Delta(work.request, 0, index, [65, 65]))
        chunks = await events(response)
    assert text_of(chunks) == expected_text(running, [5, 6, 7], 100)
    assert [work.attempt for work in busy.works] == [0, 1]
    assert busy.works[1].tokens[: len(busy.works[0].tokens)] == busy.works[0].tokens
    assert (busy.works[1].prompt_length, busy.works[1].max_tokens) == (3, 100)
    assert busy.works[1].sampling == busy.works[0].sampling
    assert counter(running, "headrace_frames_ignored_total", reason="gap") == 1


async def test_an_attempt_run_twice_counts_once(make_gateway: MakeGateway, make_worker: MakeWorker) -> None:
    """The queue may hand a request to a second worker when an acknowledgement is lost: the first counts, the second is cancelled."""
    running = await make_gateway()
    first, second = await make_worker(), await make_worker()
    second.pulling = False
    await asyncio.sleep(0.2)
    async with open_stream(running, max_tokens=60) as response:
        await until(lambda: len(first.running) == 1)
        work = first.works[0]
        accepted = Accepted(version=1, worker=second.id, request=work.request, attempt=0)
        await second.bus.publish(subjects.frames(work.gateway), messages.encode(accepted))
        await second.send(work.gateway, Delta(work.request, 0, 0, [65, 65, 65]))
        chunks = await events(response)
    assert text_of(chunks) == expected_text(running, [5, 6, 7], 60)
    assert len(second.cancels) == 1
    assert not first.cancels


# loss


async def _lose_during(running: RunningGateway, workers: list[ScriptedWorker], how: Callable[[ScriptedWorker], Awaitable[None]]) -> None:
    started = time.monotonic()
    async with open_stream(running, max_tokens=300) as response:
        await until(lambda: any(len(one.sent) > 20 for one in workers))
        victim = next(one for one in workers if one.sent)
        other = next(one for one in workers if one is not victim)
        await how(victim)
        chunks = await events(response)
    assert time.monotonic() - started < 8
    assert text_of(chunks) == expected_text(running, [5, 6, 7], 300)
    assert finish_of(chunks) == "length"
    assert other.works[-1].attempt >= 1
    assert counter(running, "headrace_resumes_total", reason="worker_lost") == 1


async def test_a_silent_worker_is_replaced_and_its_late_frames_ignored(make_gateway: MakeGateway, make_worker: MakeWorker) -> None:
    running = await make_gateway(worker_silence_seconds=0.6)
    workers = [await make_worker(), await make_worker()]
    await heard(running, 2)
    revived: list[ScriptedWorker] = []

    async def freeze(victim: ScriptedWorker) -> None:
        victim.silent = True
        revived.append(victim)
        await until(lambda: counter(running, "headrace_resumes_total", reason="worker_lost") == 1)
        victim.silent = False

    await _lose_during(running, workers, freeze)
    await until(lambda: len(revived[0].cancels) >= 1)  # it went on, and was told to stop
    await until(lambda: not revived[0].running)
    assert counter(running, "headrace_frames_ignored_total", reason="old_attempt") >= 1


async def test_a_leaving_worker_is_replaced_at_once(make_gateway: MakeGateway, make_worker: MakeWorker) -> None:
    running = await make_gateway(worker_silence_seconds=30)
    workers = [await make_worker(), await make_worker()]
    await heard(running, 2)

    async def leave(victim: ScriptedWorker) -> None:
        victim.silent = True
        await victim.beat(leaving=True)

    await _lose_during(running, workers, leave)


async def test_a_failed_engine_is_replaced(make_gateway: MakeGateway, make_worker: MakeWorker) -> None:
    running = await make_gateway()
    workers = [await make_worker(), await make_worker()]
    await heard(running, 2)

    async def fail(victim: ScriptedWorker) -> None:
        victim.fail_with = "worker_failed"

    await _lose_during(running, workers, fail)


async def test_too_many_losses_end_with_an_error(make_gateway: MakeGateway, make_worker: MakeWorker) -> None:
    running = await make_gateway(max_resumes=2)
    broken = await make_worker()
    broken.fail_with = "worker_failed"
    answer = await running.client.post(COMPLETIONS, json=body())
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "worker_lost")
    assert [work.attempt for work in broken.works] == [0, 1, 2]
    broken.fail_with = None
    async with open_stream(running, max_tokens=1000) as response:
        await until(lambda: len(broken.sent) > 10)
        broken.fail_with = "worker_failed"
        chunks = await events(response)
    assert chunks[-1]["error"]["code"] == "worker_lost"
    text = text_of(chunks[:-1])
    assert text == expected_text(running, [5, 6, 7], 1000)[: len(text)] != ""
    assert counter(running, "headrace_open_requests", model="m") == 0


async def test_a_worker_lost_before_its_last_word(make_gateway: MakeGateway, make_worker: MakeWorker) -> None:
    """All tokens had arrived: there is nothing to resume."""
    running = await make_gateway()
    busy = await make_worker()
    busy.go.clear()
    async with open_stream(running, max_tokens=3) as response:
        await until(lambda: len(busy.running) == 1)
        await busy.send(busy.works[0].gateway, Delta(busy.works[0].request, 0, 0, [65, 66, 67]))
        await busy.beat(leaving=True)
        chunks = await events(response)
    assert (text_of(chunks), finish_of(chunks)) == (running.gateway.model.tokenizer.table([65, 66, 67]).decode(), "length")


@pytest.mark.parametrize("hard", [True, False])
async def test_a_restarted_nats_server_breaks_no_stream(smollm: ModelFolder, valkey: ServerProcess, tmp_path: Path, hard: bool) -> None:
    with nats_server(tmp_path) as nats:
        async with running_gateway(smollm.path, nats.url, valkey.url) as running:
            workers = [ScriptedWorker(await Bus.connect(nats.url, "worker"), "m", step_seconds=0.02) for _ in range(2)]
            for one in workers:
                one.bus.on_reconnect(one.rejoin)
                await one.start()
            await heard(running, 2)
            try:
                async with open_stream(running, max_tokens=150) as response:
                    await until(lambda: any(len(one.sent) > 10 for one in workers))
                    nats.stop(hard=hard)
                    refused = await running.client.post(COMPLETIONS, json=body())
                    assert refused.status_code == 503
                    assert (await running.client.get("/ready")).status_code == 503
                    await asyncio.sleep(0.5)
                    nats.start()
                    async with asyncio.timeout(15):
                        chunks = await events(response)
                assert text_of(chunks) == expected_text(running, [5, 6, 7], 150)
                assert (await running.client.post(COMPLETIONS, json=body())).status_code == 200
            finally:
                for one in workers:
                    await one.stop()
                    await one.bus.close()


async def test_a_lasting_outage_ends_streams_with_an_error(
    smollm: ModelFolder, valkey: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.relay.OUTAGE_SECONDS", 0.5)
    with nats_server(tmp_path) as nats:
        async with running_gateway(smollm.path, nats.url, valkey.url) as running:
            one = ScriptedWorker(await Bus.connect(nats.url, "worker"), "m", step_seconds=0.02)
            await one.start()
            async with open_stream(running, max_tokens=1000) as response:
                await until(lambda: len(one.sent) > 3)
                await one.stop()
                nats.stop()
                async with asyncio.timeout(5):
                    chunks = await events(response)
            assert chunks[-1]["error"]["code"] == "unavailable"
            await one.bus.close()


async def test_gateways_say_goodbye(make_gateway: MakeGateway, make_worker: MakeWorker, smollm: ModelFolder, nats: ServerProcess) -> None:
    listener = (await make_worker()).bus
    states: list[messages.GatewayState] = []

    async def on_state(payload: bytes, _reply: str) -> None:
        state = messages.decode_fleet_state(payload)
        if isinstance(state, messages.GatewayState):
            states.append(state)

    await listener.subscribe(subjects.FLEET_STATE, on_state)
    await listener.flush()
    async with running_gateway(smollm.path, nats.url, "redis://127.0.0.1:1/0") as running:
        await until(lambda: len(states) >= 2)
        name = running.gateway.id
    await until(lambda: states[-1].leaving)
    assert {state.gateway for state in states} == {name}
