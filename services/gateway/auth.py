"""Who may use the API. Every route needs a key, except the few that are listed as open."""

from __future__ import annotations

import hmac
import secrets
from hashlib import sha256

from prometheus_client import Counter
from starlette.types import ASGIApp, Receive, Scope, Send

from services.gateway.openai.errors import InvalidKey, send_error

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})


class KeyCheck:
    """Compares presented keys with the configured one in constant time, whatever their form or length."""

    def __init__(self, key: str) -> None:
        self._pepper = secrets.token_bytes(32)
        self._expected = self._digest(key.encode())

    def allows(self, authorization: bytes) -> bool:
        """Whether this `Authorization` header carries the key."""
        scheme, _, presented = authorization.partition(b" ")
        return hmac.compare_digest(self._digest(presented.strip()), self._expected) and scheme.lower() == b"bearer"

    def _digest(self, key: bytes) -> bytes:
        return hmac.new(self._pepper, key, sha256).digest()


class RequireKey:
    """ASGI middleware: 401 for everything but the open paths, unknown paths included."""

    def __init__(self, app: ASGIApp, check: KeyCheck, refused: Counter) -> None:
        self._app = app
        self._check = check
        self._refused = refused.labels("unauthorized")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            presented = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not self._check.allows(presented):
                self._refused.inc()
                await send_error(send, InvalidKey())
                return
        await self._app(scope, receive, send)
