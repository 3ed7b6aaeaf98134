"""docker-compose.yml, Dockerfile and the files they name. Running them for real needs a container engine and is no part of this."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.local import servers

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docker-compose.yml").read_text()
OWN = ("gateway", "router", "worker")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(TEXT)
    return loaded


def test_has_every_part_and_one_image(compose: dict[str, Any]) -> None:
    assert set(compose["services"]) == {*OWN, "nats", "valkey"}
    assert {compose["services"][name]["image"] for name in OWN} == {"headrace"}
    assert [compose["services"][name]["command"][0] for name in OWN] == list(OWN)


def test_health_is_checked(compose: dict[str, Any]) -> None:
    for name in (*OWN, "valkey"):
        assert compose["services"][name]["healthcheck"]["test"][0] == "CMD", name
    assert "healthcheck" not in compose["services"]["nats"]  # its image has nothing to run one with


def test_only_the_gateway_is_published_and_only_here(compose: dict[str, Any]) -> None:
    published = {name: service["ports"] for name, service in compose["services"].items() if "ports" in service}
    assert published == {"gateway": ["${HEADRACE_PUBLISH:-127.0.0.1:8000}:8000"]}


def test_holds_no_secret(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        for name, value in service.get("environment", {}).items():
            if re.search("KEY|SECRET|PASSWORD|TOKEN", name):
                assert re.fullmatch(r"\$\{" + name + r":[?-].*\}", value), name
    assert compose["services"]["gateway"]["environment"]["HEADRACE_API_KEY"].startswith("${HEADRACE_API_KEY:?")
    assert not re.search(r"\bhr_[0-9a-f]{12}\.", TEXT + (ROOT / "Dockerfile").read_text())


def test_every_variable_is_a_setting(compose: dict[str, Any]) -> None:
    from shared.settings import Settings

    named = set(re.findall(r"HEADRACE_([A-Z_]+)[:=]", "\n".join(f"{name}:" for s in OWN for name in compose["services"][s]["environment"])))
    named |= set(re.findall(r"HEADRACE_([A-Z_]+)=", (ROOT / "Dockerfile").read_text()))
    assert "NATS_URL" in named
    assert "STATE_DIR" in named
    assert {name.lower() for name in named} <= set(Settings.model_fields)


def test_nats_accepts_its_configuration(tmp_path: Path) -> None:
    text = (ROOT / "deploy" / "nats.conf").read_text().replace("/tmp/nats", str(tmp_path))
    (tmp_path / "nats.conf").write_text(text)
    binary = servers.nats(tmp_path, 4222).argv[0]
    tested = subprocess.run([binary, "-t", "-c", str(tmp_path / "nats.conf")], capture_output=True, text=True, check=False)
    assert tested.returncode == 0, tested.stderr


def test_the_image_is_built_from_tags_that_need_no_frontend_download() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert not re.search(r"^# *syntax=", text, re.MULTILINE)
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"python:3.11-slim", "scratch"}
    assert re.search(r"^USER headrace$", text, re.MULTILINE)


def test_everything_that_the_build_copies_reaches_it() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    allowed = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {name for line in copied for name in line.split()} == allowed


def _has_compose() -> bool:
    try:
        return subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not _has_compose(), reason="docker compose is not installed; the tests above read the file without it")
def test_docker_compose_accepts_the_file() -> None:
    command = ["docker", "compose", "-f", str(ROOT / "docker-compose.yml"), "config", "-q"]
    good = subprocess.run(command, env=os.environ | {"HEADRACE_API_KEY": "hr_test.key"}, capture_output=True, text=True, check=False)
    assert (good.returncode, good.stderr) == (0, "")
    without = {name: value for name, value in os.environ.items() if name != "HEADRACE_API_KEY"}
    bad = subprocess.run(command, env=without, capture_output=True, text=True, check=False)
    assert bad.returncode != 0
    assert "HEADRACE_API_KEY" in bad.stderr
