"""Every field of the two request bodies: what is taken, and what is refused with the field's path."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from starlette.types import Message

from services.gateway.openai import body as body_module
from services.gateway.openai.body import ClientGone, read_json
from services.gateway.openai.errors import MAX_ECHO_CHARACTERS, ApiError, BadRequest, BodyTooLarge, Overloaded, ReceiptTimeout, Unsupported
from services.gateway.openai.schemas import chat_request, completion_request
from shared.messages import MAX_REQUEST_TOKENS

HELLO = [{"role": "user", "content": "Hello"}]
MISSING = object()
LONG = "x" * 5000


def chat(**changes: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": HELLO} | changes
    return {key: value for key, value in body.items() if value is not MISSING}


def completion(**changes: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": "Hello"} | changes
    return {key: value for key, value in body.items() if value is not MISSING}


# (changes, param): for both endpoints
COMMON: list[tuple[dict[str, Any], str]] = [
    ({"model": MISSING}, "model"),
    ({"model": None}, "model"),
    ({"model": 1}, "model"),
    ({"model": ""}, "model"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.01}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_p": {}}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"top_k": -2}, "top_k"),
    ({"seed": 1.5}, "seed"),
    ({"seed": "a"}, "seed"),
    ({"seed": 1 << 63}, "seed"),
    ({"seed": 1e30}, "seed"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 10**18}, "max_tokens"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stop": ["a", None]}, "stop[1]"),
    ({"stop": ""}, "stop[0]"),
    ({"stop": ["a", LONG]}, "stop[1]"),
    ({"stream": "true"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {}}, "stream_options"),
    ({"stream": True, "stream_options": []}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "stream_options": {"continuous_usage_stats": "x"}}, "stream_options.continuous_usage_stats"),
    ({"ignore_eos": "no"}, "ignore_eos"),
    ({"user": 5}, "user"),
    ({"user": LONG}, "user"),
    ({"metadata": "x"}, "metadata"),
    ({"service_tier": "gold"}, "service_tier"),
    ({"service_tier": 1}, "service_tier"),
]
CHAT = [
    ({"messages": MISSING}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hello"}, "messages"),
    ({"messages": {"role": "user"}}, "messages"),
    ({"messages": ["Hello"]}, "messages[0]"),
    ({"messages": [*HELLO, {"role": "robot", "content": "x"}]}, "messages[1].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": None, "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": 5, "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": "5"}, "max_completion_tokens"),
]
COMPLETION = [
    ({"prompt": MISSING}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": ["a", 5]}, "prompt[1]"),
    ({"prompt": ["a", None]}, "prompt[1]"),
    ({"prompt": [[1], []]}, "prompt[1]"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": [1, True]}, "prompt[1]"),
    ({"prompt": [1, 2.0]}, "prompt[1]"),
    ({"prompt": [1.5, 2]}, "prompt[0]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [1] * (MAX_REQUEST_TOKENS + 1)}, "prompt"),
    ({"prompt": [[1], [2, "a"]]}, "prompt[1][1]"),
    ({"prompt": ["a"] * 129}, "prompt"),
]
UNSUPPORTED: list[tuple[str, Any, Any]] = [  # (field, refused, harmless)
    ("n", 2, 1),
    ("presence_penalty", 0.5, 0),
    ("frequency_penalty", -1, 0.0),
    ("repetition_penalty", 1.1, 1.0),
    ("min_p", 0.1, 0),
    ("logit_bias", {"5": 1}, {}),
]
UNSUPPORTED_CHAT: list[tuple[str, Any, Any]] = [
    ("logprobs", True, False),
    ("top_logprobs", 5, 0),
    ("tools", [{"type": "function"}], []),
    ("tool_choice", "required", "auto"),
    ("functions", [{}], []),
    ("response_format", {"type": "json_object"}, {"type": "text"}),
    ("modalities", ["audio"], ["text"]),
    ("audio", {}, None),
    ("store", True, False),
]
UNSUPPORTED_COMPLETION: list[tuple[str, Any, Any]] = [
    ("logprobs", 1, None),
    ("echo", True, False),
    ("best_of", 2, 1),
    ("suffix", "x", None),
]


@pytest.mark.parametrize(("changes", "param"), [*COMMON, *CHAT])
def test_chat_refuses(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        chat_request(chat(**changes))
    assert (caught.value.status, caught.value.param) == (400, param)
    assert len(caught.value.message) < 3 * MAX_ECHO_CHARACTERS
    assert param.split("[")[0].split(".")[0] in caught.value.message


@pytest.mark.parametrize(("changes", "param"), [*COMMON, *COMPLETION])
def test_completions_refuse(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        completion_request(completion(**changes))
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(("field", "refused", "harmless"), [*UNSUPPORTED, *UNSUPPORTED_CHAT])
def test_chat_names_what_is_not_supported(field: str, refused: Any, harmless: Any) -> None:
    with pytest.raises(Unsupported) as caught:
        chat_request(chat(**{field: refused}))
    assert (caught.value.param, caught.value.code) == (field, "unsupported_value")
    for value in (harmless, None):
        chat_request(chat(**{field: value}))


@pytest.mark.parametrize(("field", "refused", "harmless"), [*UNSUPPORTED, *UNSUPPORTED_COMPLETION])
def test_completions_name_what_is_not_supported(field: str, refused: Any, harmless: Any) -> None:
    with pytest.raises(Unsupported) as caught:
        completion_request(completion(**{field: refused}))
    assert (caught.value.param, caught.value.code) == (field, "unsupported_value")
    for value in (harmless, None):
        completion_request(completion(**{field: value}))


def test_images_and_tool_calls_are_not_supported() -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    with pytest.raises(Unsupported) as caught:
        chat_request(chat(messages=[image]))
    assert caught.value.param == "messages[0].content[0].type"
    with pytest.raises(Unsupported) as caught:
        chat_request(chat(messages=[{"role": "assistant", "content": None, "tool_calls": [{}]}]))
    assert caught.value.param == "messages[0].tool_calls"


def test_defaults() -> None:
    options = chat_request(chat()).options
    assert (options.temperature, options.top_p, options.top_k, options.seed, options.max_tokens) == (None, None, None, None, None)
    assert (options.stops, options.stream, options.include_usage, options.ignore_eos, options.priority) == (
        (),
        False,
        False,
        False,
        "standard",
    )


def test_null_means_absent_and_unknown_fields_are_ignored() -> None:
    optional = [
        "temperature",
        "top_p",
        "top_k",
        "seed",
        "max_tokens",
        "stop",
        "stream",
        "stream_options",
        "user",
        "metadata",
        "service_tier",
    ]
    nothing = dict.fromkeys(optional, None)
    assert chat_request(chat(**nothing, max_completion_tokens=None, reasoning_effort="low", whatever=[1])) == chat_request(chat())
    assert completion_request(completion(**nothing)) == completion_request(completion())


def test_everything_at_once() -> None:
    options = chat_request(
        chat(
            max_tokens=5,
            max_completion_tokens=7,
            temperature=0,
            top_p=0.5,
            top_k=-1,
            seed=-5,
            stop="x",
            stream=True,
            stream_options={"continuous_usage_stats": True},
            service_tier="flex",
            ignore_eos=True,
        )
    ).options
    assert (options.max_tokens, options.temperature, options.top_p, options.top_k, options.seed) == (7, 0.0, 0.5, 0, -5)
    assert (options.stops, options.include_usage, options.continuous_usage, options.priority) == (("x",), True, True, "batch")


def test_messages_are_as_templates_take_them() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = chat_request(
        chat(
            messages=[
                {"role": "developer", "content": "be kind", "name": "dev"},
                {"role": "user", "content": parts},
                {"role": "assistant", "content": "", "tool_calls": [], "refusal": None},
                {"role": "tool", "content": "4", "tool_call_id": "c"},
            ]
        )
    ).messages
    assert messages == [
        {"role": "system", "content": "be kind", "name": "dev"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "4", "tool_call_id": "c"},
    ]


def test_prompts_in_every_form() -> None:
    for prompt, expected in [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])]:
        assert completion_request(completion(prompt=prompt)).prompts == expected


def test_the_envelope() -> None:
    error = Overloaded("busy", retry_after_seconds=1.2)
    assert orjson.loads(error.envelope()) == {"error": {"message": "busy", "type": "overloaded_error", "param": None, "code": "overloaded"}}
    assert error.headers() == [(b"retry-after", b"2")]


# the body


async def _read(*parts: bytes, max_bytes: int = 1000, declared: int | None = None, end: bool = True) -> Any:
    messages: list[Message] = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    if end:
        messages.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> Message:
        if messages:
            return messages.pop(0)
        await asyncio.sleep(3600)
        return {"type": "http.disconnect"}

    headers = [(b"content-length", str(declared).encode())] if declared is not None else []
    return await read_json({"type": "http", "headers": headers}, receive, max_bytes)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"x"',
        b"null",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": "\\ud800"}',
        b'{"a": "\xff"}',
        b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"a": 1} trailing ' + LONG.encode(),
    ],
)
async def test_bodies_that_are_not_objects_are_refused(body: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        await _read(body, max_bytes=1 << 20)
    assert len(caught.value.message) < MAX_ECHO_CHARACTERS


async def test_bodies_come_in_parts_and_large_ones_are_parsed_elsewhere() -> None:
    assert await _read(b'{"a"', b": 1}") == {"a": 1}
    large = {"a": "x" * 200_000}
    assert await _read(orjson.dumps(large), max_bytes=1 << 20) == large


async def test_bodies_are_bounded_in_size_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BodyTooLarge):
        await _read(b"", declared=1001)
    with pytest.raises(BodyTooLarge):
        await _read(b" " * 600, b" " * 600)
    monkeypatch.setattr(body_module, "RECEIPT_SECONDS", 0.05)
    with pytest.raises(ReceiptTimeout):
        await _read(b'{"a"', end=False)


async def test_a_client_that_leaves_while_sending() -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientGone):
        await read_json({"type": "http", "headers": []}, receive, 1000)


def test_no_error_echoes_much() -> None:
    nested: list[object] = []
    for _ in range(500):
        nested = [nested]
    for changes in (
        {"service_tier": LONG},
        {"temperature": 10**300},
        {"tools": [LONG]},
        {"tools": nested},
        {"messages": [{"role": LONG, "content": "x"}]},
    ):
        with pytest.raises(ApiError) as caught:
            chat_request(chat(**changes))
        assert len(caught.value.message) < 2 * MAX_ECHO_CHARACTERS
