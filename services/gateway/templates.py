"""Chat templates: Jinja in a sandbox, as transformers renders them. Knows no tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

MAX_RENDERED_CHARACTERS = 16 << 20


class TemplateFailure(ValueError):
    """The template refused these messages (its own `raise_exception`), or could not render them."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; for serving it only passes its body through."""

    tags = {"generation"}  # noqa: RUF012  # declared so by jinja2

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_pass_through"), [], [], body).set_lineno(line)

    def _pass_through(self, caller: jinja2.runtime.Macro) -> str:
        return str(caller())


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """One compiled template. `special_tokens` are the names it may use, such as `bos_token`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile.

        Raises:
            TemplateFailure: `source` is not a valid template.
        """
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateFailure(f"chat template: {error}") from None
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """Return the text of a conversation.

        Raises:
            TemplateFailure: the template refused it, or its output is too long.
        """
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(
                messages=messages, tools=None, documents=None, add_generation_prompt=add_generation_prompt, **self._special_tokens
            ):
                length += len(piece)
                if length > MAX_RENDERED_CHARACTERS:
                    raise TemplateFailure("the rendered conversation is too long")
                pieces.append(piece)
        except TemplateFailure:
            raise
        except Exception as error:  # a template is a program: it may fail in any way
            raise TemplateFailure(str(error)[:200] or type(error).__name__) from None
        return "".join(pieces)
