"""Text to token ids: prompts and chats. Built on `tokenizers`; knows no HTTP and no request."""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from services.gateway.detokenise import Detokenizer, TokenBytes, UnsupportedDecoder
from services.gateway.templates import ChatTemplate, TemplateFailure
from shared.model_files import ModelError

_NAMED_SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Unicode noncharacters: valid in a string, never in text. They spell the stand-ins below, and no case or space filter changes them.
_DIGITS = [chr(0xFDD0 + i) for i in range(16)]
_END = chr(0xFDDF + 1)


def _spell(number: int) -> str:
    return "".join(_DIGITS[int(digit, 16)] for digit in f"{number:x}")


class Tokenizer:
    """A model's vocabulary, merges, special tokens and chat template. Thread-safe."""

    def __init__(self, definition: str, config: Mapping[str, Any], template: str | None) -> None:
        """Build from the text of `tokenizer.json`, `tokenizer_config.json` and the chat template.

        Raises:
            ModelError: one of them cannot be used.
        """
        try:
            self._tokenizer = _load(definition)
            self._plain = _load(definition)
            self.table = TokenBytes(json.loads(definition))
        except UnsupportedDecoder as error:
            raise ModelError(f"tokenizer.json: {error}") from None
        self._plain.encode_special_tokens = True  # special tokens in a text are split like any other text
        decoder = self._tokenizer.get_added_tokens_decoder()
        self.vocabulary_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._longest = max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)
        self._specials = {token.content: id for id, token in decoder.items() if token.special}
        longest_first = sorted(self._specials, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        # To `_plain` every special token is known under an alias that only this process knows: what the template itself wrote.
        nonce = _spell(secrets.randbits(128) | 1 << 127)
        self._alias = {content: f"{nonce}{_spell(i)}{_END}" for i, content in enumerate(self._specials)}
        self._plain.add_tokens(
            [
                tokenizers.AddedToken(
                    self._alias[token.content], lstrip=token.lstrip, rstrip=token.rstrip, single_word=False, normalized=False, special=False
                )
                for token in decoder.values()
                if token.special
            ]
        )
        self._alias_ids = {self._plain.token_to_id(alias): self._specials[content] for content, alias in self._alias.items()}
        names = {name: value for name in _NAMED_SPECIALS if (value := _content(config.get(name))) is not None}
        self.eos_ids = [self._specials[names["eos_token"]]] if names.get("eos_token") in self._specials else []
        try:
            self._template = ChatTemplate(template, names) if template is not None else None
        except TemplateFailure as error:
            raise ModelError(str(error)) from None

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read a folder in Hugging Face layout.

        Raises:
            ModelError: a file is missing, unreadable or of an unsupported kind.
        """
        try:
            definition = (folder / "tokenizer.json").read_text(encoding="utf-8")
            config_file = folder / "tokenizer_config.json"
            config = json.loads(config_file.read_text(encoding="utf-8")) if config_file.exists() else {}
            template_file = folder / "chat_template.jinja"
            template = template_file.read_text(encoding="utf-8") if template_file.exists() else config.get("chat_template")
        except (OSError, ValueError) as error:
            raise ModelError(f"tokenizer of {folder}: {error}") from None
        if isinstance(template, list):  # several named ones
            template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
        return cls(definition, config, template)

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` works."""
        return self._template is not None

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a raw prompt: special tokens in it count as such, and BOS is added if the model's tokenizer does so."""
        return _encode(self._tokenizer, text, add_special_tokens=True)

    def fewest_tokens(self, characters: int) -> int:
        """Return how many tokens a text of so many `characters` makes at least: as if all of them were the vocabulary's longest."""
        return math.ceil(characters / self._longest)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Return the ids of a conversation through the model's template.

        Special tokens are what the template wrote; the same characters inside a message stay text.

        Raises:
            TemplateFailure: there is no template, or it refused the messages.
        """
        if self._template is None:
            raise TemplateFailure("this model has no chat template; use /v1/completions")
        stand_ins: dict[str, str] = {}  # a literal that a user typed -> what the template sees in its place
        nonce = _spell(secrets.randbits(128) | 1 << 127)
        hidden = _map_strings(messages, lambda text: self._hide_specials(text, nonce, stand_ins))
        rendered = self._template.render(hidden, add_generation_prompt=add_generation_prompt)
        if not stand_ins:
            return _encode(self._tokenizer, rendered, add_special_tokens=False)
        return self._encode_mixed(rendered, stand_ins)

    def detokenizer(self, *, at_start: bool) -> Detokenizer:
        """Return a decoder for one output; `at_start` when it begins a new text rather than continuing one."""
        return Detokenizer(self.table, at_start=at_start)

    def _hide_specials(self, text: str, nonce: str, stand_ins: dict[str, str]) -> str:
        if self._special_pattern is None:
            return text
        return self._special_pattern.sub(lambda m: stand_ins.setdefault(m[0], f"{nonce}{_spell(len(stand_ins))}{_END}"), text)

    def _encode_mixed(self, rendered: str, stand_ins: Mapping[str, str]) -> list[int]:
        if self._special_pattern is not None:
            rendered = self._special_pattern.sub(lambda m: self._alias[m[0]], rendered)
        for literal, stand_in in stand_ins.items():
            rendered = rendered.replace(stand_in, literal)
        return [self._alias_ids.get(id, id) for id in _encode(self._plain, rendered, add_special_tokens=False)]


def _encode(tokenizer: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Return the ids of one text. `encode` would be the same, but hold the interpreter's lock all the while."""
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


def _load(definition: str) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(definition)
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"tokenizer.json: {str(error)[:200]}") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _content(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _map_strings(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_map_strings(item, change) for item in value]
    return value
