"""The command line: errors are one line, heavy imports wait, the chat client speaks to any gateway."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from services import cli


def headrace(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    return subprocess.run(
        [sys.executable, "-m", "services.cli", *arguments],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def only_line(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of an error; standard output stays empty."""
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.startswith("headrace: ")
    assert done.stderr.count("\n") == 1
    return done.stderr.removeprefix("headrace: ").rstrip("\n")


def test_help_is_light() -> None:
    code = "import sys; from services import cli; cli.run(['--help']); print(sorted({'torch', 'nats', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("[]")
    for command in ("up", "gateway", "router", "worker", "models", "chat", "version"):
        assert command in done.stdout


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nonsense"], "No such command 'nonsense'."),
        (["up", "--nonsense"], "No such option: --nonsense"),
        (["up", "--port", "x"], "Invalid value for '--port'"),
        (["up", "--port", "70000"], "--port: input should be less than or equal to 65535"),
        (["up", "--device", "abacus"], "--device: input should be 'auto', 'cpu' or 'cuda'"),
        (["up", "--host", ""], "--host: string should have at least 1 character"),
        (["up", "--nats-url", "garbage"], "--nats-url: not a URL such as nats://127.0.0.1:4222"),
        (
            ["up", "--redis-url", "http://x", "--nats-url", "nats://[x"],
            "--nats-url: not a URL such as nats://127.0.0.1:4222; --redis-url: not",
        ),
        (["gateway", "--redis-url", "redis://x:port"], "--redis-url: not a URL such as redis://127.0.0.1:6379/0"),
        (["up", "--model", "nosuch", "--port", "15999"], "no model 'nosuch' in the catalogue (smollm2-135m); other models: hf:org/name"),
    ],
)
def test_wrong_arguments_give_one_line(arguments: list[str], line: str, tmp_path: Path) -> None:
    assert only_line(headrace(*arguments, HEADRACE_STATE_DIR=str(tmp_path))).startswith(line)


def test_a_wrong_variable_is_named_without_its_value(tmp_path: Path) -> None:
    line = only_line(headrace("up", HEADRACE_STATE_DIR=str(tmp_path), HEADRACE_WORKERS="many", HEADRACE_API_KEY="hr_private"))
    assert line.startswith("HEADRACE_WORKERS: input should be a valid integer")
    assert "hr_private" not in line


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"HEADRACE_KV_MEMORY": "abc"}, "HEADRACE_KV_MEMORY: could not parse value and unit"),
        ({"HEADRACE_KV_MEMORY": "900TiB"}, "a KV pool of 900.0TiB (HEADRACE_KV_MEMORY): this machine has "),
        ({"HEADRACE_KV_MEMORY": "10TiB", "HEADRACE_WORKERS": "60"}, "60 KV pools of 10.0TiB (HEADRACE_KV_MEMORY): this machine has "),
        ({"HEADRACE_NATS_URL": "tcp://user:secret@x"}, "HEADRACE_NATS_URL: not a URL such as nats://127.0.0.1:4222"),
    ],
)
def test_what_cannot_be_is_found_before_anything_starts(variables: dict[str, str], line: str, tmp_path: Path) -> None:
    shown = only_line(headrace("up", HEADRACE_STATE_DIR=str(tmp_path / "state"), **variables))
    assert shown.startswith(line)
    assert "secret" not in shown
    assert not (tmp_path / "state").exists()


def test_an_empty_variable_is_none(tmp_path: Path) -> None:
    done = headrace("models", "list", HOME=str(tmp_path), HEADRACE_STATE_DIR="", HEADRACE_PORT="", HEADRACE_NATS_URL="")
    assert (done.returncode, done.stderr) == (0, "")
    line = only_line(
        headrace("up", "--model", "nosuch", HOME=str(tmp_path), HEADRACE_STATE_DIR="", HEADRACE_PORT="15999", HEADRACE_HOST="")
    )
    assert line.startswith("no model 'nosuch'")
    assert (tmp_path / ".local" / "share" / "headrace").is_dir()


