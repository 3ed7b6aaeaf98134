"""GET /health, /ready and /metrics: for operators and orchestrators, open to whoever reaches the port."""

from __future__ import annotations

import orjson
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from services.gateway.service import Gateway


class Status:
    """The three endpoints."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def health(self, _request: Request) -> Response:
        """200: the process answers."""
        return Response(orjson.dumps({"status": "ok"}), media_type="application/json")

    async def ready(self, _request: Request) -> Response:
        """200 if a request would be served now, else 503; the body says why not. Usage totals do not decide it."""
        gateway = self._gateway
        workers = len(gateway.fleet.alive())
        reasons = []
        if gateway.draining:
            reasons.append("shutting down")
        if not gateway.bus.connected:
            reasons.append("NATS is not connected")
        if workers == 0:
            reasons.append(f"no healthy worker of {gateway.model.pool} is heard")
        degraded = [] if gateway.usage_log.reachable else ["Valkey is not reachable: usage totals wait"]
        body = {"ready": not reasons, "model": gateway.model.name, "workers": workers, "reasons": reasons, "degraded": degraded}
        return Response(orjson.dumps(body), 503 if reasons else 200, media_type="application/json")

    async def metrics(self, _request: Request) -> Response:
        """Prometheus' text format."""
        return Response(generate_latest(self._gateway.metrics.registry), media_type=CONTENT_TYPE_LATEST)
