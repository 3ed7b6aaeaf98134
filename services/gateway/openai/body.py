"""The body of a request: received within a deadline and a size, and parsed strictly as a JSON object."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from starlette.types import Receive, Scope

from services.gateway.openai.errors import BadRequest, BodyTooLarge, ReceiptTimeout, UnsupportedEncoding, shorten

RECEIPT_SECONDS = 30.0
_OFF_LOOP_BYTES = 64 << 10


class ClientGone(Exception):
    """The client closed the connection; nobody is left to answer."""


async def read_json(scope: Scope, receive: Receive, max_bytes: int) -> dict[str, Any]:
    """Return the JSON object in the body. NaN, Infinity, lone surrogates and deep nesting are refused.

    Raises:
        BadRequest: it is not one.
        BodyTooLarge: it is over `max_bytes`.
        UnsupportedEncoding: it is compressed.
        ReceiptTimeout: it did not arrive in time.
        ClientGone: the connection closed meanwhile.
    """
    headers = dict(scope["headers"])
    encoding = headers.get(b"content-encoding", b"identity").decode("latin-1").strip()
    if encoding.lower() not in ("", "identity"):
        raise UnsupportedEncoding(f"Content-Encoding {shorten(encoding)} is not supported: send the body as it is.")
    declared = headers.get(b"content-length", b"0")
    if declared.isdigit() and int(declared[:20]) > max_bytes:
        raise BodyTooLarge(f"The body is over the limit of {max_bytes} bytes.")
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(RECEIPT_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                chunks.append(message.get("body", b""))
                size += len(chunks[-1])
                if size > max_bytes:
                    raise BodyTooLarge(f"The body is over the limit of {max_bytes} bytes.")
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        raise ReceiptTimeout(f"The body did not arrive within {RECEIPT_SECONDS:.0f} seconds.") from None
    body = b"".join(chunks)
    try:
        content = await asyncio.to_thread(orjson.loads, body) if size > _OFF_LOOP_BYTES else orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"The body is not valid JSON: {error.msg[:100]} (position {error.pos}).", code="invalid_json") from None
    if not isinstance(content, dict):
        raise BadRequest("The body must be a JSON object.", code="invalid_json")
    return content