@pytest.mark.parametrize("arguments", [[], ["models"]])
def test_half_a_command_shows_the_help(arguments: list[str]) -> None:
    done = headrace(*arguments)
    assert (done.returncode, done.stderr) == (2, "")
    assert "Commands" in done.stdout


def test_a_taken_port_gives_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = only_line(headrace("up", "--port", str(port), "--state-dir", str(tmp_path)))
    assert line == f"port {port} on 127.0.0.1 is taken; choose another with --port or HEADRACE_PORT"


def test_a_missing_model_gives_one_line(tmp_path: Path) -> None:
    line = only_line(headrace("up", "--model", str(tmp_path / "none.gguf"), "--port", "15999", "--state-dir", str(tmp_path)))
    assert "none.gguf" in line


def test_a_state_directory_that_cannot_be_used_gives_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert only_line(headrace("up", "--state-dir", str(tmp_path / "file" / "x"))).startswith("cannot use the state directory")


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "app", broken)
    with pytest.raises(ZeroDivisionError):
        cli.run([])


def test_models_lists_what_can_be_fetched(tmp_path: Path) -> None:
    done = headrace("models", "list", "--state-dir", str(tmp_path))
    assert done.returncode == 0
    assert "smollm2-135m\t(not fetched)" in done.stdout.splitlines()


class _Gateway(BaseHTTPRequestHandler):
    """A server with the API's wire format, for what a client must cope with."""

    def do_GET(self) -> None:
        self._answer(b'{"object":"list","data":[{"id":"tiny"}]}')

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != "Bearer hr_good":
            self._answer(b'{"error":{"message":"wrong key"}}', 401)
            return
        said = asked["messages"][-1]["content"]
        first = {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
        text = {"choices": [{"delta": {"content": f"{asked['model']} é {said}"}, "finish_reason": None}]}
        last = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
        events = [first, text, last] if said != "fail" else [first, {"error": {"message": "worker lost"}}]
        frames = [f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events]
        self._answer((": ping\n" + "".join(frames) + 'data: {"choices":[],"usage":{}}\n\ndata: [DONE]\n\n').encode())

    def _answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def gateway() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Gateway)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_chat_prints_the_answer(gateway: str, tmp_path: Path) -> None:
    (tmp_path / "api_key").write_text("hr_good\n")
    done = headrace("chat", "hello", "--url", gateway + "/v1", "--state-dir", str(tmp_path))
    assert (done.stdout, done.stderr, done.returncode) == ("tiny é hello\n", "", 0)


def test_chat_holds_a_conversation(gateway: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", "chat", "--url", gateway, "--state-dir", str(tmp_path)],
        env=os.environ | {"HEADRACE_API_KEY": "hr_good"},
        input="one\n\ntwo\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "tiny é one\ntiny é two\n\n"


def test_chat_says_what_went_wrong_in_one_line(gateway: str) -> None:
    assert only_line(headrace("chat", "hi", "--url", gateway, HEADRACE_API_KEY="hr_bad")) == "wrong key (HTTP 401)"
    failed = headrace("chat", "fail", "--url", gateway, HEADRACE_API_KEY="hr_good")
    assert (failed.stderr, failed.returncode) == ("headrace: worker lost\n", 1)
    assert only_line(headrace("chat", "hi", "--url", "http://127.0.0.1:1")).startswith("no answer from http://127.0.0.1:1: ")
    assert only_line(headrace("chat", "hi", "--url", "ftp://x")) == "not an http URL: ftp://x"
    assert only_line(headrace("chat", "hi", "--url", "http://[bad")) == "not an http URL: http://[bad"
    assert only_line(headrace("chat", "hi", "--url", "http://x:port")) == "not an http URL: http://x:port"
    assert only_line(headrace("chat", "hi", "--url", gateway, HEADRACE_API_KEY="hr_ü")) == "the API key has characters that no key has"
