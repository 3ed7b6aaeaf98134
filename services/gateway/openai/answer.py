"""How a generation becomes an HTTP response: one JSON body, or server-sent events. The endpoints give it the shape of their chunks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import orjson
from starlette.types import Receive, Send

from services.gateway.generation import Choice, Generation, Usage
from services.gateway.openai.body import ClientGone
from services.gateway.openai.errors import ApiError, ContextTooLong, Failed, Overloaded, Unavailable, WorkerLost, send_json
from services.gateway.openai.schemas import Options
from services.gateway.request import Failure

HEARTBEAT_SECONDS = 10.0
REFUSAL_SECONDS = 0.25  # a worker that accepts may still refuse (too late, too long): so long is that a status, later an event
SEND_SECONDS = 60.0  # a client that takes nothing for so long is taken for gone
_PING = b": ping\n"  # one newline: a second one would be an empty event to some clients
_DONE = b"data: [DONE]\n\n"
_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]

_FAILURES: dict[str, Callable[[Failure], ApiError]] = {
    "queue_full": lambda f: Overloaded("All workers are busy and the queue is full.", retry_after_seconds=f.retry_after_seconds),
    "timeout": lambda f: Overloaded("No worker was free in time.", retry_after_seconds=f.retry_after_seconds or 1),
    "unavailable": lambda f: Unavailable("The work queue cannot be reached.", retry_after_seconds=f.retry_after_seconds or 1),
    "shutting_down": lambda f: Unavailable("This server is shutting down.", retry_after_seconds=1),
    "worker_lost": lambda f: WorkerLost("The request was moved to another worker too many times."),
    "kv_capacity": lambda f: ContextTooLong("No worker has memory for a prompt and completion of this length."),
    "too_large": lambda f: ContextTooLong("The prompt is too long to be queued."),
}


class Shape(Protocol):
    """The JSON of one endpoint."""

    def opening(self, choice: Choice) -> bytes:
        """Return the event that comes before a choice's text, or nothing."""

    def text(self, choice: Choice, text: str, usage: Usage | None) -> bytes:
        """Return the event for new text."""

    def final(self, choice: Choice, usage: Usage | None) -> bytes:
        """Return the event with the finish reason."""

    def usage(self, usage: Usage) -> bytes:
        """Return the event with the usage and no choices."""

    def whole(self, texts: list[str], generation: Generation) -> dict[str, Any]:
        """Return the body of a response that is not streamed."""


def to_error(failure: Failure) -> ApiError:
    """Return what the client is told about a failure."""
    make = _FAILURES.get(failure.code)
    return make(failure) if make is not None else Failed("The server failed to process this request.")


async def answer(generation: Generation, shape: Shape, options: Options, receive: Receive, send: Send) -> None:
    """Start a generation and answer with it. When the client leaves, its work is stopped.

    Raises:
        ApiError: before anything was sent.
    """
    respond = _stream if options.stream else _whole
    try:
        await run_unless_gone(receive, respond(generation, shape, options, send))
    except ClientGone:
        return
    finally:
        generation.close()


async def run_unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; cancel it and raise ClientGone when the connection closes first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        await task
    finally:
        for one in (task, gone):
            if not one.done():
                one.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await one


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _whole(generation: Generation, shape: Shape, options: Options, send: Send) -> None:
    generation.start()
    pieces: list[list[str]] = [[] for _ in generation.choices]
    async for changes in generation.changes(silence_seconds=3600):
        for choice, text in changes:
            pieces[choice.index].append(text)
            if choice.failure is not None:
                raise to_error(choice.failure)
    body = shape.whole(["".join(texts) for texts in pieces], generation)
    generation.close()  # before the client can ask what it cost
    await send_json(send, 200, orjson.dumps(body), [_request_id(generation)])


async def _stream(generation: Generation, shape: Shape, options: Options, send: Send) -> None:
    generation.start()
    failure = await generation.admitted(REFUSAL_SECONDS)
    if failure is not None:
        raise to_error(failure)
    await send({"type": "http.response.start", "status": 200, "headers": [*_EVENT_HEADERS, _request_id(generation)]})
    ready = [shape.opening(choice) for choice in generation.choices]
    if any(ready):
        await _send_part(send, b"".join(ready))
    async for changes in generation.changes(HEARTBEAT_SECONDS):
        events: list[bytes] = []
        for choice, text in changes:
            usage = choice.usage() if options.continuous_usage else None
            if text:
                events.append(shape.text(choice, text, usage))
            if choice.failure is not None:
                events += [b"data: ", to_error(choice.failure).envelope(), b"\n\n", _DONE]
                await _send_part(send, b"".join(events), more=False)
                return
            if choice.done:
                events.append(shape.final(choice, usage))
        await _send_part(send, b"".join(events) or _PING)
    generation.close()  # before the client can ask what it cost
    last = shape.usage(generation.usage()) if options.include_usage else b""
    await _send_part(send, last + _DONE, more=False)


def _request_id(generation: Generation) -> tuple[bytes, bytes]:
    return b"x-request-id", generation.choices[0].request.id.encode()  # as in the workers' logs


async def _send_part(send: Send, body: bytes, *, more: bool = True) -> None:
    try:
        async with asyncio.timeout(SEND_SECONDS):
            await send({"type": "http.response.body", "body": body, "more_body": more})
    except TimeoutError:
        raise ClientGone from None


class EventTemplate:
    """Server-sent events that differ in little but the text: the rest is serialised once per stream."""

    def __init__(self, base: dict[str, Any], *, include_usage: bool) -> None:
        self._base = base
        self._head = b"data: " + orjson.dumps(base)[:-1]
        self._no_usage = b',"usage":null}\n\n' if include_usage else b"}\n\n"

    def prefix(self, choices_start: bytes) -> bytes:
        """Return the start of an event, up to where `choices_start` (after `"choices":[`) leaves off."""
        return self._head + b',"choices":[' + choices_start

    def tail(self, usage: Usage | None) -> bytes:
        """Return the end of an event, after its choices' bracket."""
        return self._no_usage if usage is None else b',"usage":' + orjson.dumps(usage.plain()) + b"}\n\n"
