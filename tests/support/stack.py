"""The whole system on this machine, each service a process of its own that tests may kill."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.model_files import ModelFolder
from tests.support.servers import ServerProcess, free_port, nats_server, valkey_server

KEY = "hr_test.secret"
START_SECONDS = 120


@dataclass
class Service:
    """A running service and where it tells how it is."""

    process: subprocess.Popen[bytes]
    metrics_port: int
    log: Path

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=5) as response:
            lines = response.read().decode().splitlines()
        found = [float(line.rsplit(" ", 1)[1]) for line in lines if re.match(rf"{name}(\{{|\s)", line)]
        if not found:
            raise LookupError(name)
        return sum(found)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait for the end."""
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGCONT)
            self.process.send_signal(number)
        return self.process.wait(40)


@dataclass
class Stack:
    """NATS, Valkey, a router, a gateway and workers."""

    model: ModelFolder
    home: Path
    nats: ServerProcess
    valkey: ServerProcess
    settings: dict[str, object]
    port: int = field(default_factory=free_port)
    services: dict[str, Service] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def workers(self) -> list[Service]:
        return [service for name, service in self.services.items() if name.startswith("worker")]

    def start(self, name: str) -> Service:
        """Start `gateway`, `router`, or a `worker…`."""
        metrics_port = self.port if name == "gateway" else free_port()
        given = {
            "model": self.model.path,
            "served_name": self.model.name,
            "nats_url": self.nats.url,
            "redis_url": self.valkey.url,
            "state_dir": self.home / "state",
            "port": self.port,
            "metrics_port": metrics_port,
            "api_key": KEY,
            "server_secret": "test",
            "drain_seconds": 2,
            **self.settings,
        }
        log = self.home / f"{name}.log"
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "services.cli", re.sub(r"\d+$", "", name)],
                env={**os.environ, **{f"HEADRACE_{key.upper()}": str(value) for key, value in given.items()}},
                stdout=output,
                stderr=output,
            )
        self.services[name] = Service(process, metrics_port, log)
        return self.services[name]

    def wait_until_ready(self) -> None:
        """Wait until every worker beats and the gateway knows one."""
        give_up_at = time.monotonic() + START_SECONDS
        waiting = {
            name: f"http://127.0.0.1:{one.metrics_port}/{'ready' if name == 'gateway' else 'health'}" for name, one in self.services.items()
        }
        while waiting:
            for name, url in list(waiting.items()):
                service = self.services[name]
                if service.process.poll() is not None:
                    raise RuntimeError(f"{name} ended: {service.log.read_text()[-2000:]}")
                with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2):
                    del waiting[name]
            if time.monotonic() > give_up_at:
                raise RuntimeError(f"not ready in time: {sorted(waiting)}")
            time.sleep(0.1)

    def post(self, path: str, body: object, *, key: str = KEY) -> tuple[int, Any, dict[str, str]]:
        """Return status, decoded body and headers of a JSON request."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Authorization": f"Bearer {key}", "Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return response.status, json.loads(response.read()), dict(response.headers)
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read()), dict(error.headers)

    def idle(self) -> bool:
        """Whether no worker runs anything or holds any block."""
        names = ("headrace_worker_running", "headrace_worker_waiting", "headrace_worker_kv_utilisation")
        return all(worker.metric(name) == 0 for worker in self.workers for name in names)

    def wait_until_idle(self, seconds: float = 20) -> None:
        """Wait until `idle`."""
        give_up_at = time.monotonic() + seconds
        while not self.idle():
            if time.monotonic() > give_up_at:
                raise RuntimeError("blocks or sequences are left")
            time.sleep(0.05)


@contextlib.contextmanager
def running_stack(model: ModelFolder, home: Path, *, workers: int = 1, **settings: object) -> Iterator[Stack]:
    """Run a stack; `settings` are fields of shared.settings.Settings, for every service."""
    with nats_server(home) as nats, valkey_server(home) as valkey:
        stack = Stack(model, home, nats, valkey, settings)
        try:
            for name in ("router", "gateway", *(f"worker{i}" for i in range(workers))):
                stack.start(name)
            stack.wait_until_ready()
            yield stack
        finally:
            for name in reversed(stack.services):
                stack.services[name].stop(signal.SIGKILL)
