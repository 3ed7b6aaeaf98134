"""`headrace up`: everything that one machine needs to serve a model, as supervised processes. The sequence; the parts lie beside it."""

from __future__ import annotations

import http.client
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

from services.local import servers, state
from services.local.console import Console
from services.local.interrupts import Interrupted, Interrupts
from services.local.logs import cause, tail
from services.local.model import find_or_fetch
from services.local.options import UpSettings, client_host, environment_of, threads_per_worker
from services.local.state import LaunchError
from services.local.supervisor import Command, Exit, Supervisor
from shared.machine import usable_cores
from shared.model_files import ModelFolder

SERVER_START_SECONDS = 20.0
SERVICE_START_SECONDS = 600.0  # a large model is read from a slow disk
_POLL_SECONDS = 0.1
_TRIM_SECONDS = 60.0
_STOP_GATEWAY, _STOP_WORKERS, _STOP_ROUTER, _STOP_SERVERS = range(4)  # streams end before what feeds them
_PACKAGES = Path(__file__).resolve().parents[2]  # where `services` and `shared` lie


def up(settings: UpSettings) -> int:
    """Start everything, watch over it until a signal asks for the end, and stop it. Returns 0 for a clean stop.

    Raises:
        LaunchError, ModelError, OSError: it cannot be started; nothing is left running.
    """
    console, interrupts = Console(), Interrupts()
    home = state.prepare(settings.state_dir)
    if not servers.port_is_free(settings.host, settings.port):
        raise LaunchError(f"port {settings.port} on {settings.host} is taken; choose another with --port or HEADRACE_PORT")
    lock = state.Lock(home)
    supervisor = Supervisor(home / "logs")
    try:
        with interrupts.raising():
            folder = find_or_fetch(settings.model, home, settings.served_name, console)
        key = settings.api_key.get_secret_value() or state.kept_secret(home / "api_key", state.new_api_key)
        environment = environment_of(settings, os.environ) | _secrets(settings, home, key)
        environment |= _start_servers(settings, home, supervisor, console, interrupts)
        _start_services(settings, folder.name, environment, supervisor, console, interrupts)
        _announce(settings, folder, key, home, console)
        _watch(supervisor, console, interrupts)
    except Interrupted:
        pass
    finally:
        if interrupts.requested:
            console.say("stopping; once more (Ctrl-C) stops at once")
        for name in supervisor.stop(hurry=lambda: interrupts.hurried):
            console.say(f"{name} was killed")
        lock.release()
    return 0


def _secrets(settings: UpSettings, home: Path, key: str) -> dict[str, str]:
    secret = settings.server_secret.get_secret_value() or state.kept_secret(home / "server_secret", state.new_secret)
    return {"HEADRACE_API_KEY": key, "HEADRACE_SERVER_SECRET": secret}


def _start_servers(settings: UpSettings, home: Path, supervisor: Supervisor, console: Console, interrupts: Interrupts) -> dict[str, str]:
    """Start the servers that no URL was given for. Returns the URLs, as environment variables."""
    urls = {"HEADRACE_NATS_URL": settings.nats_url, "HEADRACE_REDIS_URL": settings.redis_url}
    wanted = []
    nats_port, valkey_port = servers.free_ports(2)
    if not settings.nats_url:
        wanted.append(servers.nats(home, nats_port))
        urls["HEADRACE_NATS_URL"] = wanted[-1].url
    if not settings.redis_url:
        wanted.append(servers.valkey(home, valkey_port))
        urls["HEADRACE_REDIS_URL"] = wanted[-1].url
    if not wanted:
        return urls
    with console.step("starting " + " and ".join(server.name for server in wanted)):
        for server in wanted:
            supervisor.start(Command(server.name, server.argv, dict(os.environ), _STOP_SERVERS, grace_seconds=5))
        _wait_until({server.name: server.ready for server in wanted}, SERVER_START_SECONDS, supervisor, interrupts)
    return urls


