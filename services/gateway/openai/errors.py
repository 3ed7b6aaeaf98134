"""Every error that a client can see, in one table, and the envelope it comes in."""

from __future__ import annotations

import math
from typing import ClassVar

import orjson
from starlette.types import Send

MAX_ECHO_CHARACTERS = 200


class ApiError(Exception):
    """An answer other than success. Subclasses are the table: status, type and code as OpenAI's clients know them."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: str | None = None

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or type(self).code
        self.retry_after_seconds = retry_after_seconds

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that belong to this error."""
        if self.retry_after_seconds is None:
            return []
        return [(b"retry-after", str(max(1, math.ceil(self.retry_after_seconds))).encode())]

    def envelope(self) -> bytes:
        """Return the JSON body, without a closing newline."""
        return orjson.dumps({"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}})


class BadRequest(ApiError):
    status = 400
    type = "invalid_request_error"


class Unsupported(BadRequest):
    code = "unsupported_value"


class ContextTooLong(BadRequest):
    code = "context_length_exceeded"


class InvalidKey(ApiError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"

    def __init__(self) -> None:
        super().__init__("Incorrect or missing API key: send it as 'Authorization: Bearer <key>'.")

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"www-authenticate", b"Bearer")]


class NotFound(ApiError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class MethodNotAllowed(ApiError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"

    def __init__(self, allowed: str) -> None:
        super().__init__(f"This path allows only: {allowed}.")
        self._allowed = allowed

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"allow", self._allowed.encode())]


class ReceiptTimeout(ApiError):
    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class BodyTooLarge(ApiError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class UnsupportedEncoding(ApiError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_encoding"


class Failed(ApiError):
    status = 500
    code = "internal_error"


class WorkerLost(ApiError):
    status = 502
    code = "worker_lost"


class Unavailable(ApiError):
    status = 503
    code = "unavailable"


class Overloaded(ApiError):
    status = 503
    type = "overloaded_error"
    code = "overloaded"


def shorten(value: object) -> str:
    """Return a value from a request as the JSON it was, for use in a message: bounded, and on one line."""
    try:
        text = orjson.dumps(value).decode()
    except TypeError:  # nested deeper than it writes, though not deeper than it reads
        text = "…"
    return text if len(text) <= MAX_ECHO_CHARACTERS else text[: MAX_ECHO_CHARACTERS - 1] + "…"


async def send_json(send: Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    """Answer with a JSON body."""
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *(headers or [])],
        }
    )
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ApiError) -> None:
    """Answer with an error in the envelope."""
    await send_json(send, error.status, error.envelope(), error.headers())
