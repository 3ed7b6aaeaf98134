"""The gateway's routes, and the process around them."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable

import uvloop
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from services.gateway.auth import KeyCheck, RequireKey
from services.gateway.model import ServedModel
from services.gateway.openai.body import ClientGone
from services.gateway.openai.chat import ChatCompletions
from services.gateway.openai.completions import Completions
from services.gateway.openai.errors import ApiError, BadRequest, Failed, MethodNotAllowed, NotFound, shorten
from services.gateway.openai.models import Models
from services.gateway.server import Server, listen
from services.gateway.service import Gateway
from services.gateway.status import Status
from shared.bus import Bus, BusUnavailable
from shared.model_files import ModelError, locate
from shared.settings import Settings
from shared.telemetry import set_up_logging

log = logging.getLogger(__name__)


def create_app(gateway: Gateway) -> ASGIApp:
    """Return the HTTP application of a gateway."""
    app = FastAPI(title="Headrace", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    models, status = Models(gateway), Status(gateway)
    app.router.routes += [
        Route("/v1/chat/completions", ChatCompletions(gateway), methods=["POST"]),
        Route("/v1/completions", Completions(gateway), methods=["POST"]),
        Route("/v1/models", models.list, methods=["GET"]),
        Route("/v1/models/{model:path}", models.one, methods=["GET"]),
        Route("/health", status.health, methods=["GET"]),
        Route("/ready", status.ready, methods=["GET"]),
        Route("/metrics", status.metrics, methods=["GET"]),
    ]

    async def on_api_error(_request: Request, error: Exception) -> Response:
        if not isinstance(error, ApiError):  # the framework passes what it was registered for
            raise error
        if isinstance(error, BadRequest) and error.status == 400:
            gateway.metrics.refused.labels("invalid").inc()
        return _error_response(error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        status_code = error.status_code if isinstance(error, HTTPException) else 500
        headers = (error.headers if isinstance(error, HTTPException) else None) or {}
        if status_code == 405:
            return _error_response(MethodNotAllowed(headers.get("Allow", "")))
        if status_code == 404:
            return _error_response(NotFound(f"There is nothing at {shorten(request.url.path)}."))
        return _error_response(BadRequest("The request is not valid.") if status_code < 500 else Failed("Internal error."))

    async def on_gone(_request: Request, _error: Exception) -> Response:
        return Response(status_code=499)  # never sent: there is no connection

    async def on_bug(_request: Request, _error: Exception) -> Response:
        return _error_response(Failed("Internal error."))

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientGone, on_gone)
    app.add_exception_handler(Exception, on_bug)
    check = KeyCheck(gateway.settings.api_key.get_secret_value())
    return RequireKey(app, check, gateway.metrics.refused)


def _error_response(error: ApiError) -> Response:
    response = Response(error.envelope(), error.status, media_type="application/json")
    response.raw_headers += error.headers()
    if error.status == 408:  # the rest of the body may never come
        response.raw_headers.append((b"connection", b"close"))
    return response


def run(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code: 0, 1 (cannot start) or 2 (the port is taken)."""
    set_up_logging("gateway", settings.log_level, settings.log_format)
    for noisy in ("uvicorn.error", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    if not settings.api_key.get_secret_value():
        return _refuse("no API key: set HEADRACE_API_KEY")
    try:
        listener = listen(settings.host, settings.port)
    except OSError as error:
        return _refuse(f"cannot listen on {settings.host}:{settings.port}: {error.strerror}", 2)
    with listener:
        try:
            folder = locate(settings.model, settings.state_dir, settings.served_name)
            model = ServedModel.load(folder.path, folder.name, folder.pool)
        except ModelError as error:
            return _refuse(str(error))
        _on_signals(lambda: sys.exit(0))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(settings, model, listener))


async def _serve(settings: Settings, model: ServedModel, listener: socket.socket) -> int:
    try:
        bus = await Bus.connect(settings.nats_url, "gateway")
    except BusUnavailable as error:
        return _refuse(str(error))
    gateway = Gateway(settings, model, bus)
    try:
        await gateway.start()
        server = Server(create_app(gateway), gateway.drain, gateway.cut, settings.drain_seconds)
        _on_signals(lambda: None)  # the server handles them, and raises them once more at its end for whoever did before
        await server.serve(sockets=[listener])
    except BusUnavailable as error:
        return _refuse(str(error))
    finally:
        await gateway.stop()
        await bus.close()
    return 0


def _on_signals(action: Callable[[], None]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: action())


def _refuse(reason: str, code: int = 1) -> int:
    print(f"headrace gateway: {reason}", file=sys.stderr)
    return code