def _start_services(
    settings: UpSettings, model: str, environment: dict[str, str], supervisor: Supervisor, console: Console, interrupts: Interrupts
) -> None:
    grace = settings.drain_seconds + 5
    host = client_host(settings.host)
    conditions: dict[str, Callable[[], bool]] = {}

    def start(service: str, name: str, stop_order: int, extra: dict[str, str], port: int, path: str) -> None:
        argv = (sys.executable, "-m", "services.cli", service)
        supervisor.start(Command(name, argv, environment | extra, stop_order, grace, directory=_PACKAGES))
        conditions[name] = lambda: answers_ok(host, port, path)

    count = 1 + settings.workers
    first = settings.metrics_port
    ports = list(range(first, first + count)) if first else servers.free_ports(count)
    with console.step(f"loading {model}" + (f" into {settings.workers} workers" if settings.workers > 1 else "")) as step:
        start("router", "router", _STOP_ROUTER, {"HEADRACE_METRICS_PORT": str(ports[0])}, ports[0], "/health")
        threads = threads_per_worker(settings.threads, settings.workers, usable_cores())
        for index, port in enumerate(ports[1:], start=1):
            extra = {"HEADRACE_METRICS_PORT": str(port), "HEADRACE_THREADS": str(threads)}
            start("worker", f"worker-{index}", _STOP_WORKERS, extra, port, "/health")
        start("gateway", "gateway", _STOP_GATEWAY, {}, settings.port, "/ready")
        _wait_until(conditions, SERVICE_START_SECONDS, supervisor, interrupts, lambda left: step.note(_waiting(left, supervisor)))


def _waiting(left: list[str], supervisor: Supervisor) -> str:
    """Say what is waited for, and what the first of it is doing."""
    said = tail(supervisor.log(left[0]), 1)
    return "waiting for " + ", ".join(left) + (f"; {left[0]}: {said[0].removeprefix('info: ')}" if said else "")


def _wait_until(
    conditions: dict[str, Callable[[], bool]],
    limit_seconds: float,
    supervisor: Supervisor,
    interrupts: Interrupts,
    progress: Callable[[list[str]], None] = lambda left: None,
) -> None:
    """Wait until each child's condition has held once.

    Raises:
        LaunchError: a child ended meanwhile, or the time is over.
        Interrupted: a stop was asked for.
    """
    left, give_up_at = dict(conditions), time.monotonic() + limit_seconds
    while True:
        for gone in supervisor.poll():
            raise LaunchError(why(gone, supervisor.log(gone.name)))
        left = {name: condition for name, condition in left.items() if not condition()}
        if not left:
            return
        if time.monotonic() > give_up_at:
            name = next(iter(left))
            raise LaunchError(f"{name} is not ready after {limit_seconds:.0f} s; see {supervisor.log(name)}")
        if interrupts.requested:
            raise Interrupted
        progress(list(left))
        time.sleep(_POLL_SECONDS)


def _watch(supervisor: Supervisor, console: Console, interrupts: Interrupts) -> None:
    """Report and restart what crashes, until a stop is asked for."""
    trim_at = time.monotonic() + _TRIM_SECONDS
    while not interrupts.requested:
        for gone in supervisor.poll():
            console.say(f"{gone.name} ended ({gone.reason}); starting it again in {gone.restart_seconds:g} s. It wrote last:")
            console.quote(gone.tail)
        if time.monotonic() >= trim_at:
            supervisor.trim_logs()
            trim_at = time.monotonic() + _TRIM_SECONDS
        time.sleep(_POLL_SECONDS)


def _announce(settings: UpSettings, folder: ModelFolder, key: str, home: Path, console: Console) -> None:
    if settings.api_key.get_secret_value():
        key = "$HEADRACE_API_KEY"  # whoever set it knows it; it need not get into a log
    base = f"http://{client_host(settings.host)}:{settings.port}/v1"
    question = [{"role": "user", "content": "Why is the sky blue?"}]
    body = {"model": folder.name, "messages": question, "temperature": 0, "max_tokens": 200, "stream": True}
    console.say(f"logs in {home / 'logs'}; Ctrl-C stops everything")
    console.result(f"Headrace is ready: {base}  API key: {key}")
    console.result(
        f'curl -N {base}/chat/completions -H "Authorization: Bearer {key}" -H "Content-Type: application/json"'
        f" -d {shlex.quote(json.dumps(body, ensure_ascii=False))}"
    )


def answers_ok(host: str, port: int, path: str) -> bool:
    """Whether a GET is answered with status 200 now."""
    connection = http.client.HTTPConnection(host.strip("[]"), port, timeout=2)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def why(gone: Exit, log: Path) -> str:
    """Return one line for a child that ended before it was ready: its own clear line where it wrote one."""
    return f"{gone.name} ended ({gone.reason}): {cause(gone.tail)} (log: {log})"
