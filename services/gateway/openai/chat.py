"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from services.gateway.generation import Choice, Generation, Usage
from services.gateway.openai.answer import EventTemplate, answer
from services.gateway.openai.body import read_json
from services.gateway.openai.errors import BadRequest
from services.gateway.openai.schemas import chat_request
from services.gateway.service import Gateway
from services.gateway.templates import TemplateFailure
from shared import subjects


class ChatCompletions:
    """The endpoint, as an ASGI application."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        arrived = time.monotonic()
        request = chat_request(await read_json(scope, receive, gateway.settings.max_body_bytes))
        options = request.options
        gateway.check_model(options.model)
        characters = sum(len(message["content"]) for message in request.messages)
        gateway.check_length(characters, "messages")
        characters += 50 * len(request.messages)  # for the template's own words
        try:
            prompt = await gateway.tokenise(characters, lambda: gateway.model.tokenizer.render_chat(request.messages))
        except TemplateFailure as error:
            raise BadRequest(f"The chat template refused these messages: {error}", param="messages", code="invalid_value") from None
        if not prompt:
            raise BadRequest("These messages make an empty prompt.", param="messages", code="invalid_value")
        budget = gateway.output_budget(len(prompt), options.max_tokens, None, "messages")
        generation = gateway.generate(options, [prompt], [budget], arrived, at_start=True)
        await answer(generation, ChatShape(options.model, include_usage=options.include_usage), options, receive, send)


class ChatShape:
    """Chat completion objects and chunks."""

    def __init__(self, model: str, *, include_usage: bool) -> None:
        self._base: dict[str, Any] = {
            "id": subjects.mint("chatcmpl"),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        self._template = template = EventTemplate(self._base, include_usage=include_usage)
        self._text = template.prefix(b'{"index":0,"delta":{"content":')
        self._opening = template.prefix(b'{"index":0,"delta":{"role":"assistant","content":""}')
        self._final = template.prefix(b'{"index":0,"delta":{},"logprobs":null,"finish_reason":')

    def opening(self, choice: Choice) -> bytes:
        """Return the chunk with the role."""
        return self._opening + b',"logprobs":null,"finish_reason":null}]' + self._template.tail(None)

    def text(self, choice: Choice, text: str, usage: Usage | None) -> bytes:
        """Return the chunk for new text."""
        return self._text + orjson.dumps(text) + b'},"logprobs":null,"finish_reason":null}]' + self._template.tail(usage)

    def final(self, choice: Choice, usage: Usage | None) -> bytes:
        """Return the chunk with the finish reason."""
        return self._final + orjson.dumps(choice.finish_reason) + b"}]" + self._template.tail(usage)

    def usage(self, usage: Usage) -> bytes:
        """Return the chunk with the usage."""
        return self._template.prefix(b"]") + self._template.tail(usage)

    def whole(self, texts: list[str], generation: Generation) -> dict[str, Any]:
        """Return the chat completion object."""
        choices = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": choice.finish_reason,
            }
            for choice, text in zip(generation.choices, texts, strict=True)
        ]
        return self._base | {"object": "chat.completion", "choices": choices, "usage": generation.usage().plain()}
