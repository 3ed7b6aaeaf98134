"""POST /v1/completions: raw prompts, several at once if the client likes.

Special tokens written in a string prompt count as such, and BOS is added when the model's tokenizer adds it, as in other servers.
"""

from __future__ import annotations

import time
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from services.gateway.generation import Choice, Generation, Usage
from services.gateway.openai.answer import EventTemplate, answer
from services.gateway.openai.body import read_json
from services.gateway.openai.errors import BadRequest
from services.gateway.openai.schemas import CompletionRequest, completion_request
from services.gateway.service import Gateway
from shared import subjects

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class Completions:
    """The endpoint, as an ASGI application."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway = self._gateway
        arrived = time.monotonic()
        request = completion_request(await read_json(scope, receive, gateway.settings.max_body_bytes))
        options = request.options
        gateway.check_model(options.model)
        texts = [len(prompt) for prompt in request.prompts if isinstance(prompt, str)]
        gateway.check_length(max(texts, default=0), "prompt")
        prompts = await gateway.tokenise(sum(texts), lambda: self._tokenise(request))
        budgets = [gateway.output_budget(len(prompt), options.max_tokens, DEFAULT_MAX_TOKENS, "prompt") for prompt in prompts]
        generation = gateway.generate(options, prompts, budgets, arrived, at_start=False)
        shape = CompletionShape(options.model, len(prompts), include_usage=options.include_usage)
        await answer(generation, shape, options, receive, send)

    def _tokenise(self, request: CompletionRequest) -> list[list[int]]:
        model = self._gateway.model
        prompts: list[list[int]] = []
        for i, prompt in enumerate(request.prompts):
            tokens = model.tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt
            if not tokens:
                path = f"prompt[{i}]" if request.several else "prompt"
                raise BadRequest(f"'{path}' makes no tokens.", param=path, code="invalid_value")
            if min(tokens) < 0 or max(tokens) >= model.vocabulary_size:
                at = next(j for j, token in enumerate(tokens) if not 0 <= token < model.vocabulary_size)
                path = f"prompt[{i}][{at}]" if request.several else f"prompt[{at}]"
                raise BadRequest(
                    f"'{path}' is outside the vocabulary: token ids go from 0 to {model.vocabulary_size - 1}.",
                    param=path,
                    code="invalid_value",
                )
            prompts.append(tokens)
        return prompts


class CompletionShape:
    """Text completion objects; chunks have the same name."""

    def __init__(self, model: str, choices: int, *, include_usage: bool) -> None:
        self._base: dict[str, Any] = {
            "id": subjects.mint("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._template = EventTemplate(self._base, include_usage=include_usage)
        self._text = [self._template.prefix(f'{{"index":{i},"text":'.encode()) for i in range(choices)]

    def opening(self, choice: Choice) -> bytes:
        """Return nothing: a completion has no role."""
        return b""

    def text(self, choice: Choice, text: str, usage: Usage | None) -> bytes:
        """Return the chunk for new text."""
        return self._text[choice.index] + orjson.dumps(text) + b',"logprobs":null,"finish_reason":null}]' + self._template.tail(usage)

    def final(self, choice: Choice, usage: Usage | None) -> bytes:
        """Return the chunk with the finish reason."""
        reason = orjson.dumps(choice.finish_reason)
        return self._text[choice.index] + b'"","logprobs":null,"finish_reason":' + reason + b"}]" + self._template.tail(usage)

    def usage(self, usage: Usage) -> bytes:
        """Return the chunk with the usage."""
        return self._template.prefix(b"]") + self._template.tail(usage)

    def whole(self, texts: list[str], generation: Generation) -> dict[str, Any]:
        """Return the completion object."""
        choices = [
            {"index": choice.index, "text": text, "logprobs": None, "finish_reason": choice.finish_reason}
            for choice, text in zip(generation.choices, texts, strict=True)
        ]
        return self._base | {"choices": choices, "usage": generation.usage().plain()}
