"""Strict reading of JSON objects: each reader returns a checked value or raises BadRequest with the field's path.

`null` means absent, as in OpenAI's API, except where a field is required.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from services.gateway.openai.errors import BadRequest, Unsupported, shorten


class Fields:
    """A JSON object at `path` ("" for the body itself)."""

    def __init__(self, content: Any, path: str = "") -> None:
        self.path = path
        if not isinstance(content, dict):
            raise BadRequest(f"'{path}' must be an object.", param=path, code="invalid_type")
        self._content: dict[str, Any] = content

    def at(self, name: str) -> str:
        """Return the full path of a field."""
        return f"{self.path}.{name}" if self.path else name

    def raw(self, name: str) -> Any:
        """Return the value as it came; None when absent."""
        return self._content.get(name)

    def required(self, name: str) -> Any:
        """Return a value that must be there."""
        value = self._content.get(name)
        if value is None:
            problem = "must not be null" if name in self._content else "is required"
            raise BadRequest(f"'{self.at(name)}' {problem}.", param=self.at(name), code="missing_required_parameter")
        return value

    def text(self, name: str, *, required: bool = False, max_length: int = 1 << 30) -> str | None:
        """Return a string."""
        value = self.required(name) if required else self.raw(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.wrong_type(name, "a string", value)
        if len(value) > max_length:
            raise BadRequest(f"'{self.at(name)}' is longer than {max_length} characters.", param=self.at(name), code="string_too_long")
        return value

    def required_text(self, name: str) -> str:
        """Return a string that must be there and not be empty."""
        value = self.text(name, required=True)
        if not value:
            raise BadRequest(f"'{self.at(name)}' must not be empty.", param=self.at(name), code="invalid_value")
        return value

    def choice(self, name: str, options: Sequence[str], default: str) -> str:
        """Return one of `options`."""
        value = self.text(name)
        if value is None:
            return default
        if value not in options:
            known = ", ".join(options)
            raise BadRequest(f"'{self.at(name)}' is {shorten(value)}; it may be: {known}.", param=self.at(name), code="invalid_value")
        return value

    def flag(self, name: str) -> bool:
        """Return a boolean; absent means false."""
        value = self.raw(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.wrong_type(name, "a boolean", value)
        return value

    def number(self, name: str, low: float, high: float, *, above_low: bool = False) -> float | None:
        """Return a finite number from `low` to `high`."""
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong_type(name, "a number", value)
        if not math.isfinite(value) or not low <= value <= high or (above_low and value == low):
            border = "over" if above_low else "at least"
            raise self._out_of_range(name, f"{border} {low:g} and at most {high:g}", value)
        return float(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        """Return an integer from `low` to `high`."""
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong_type(name, "an integer", value)
        if not low <= value <= high:
            raise self._out_of_range(name, f"at least {low} and at most {high}", value)
        return value

    def only(self, name: str, allowed: Sequence[Any]) -> None:
        """Refuse every value of a known but unsupported field except harmless ones."""
        value = self.raw(name)
        if value is None or any(value == harmless and isinstance(value, bool) == isinstance(harmless, bool) for harmless in allowed):
            return
        hint = f"; leave it out or send {shorten(allowed[0])}" if allowed else "; leave it out"
        raise Unsupported(f"'{self.at(name)}' = {shorten(value)} is not supported{hint}.", param=self.at(name))

    def wrong_type(self, name: str, wanted: str, value: Any) -> BadRequest:
        """Return the error for a value of the wrong type."""
        names = {str: "a string", bool: "a boolean", int: "an integer", float: "a number", list: "an array", dict: "an object"}
        return BadRequest(
            f"'{self.at(name)}' must be {wanted}, not {names.get(type(value), 'null')}.", param=self.at(name), code="invalid_type"
        )

    def _out_of_range(self, name: str, wanted: str, value: Any) -> BadRequest:
        return BadRequest(f"'{self.at(name)}' = {shorten(value)} must be {wanted}.", param=self.at(name), code="invalid_value")
