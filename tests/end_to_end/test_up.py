"""`headrace up` as a person meets it: real servers, a real model, signals, crashes. Uses no part of the product but its command."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import shlex
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from shared.model_files import ModelFolder
from tests.support.servers import free_port

READY_SECONDS = 120.0
EVERY_PROCESS = ("nats-server", "valkey-server", "services.cli router", "services.cli worker", "services.cli gateway")


def eventually(condition: Callable[[], bool], seconds: float) -> bool:
    give_up_at = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.05)
    return True


def processes() -> dict[int, tuple[int, str]]:
    """Every live process: its parent and its command line."""
    listing = subprocess.run(["ps", "-ww", "-eo", "pid=,ppid=,stat=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 3) for line in listing.splitlines()]
    return {int(row[0]): (int(row[1]), row[3]) for row in rows if len(row) == 4 and not row[2].startswith("Z")}


class Up:
    """One `headrace up`, its output, and the processes that it started."""

    def __init__(self, model: ModelFolder, home: Path, *arguments: str) -> None:
        self.home = home
        self.port = free_port()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        command = [sys.executable, "-m", "services.cli", "up", "--model", str(model.path), "--port", str(self.port), *arguments]
        self.process = subprocess.Popen(
            command,
            env=environment | {"HEADRACE_STATE_DIR": str(home), "HEADRACE_DRAIN_SECONDS": "3"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.printed: list[str] = []
        self.told: list[str] = []
        self._readers = [
            threading.Thread(target=lambda pipe=pipe, lines=lines: lines.extend(pipe), daemon=True)
            for pipe, lines in ((self.process.stdout, self.printed), (self.process.stderr, self.told))
        ]
        for reader in self._readers:
            reader.start()

    def wait_until_ready(self) -> None:
        assert eventually(lambda: len(self.printed) >= 2 or self.process.poll() is not None, READY_SECONDS), self.told
        assert self.process.poll() is None, self.told

    def children(self) -> dict[int, str]:
        return {pid: command for pid, (parent, command) in processes().items() if parent == self.process.pid}

    def child(self, name: str) -> int | None:
        return next((pid for pid, command in self.children().items() if name in command and "tether" not in command), None)

    def wait_for_every_process(self) -> dict[int, str]:
        assert eventually(lambda: all(self.child(name) for name in EVERY_PROCESS) or self.process.poll() is not None, 60), self.told
        return self.children()

    def request(self) -> tuple[str, dict[str, str], bytes]:
        """What the printed curl command sends: URL, headers, body."""
        words = shlex.split(self.printed[1])
        assert words[:2] == ["curl", "-N"]
        headers = dict(word.split(": ", 1) for flag, word in itertools.pairwise(words) if flag == "-H")
        return words[2], headers, words[words.index("-d") + 1].encode()

    def stream(self, max_tokens: int) -> Iterator[str]:
        """Send the printed request, shortened, and yield the pieces of the answer."""
        url, headers, printed = self.request()
        body = json.dumps(json.loads(printed) | {"max_tokens": max_tokens})
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
        with contextlib.closing(connection):
            connection.request("POST", parts.path, body, headers)
            response = connection.getresponse()
            assert response.status == 200, response.read()
            assert response.headers["Content-Type"].startswith("text/event-stream")
            done = False
            for line in response:
                if line.startswith(b"data: [DONE]"):
                    done = True
                elif line.startswith(b"data: "):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    yield "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            assert done

    def end(self) -> None:
        """Whatever happened: leave nothing behind."""
        for pid in [self.process.pid, *self.children()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def up(smollm: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    running = Up(smollm, tmp_path_factory.mktemp("up") / "state")
    try:
        running.wait_until_ready()
        yield running
    finally:
        running.end()


def test_the_printed_request_streams_an_answer(up: Up) -> None:
    key = (up.home / "api_key").read_text().strip()
    assert up.printed[0] == f"Headrace is ready: http://127.0.0.1:{up.port}/v1  API key: {key}\n"
    pieces = [piece for piece in up.stream(64) if piece]
    assert len(pieces) > 5
    answer = "".join(pieces).lower()
    assert any(word in answer for word in ("light", "sky", "blue", "sun", "scatter")), answer


def test_what_it_keeps_is_private(up: Up) -> None:
    for name, mode in (("", 0o700), ("api_key", 0o600), ("server_secret", 0o600), ("nats/nats.conf", 0o600), ("valkey/valkey.conf", 0o600)):
        assert stat.S_IMODE((up.home / name).stat().st_mode) == mode, name
    secrets = [(up.home / name).read_text().strip() for name in ("api_key", "server_secret", "nats/token", "valkey/password")]
    for command in up.children().values():
        assert not any(secret in command for secret in secrets)


def test_the_chat_command_talks_to_it(up: Up) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", "chat", "Name a colour.", "--max-tokens", "8"],
        env=os.environ | {"HEADRACE_STATE_DIR": str(up.home), "HEADRACE_PORT": str(up.port)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert any(character.isalpha() for character in done.stdout)


def test_a_second_one_on_the_same_state_is_refused(up: Up) -> None:
    command = [sys.executable, "-m", "services.cli", "up", "--port", str(free_port()), "--state-dir", str(up.home)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert second.returncode == 1
    assert second.stderr.startswith(f"headrace: another `headrace up` (process {up.process.pid}) uses {up.home}")
    assert second.stderr.count("\n") == 1


def test_a_killed_router_comes_back_and_requests_do_not_notice(up: Up) -> None:
    router = up.child("services.cli router")
    assert router is not None
    os.kill(router, signal.SIGKILL)
    assert "".join(up.stream(8))  # without a router
    assert eventually(lambda: up.child("services.cli router") not in (None, router), 10)
    assert any("router ended (killed by SIGKILL); starting it again in 0.5 s" in line for line in up.told)
    assert "".join(up.stream(8))


def test_sigterm_stops_everything(up: Up) -> None:
    children = up.wait_for_every_process()
    assert len(children) == len(EVERY_PROCESS)
    up.process.terminate()
    assert up.process.wait(30) == 0
    assert not processes().keys() & children.keys()
    assert not any("was killed" in line for line in up.told), up.told


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGHUP])
def test_nothing_outlives_it_however_early_it_ends(number: signal.Signals, smollm: ModelFolder, tmp_path: Path) -> None:
    running = Up(smollm, tmp_path / "state", "--workers", "2")
    try:
        children = running.wait_for_every_process()
        running.process.send_signal(number)
        assert running.process.wait(30) == (-9 if number == signal.SIGKILL else 0), running.told
        assert eventually(lambda: not processes().keys() & children.keys(), 5)
    finally:
        running.end()


def test_a_service_that_cannot_start_is_one_line_and_nothing_is_left(smollm: ModelFolder, tmp_path: Path) -> None:
    running = Up(smollm, tmp_path / "state", "--nats-url", f"nats://127.0.0.1:{free_port()}")
    try:
        assert eventually(lambda: bool(running.children()), 60)
        children = running.children()
        assert running.process.wait(60) == 1
        assert "cannot reach NATS at" in running.told[-1]
        assert not processes().keys() & children.keys()
    finally:
        running.end()
