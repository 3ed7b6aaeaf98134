"""The state directory: modes, secrets, the lock."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from services.local import state


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_directory_is_for_its_owner_alone(tmp_path: Path) -> None:
    os.umask(0o022)
    home = state.prepare(tmp_path / "a" / "state")
    assert home.is_absolute()
    assert mode(home) == 0o700
    assert mode(home / "logs") == 0o700


def test_a_directory_that_cannot_be_made_gives_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(state.LaunchError, match=r"cannot use the state directory .*file/state: Not a directory"):
        state.prepare(tmp_path / "file" / "state")


def test_a_full_disk_gives_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 1 << 40, 3 << 20))
    with pytest.raises(state.LaunchError, match=r"^no space left for .*: 3 MiB free, 64 needed$"):
        state.prepare(tmp_path / "state")


def test_the_api_key_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "api_key"
    key = state.kept_secret(path, state.new_api_key)
    assert re.fullmatch(r"hr_[0-9a-f]{12}\.[A-Za-z0-9_-]{43}", key)  # 43 characters of base64 are 256 bits
    assert mode(path) == 0o600
    assert state.kept_secret(path, state.new_api_key) == key
    assert os.listdir(tmp_path) == ["api_key"]


def test_a_secret_that_others_can_read_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "api_key"
    path.write_text("hr_mine.secret\n")
    path.chmod(0o644)
    assert state.kept_secret(path, state.new_api_key) == "hr_mine.secret"
    assert mode(path) == 0o600


def test_an_empty_secret_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "api_key").write_text("\n")
    with pytest.raises(state.LaunchError, match="is empty"):
        state.kept_secret(tmp_path / "api_key", state.new_api_key)


def test_keys_differ() -> None:
    assert len({state.new_api_key() for _ in range(50)}) == 50


def test_one_process_at_a_time(tmp_path: Path) -> None:
    lock = state.Lock(tmp_path)
    other = f"from pathlib import Path; from services.local.state import Lock; Lock(Path({str(tmp_path)!r}))"
    refused = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert f"another `headrace up` (process {os.getpid()}) uses {tmp_path}" in refused.stderr
    lock.release()
    assert subprocess.run([sys.executable, "-c", other], check=False).returncode == 0
