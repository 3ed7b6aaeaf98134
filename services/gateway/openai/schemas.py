"""What clients may ask for: request bodies, validated into plain data. Knows no tokens and no transport."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.gateway.openai.errors import BadRequest, ContextTooLong, Unsupported, shorten
from services.gateway.openai.fields import Fields
from shared.messages import MAX_REQUEST_TOKENS, Priority

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_MESSAGES = 4096
MAX_PROMPTS = 128
_TIERS: dict[str, Priority] = {"auto": "standard", "default": "standard", "priority": "interactive", "flex": "batch"}
_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Options:
    """What chat and text completions have in common."""

    model: str
    max_tokens: int | None  # of output
    temperature: float | None  # 0: greedy; None, here and below: the model's default
    top_p: float | None
    top_k: int | None  # 0: no limit
    seed: int | None
    stops: tuple[str, ...]
    ignore_eos: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    priority: Priority


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A valid body of POST /v1/chat/completions. `messages` are as the chat template takes them: every content is a string."""

    options: Options
    messages: list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A valid body of POST /v1/completions. Each prompt is text or token ids, and becomes a choice of its own."""

    options: Options
    prompts: list[str | list[int]]
    several: bool  # they came as an array of prompts


def chat_request(body: Mapping[str, Any]) -> ChatRequest:
    """Validate a body.

    Raises:
        BadRequest: with the path of the field in `param`.
    """
    fields = Fields(body)
    fields.only("logprobs", [False])
    fields.only("top_logprobs", [0])
    fields.only("tools", [[]])
    fields.only("tool_choice", ["none", "auto"])
    fields.only("functions", [[]])
    fields.only("function_call", ["none", "auto"])
    fields.only("response_format", [{"type": "text"}])
    fields.only("modalities", [["text"]])
    fields.only("audio", [])
    fields.only("prediction", [])
    fields.only("web_search_options", [])
    fields.only("store", [False])
    max_tokens = fields.integer("max_tokens", 1, MAX_REQUEST_TOKENS)
    newer = fields.integer("max_completion_tokens", 1, MAX_REQUEST_TOKENS)
    options = _options(fields, max_tokens if newer is None else newer)
    messages = fields.required("messages")
    if not isinstance(messages, list):
        raise fields.wrong_type("messages", "an array", messages)
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise BadRequest(f"'messages' must hold 1 to {MAX_MESSAGES} messages.", param="messages", code="invalid_value")
    return ChatRequest(options, [_message(Fields(message, f"messages[{i}]")) for i, message in enumerate(messages)])


def completion_request(body: Mapping[str, Any]) -> CompletionRequest:
    """Validate a body.

    Raises:
        BadRequest: with the path of the field in `param`.
    """
    fields = Fields(body)
    fields.only("logprobs", [])
    fields.only("echo", [False])
    fields.only("best_of", [1])
    fields.only("suffix", [""])
    options = _options(fields, fields.integer("max_tokens", 1, MAX_REQUEST_TOKENS))
    prompt = fields.required("prompt")
    if isinstance(prompt, str):
        return CompletionRequest(options, [_text_prompt(prompt, "prompt")], several=False)
    if not isinstance(prompt, list):
        raise fields.wrong_type("prompt", "a string, an array of strings, or an array of token ids", prompt)
    if not prompt:
        raise BadRequest("'prompt' must not be empty.", param="prompt", code="invalid_value")
    if isinstance(prompt[0], int | float):
        return CompletionRequest(options, [_token_prompt(fields, prompt, "prompt")], several=False)
    return CompletionRequest(options, _prompts(fields, prompt), several=True)


def _options(fields: Fields, max_tokens: int | None) -> Options:
    fields.only("n", [1])
    fields.only("presence_penalty", [0])
    fields.only("frequency_penalty", [0])
    fields.only("repetition_penalty", [1])
    fields.only("min_p", [0])
    fields.only("logit_bias", [{}])
    for name in ("metadata", "stream_options"):
        if not isinstance(fields.raw(name), dict | None):
            raise fields.wrong_type(name, "an object", fields.raw(name))
    fields.text("user", max_length=1024)
    stream = fields.flag("stream")
    stream_options = Fields(fields.raw("stream_options") or {}, "stream_options")
    if fields.raw("stream_options") is not None and not stream:
        raise BadRequest("'stream_options' needs 'stream': true.", param="stream_options", code="invalid_value")
    continuous_usage = stream_options.flag("continuous_usage_stats")
    top_k = fields.integer("top_k", -1, 1 << 31)
    return Options(
        model=fields.required_text("model"),
        max_tokens=max_tokens,
        temperature=fields.number("temperature", 0, 2),
        top_p=fields.number("top_p", 0, 1, above_low=True),
        top_k=None if top_k is None else max(top_k, 0),
        seed=fields.integer("seed", -(1 << 63), (1 << 63) - 1),
        stops=_stops(fields),
        ignore_eos=fields.flag("ignore_eos"),
        stream=stream,
        include_usage=stream_options.flag("include_usage") or continuous_usage,
        continuous_usage=continuous_usage,
        priority=_TIERS[fields.choice("service_tier", tuple(_TIERS), "auto")],
    )


def _stops(fields: Fields) -> tuple[str, ...]:
    stop = fields.raw("stop")
    if stop is None:
        return ()
    if isinstance(stop, str):
        stop = [stop]
    if not isinstance(stop, list):
        raise fields.wrong_type("stop", "a string or an array of strings", stop)
    if len(stop) > MAX_STOPS:
        raise BadRequest(f"'stop' may hold at most {MAX_STOPS} strings.", param="stop", code="invalid_value")
    for i, text in enumerate(stop):
        if not isinstance(text, str):
            raise fields.wrong_type(f"stop[{i}]", "a string", text)
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise BadRequest(f"'stop[{i}]' must have 1 to {MAX_STOP_CHARACTERS} characters.", param=f"stop[{i}]", code="invalid_value")
    return tuple(stop)


def _message(fields: Fields) -> dict[str, str]:
    role = fields.required_text("role")
    if role not in _ROLES:
        known = ", ".join(_ROLES)
        raise BadRequest(f"'{fields.at('role')}' is {shorten(role)}; it may be: {known}.", param=fields.at("role"), code="invalid_value")
    fields.only("tool_calls", [[]])
    fields.only("function_call", [])
    fields.only("audio", [])
    message = {"role": "system" if role == "developer" else role, "content": _content(fields)}
    for name in ("name", "tool_call_id"):
        if (value := fields.text(name, max_length=256)) is not None:
            message[name] = value
    return message


def _content(fields: Fields) -> str:
    content = fields.required("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise fields.wrong_type("content", "a string or an array of parts", content)
    if not content:
        raise BadRequest(f"'{fields.at('content')}' must not be empty.", param=fields.at("content"), code="invalid_value")
    texts: list[str] = []
    for i, part in enumerate(content):
        part_fields = Fields(part, fields.at(f"content[{i}]"))
        kind = part_fields.required_text("type")
        if kind != "text":
            raise Unsupported(f"'{part_fields.at('type')}' = {shorten(kind)} is not supported: text only.", param=part_fields.at("type"))
        text = part_fields.text("text", required=True)
        texts.append(text or "")
    return "\n".join(texts)  # as vLLM joins them for a template that takes strings


def _prompts(fields: Fields, prompt: list[Any]) -> list[str | list[int]]:
    if len(prompt) > MAX_PROMPTS:
        raise BadRequest(f"'prompt' may hold at most {MAX_PROMPTS} prompts.", param="prompt", code="invalid_value")
    prompts: list[str | list[int]] = []
    for i, one in enumerate(prompt):
        path = f"prompt[{i}]"
        if isinstance(one, str):
            prompts.append(_text_prompt(one, path))
        elif isinstance(one, list):
            prompts.append(_token_prompt(fields, one, path))
        else:
            raise fields.wrong_type(path, "a string or an array of token ids", one)
    return prompts


def _text_prompt(text: str, path: str) -> str:
    if not text:
        raise BadRequest(f"'{path}' must not be empty.", param=path, code="invalid_value")
    return text


def _token_prompt(fields: Fields, tokens: list[Any], path: str) -> list[int]:
    if not tokens:
        raise BadRequest(f"'{path}' must not be empty.", param=path, code="invalid_value")
    if len(tokens) > MAX_REQUEST_TOKENS:
        raise ContextTooLong(f"'{path}' has {len(tokens)} tokens; this server takes at most {MAX_REQUEST_TOKENS}.", param=path)
    for i, token in enumerate(tokens):
        if type(token) is not int:
            raise fields.wrong_type(f"{path}[{i}]", "an integer", token)
    return tokens
