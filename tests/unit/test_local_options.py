"""The launcher's settings, what services inherit of them, and how it reads their logs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from services.local import logs
from services.local.options import UpSettings, absolute_model, client_host, environment_of, threads_per_worker


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("HEADRACE_")]:
        monkeypatch.delenv(name)


def test_flags_override_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_WORKERS", "3")
    monkeypatch.setenv("HEADRACE_PORT", "9001")
    settings = UpSettings(port=9002)
    assert (settings.workers, settings.port) == (3, 9002)


@pytest.mark.parametrize("workers", ["0", "65", "two"])
def test_impossible_numbers_of_workers_are_refused(workers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_WORKERS", workers)
    with pytest.raises(ValidationError, match="workers"):
        UpSettings()


def test_services_inherit_what_was_set_and_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "hr_a.b")
    monkeypatch.setenv("HEADRACE_SLOTS", "7")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights.gguf").touch()
    settings = UpSettings(port=9002, model="weights.gguf", state_dir=Path("state"))
    environment = environment_of(settings, {"PATH": "/bin", "HEADRACE_SLOTS": "7"})
    assert environment == {
        "PATH": "/bin",
        "PYTHONUNBUFFERED": "1",
        "HEADRACE_API_KEY": "hr_a.b",
        "HEADRACE_SLOTS": "7",
        "HEADRACE_PORT": "9002",
        "HEADRACE_MODEL": str(tmp_path / "weights.gguf"),
        "HEADRACE_STATE_DIR": str(tmp_path / "state"),
    }


def test_a_model_name_stays_a_name() -> None:
    assert absolute_model("smollm2-135m") == "smollm2-135m"
    assert absolute_model("hf:org/name") == "hf:org/name"


@pytest.mark.parametrize(("threads", "workers", "cores", "each"), [(0, 1, 8, 8), (0, 3, 8, 2), (0, 4, 2, 1), (5, 4, 2, 5)])
def test_workers_share_the_cores(threads: int, workers: int, cores: int, each: int) -> None:
    assert threads_per_worker(threads, workers, cores) == each


@pytest.mark.parametrize(
    ("host", "reached"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("127.0.0.1", "127.0.0.1"), ("box", "box")]
)
def test_how_a_client_reaches_the_host(host: str, reached: str) -> None:
    assert client_host(host) == reached


def test_log_records_are_shown_as_lines(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    records = [
        {"level": "info", "message": "loading"},
        {"level": "error", "message": "no such model", "exception": "Traceback\n  File\nModelError: no such model\n"},
    ]
    log.write_text("x" * 50_000 + "\n" + "\n".join(map(json.dumps, records)) + "\n\nplain text [1, 2]\n3\n")
    lines = logs.tail(log, 4)
    assert lines == ["info: loading", "error: no such model [ModelError: no such model]", "plain text [1, 2]", "3"]
    assert logs.cause(lines) == "no such model [ModelError: no such model]"
    assert logs.cause([*lines, "headrace: port taken"]) == "port taken"
    assert logs.cause(["something", "Killed "]) == "Killed"
    assert logs.cause(logs.tail(tmp_path / "missing.log")) == "it wrote nothing"
