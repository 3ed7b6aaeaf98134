"""GET /v1/models and GET /v1/models/{id}."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.service import Gateway


class Models:
    """Both endpoints."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def list(self, _request: Request) -> Response:
        """Answer with all models."""
        return _json({"object": "list", "data": [self._card()]})

    async def one(self, request: Request) -> Response:
        """Answer with the named model, or 404."""
        self._gateway.check_model(request.path_params["model"])
        return _json(self._card())

    def _card(self) -> dict[str, Any]:
        model = self._gateway.model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "headrace",
            "max_model_len": self._gateway.context_tokens(),
        }


def _json(content: dict[str, Any]) -> Response:
    return Response(orjson.dumps(content), media_type="application/json")
