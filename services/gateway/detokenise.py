"""Token ids to text, incrementally: bytes per token, UTF-8 across token borders, stop strings. Pure; knows no tokenizer library."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class UnsupportedDecoder(ValueError):
    """The tokenizer's decoder is of a kind that has no table of bytes per token."""


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenBytes:
    """The bytes that each token id stands for. Special tokens stand for none: they are never shown."""

    def __init__(self, definition: Mapping[str, Any]) -> None:
        """Build from the parsed `tokenizer.json`.

        Raises:
            UnsupportedDecoder: it is neither byte-level nor of the SentencePiece kind.
        """
        steps = _flatten(definition.get("decoder"))
        kinds = {step["type"] for step in steps}
        self.strips_first_space = False
        byte_level = "ByteLevel" in kinds
        replacements: list[tuple[str, str]] = []
        alphabet = _byte_alphabet()
        for step in steps:
            match step:
                case {"type": "ByteLevel" | "ByteFallback" | "Fuse"}:
                    pass
                case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
                    replacements.append((pattern, content))
                case {"type": "Metaspace", "replacement": str(mark)}:
                    replacements.append((mark, " "))
                    self.strips_first_space = step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True)
                case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
                    self.strips_first_space = start == 1
                case _:
                    raise UnsupportedDecoder(f"decoder {step.get('type')!r} is not supported")
        if not (kinds & {"ByteLevel", "ByteFallback", "Metaspace"} or replacements):
            raise UnsupportedDecoder("it has no decoder of a supported kind")

        def plain(token: str) -> bytes:
            if "ByteFallback" in kinds and (byte := _BYTE_TOKEN.fullmatch(token)):
                return bytes([int(byte[1], 16)])
            for pattern, content in replacements:
                token = token.replace(pattern, content)
            return token.encode()

        def from_alphabet(token: str) -> bytes:
            if all(character in alphabet for character in token):
                return bytes(alphabet[character] for character in token)
            return token.encode()

        decode = from_alphabet if byte_level else plain
        vocabulary = definition["model"]["vocab"]
        pairs: Iterable[tuple[str, int]] = (
            vocabulary.items() if isinstance(vocabulary, dict) else ((entry[0], id) for id, entry in enumerate(vocabulary))
        )
        table = {id: decode(token) for token, id in pairs}
        for token in definition.get("added_tokens") or []:
            table[token["id"]] = b"" if token["special"] else token["content"].encode()
        self._bytes = [table.get(id, b"") for id in range(max(table, default=-1) + 1)]

    def __call__(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of `tokens`, joined; ids outside the vocabulary (padding of the embedding) have none."""
        table = self._bytes
        size = len(table)
        return b"".join([table[token] for token in tokens if token < size])


def _flatten(decoder: Any) -> list[dict[str, Any]]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder.get("decoders", []) for step in _flatten(inner)]
    return [decoder]


class Detokenizer:
    """Text of one output as its tokens arrive.

    A character whose bytes are spread over tokens appears once, when it is complete; U+FFFD stands only for bytes that are really
    invalid, or cut off by the end of the output.
    """

    def __init__(self, table: TokenBytes, *, at_start: bool) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = at_start and table.strips_first_space

    def push(self, tokens: Sequence[int]) -> str:
        """Return the text that `tokens` complete."""
        data = self._table(tokens)
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """Return what an output that ends here still owes."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Finds the stop string that ends first (of several ending together, the longest), wherever the text is split.

    Withholds only the longest suffix that may still become a stop string. Each character costs amortised constant time per stop
    (Knuth, Morris and Pratt).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._matched = [0] * len(self._stops)  # characters of each stop that the text seen so far ends with
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """Return the part of the text that is certainly not in a stop string. After a hit, nothing more is returned."""
        if self.hit is not None:
            return ""
        if not self._stops:
            return text
        seen = self._held + text
        for position, character in enumerate(text, len(self._held) + 1):
            hit = self._advance(character)
            if hit is not None:
                self.hit, self._held = hit, ""
                return seen[: position - len(hit)]
        self._held = seen[len(seen) - max(self._matched) :]
        return seen[: len(seen) - len(self._held)]

    def flush(self) -> str:
        """Return what was withheld; the output has ended."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        longest: str | None = None
        for i, (stop, borders) in enumerate(self._stops):
            matched = self._matched[i]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            if stop[matched] == character:
                matched += 1
            self._matched[i] = matched
            if matched == len(stop) and (longest is None or len(stop) > len(longest)):
                longest = stop
        return longest


def _borders(word: str) -> list[int]:
    """Return, for each prefix of `word`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(word)
    length = 0
    for i in range(1, len(word)):
        while length and word[i] != word[length]:
            length = borders[length - 1]
        if word[i] == word[length]:
            length += 1
        borders[i] = length
    return borders
