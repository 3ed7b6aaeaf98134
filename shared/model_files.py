"""Finds a model on this machine and presents it as a folder in Hugging Face layout. Knows files, never the network or tensors."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared import gguf_files, subjects
from shared.gguf_header import GGUFError, read_header

RECORD = "headrace.json"  # {"name": …, "source": …, "kind": "pulled" | "derived", "format": FORMAT} in each folder that we made
FORMAT = 2  # raise it when a change here or in gguf_files makes older derived files wrong

_LARGEST_SAFETENSORS_HEADER_BYTES = 100_000_000  # the format's own limit


class ModelError(Exception):
    """A model is missing, broken or not supported; the text is one clear line for the operator."""


class ModelMissing(ModelError):
    """Nothing of this name was pulled."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A checked folder: config.json, tokenizer.json, optional templates and generation config, and weights (*.safetensors or *.gguf)."""

    path: Path
    name: str  # in the API
    pool: str  # subjects.slug(name)


def locate(model: str, state_dir: Path, served_name: str = "") -> ModelFolder:
    """Return the folder of `model`: a GGUF file, a folder, a name pulled before, or hf:org/name pulled before.

    What a folder or GGUF file lacks is derived once into `<state_dir>/models`; concurrent callers are safe. Raises ModelError.
    """
    try:
        if model.startswith("hf:"):
            return find_pulled(model, state_dir, served_name)
        path = Path(model).expanduser()
        if path.is_file():
            return _from_gguf(path, state_dir, served_name or path.stem)
        if model and path.is_dir():
            return _from_folder(path, state_dir, served_name or path.resolve().name)
        if "/" in model or path.suffix == ".gguf":
            on_hub = model.count("/") == 1 and not model.startswith((".", "/", "~")) and path.suffix != ".gguf"
            raise ModelError(
                f"no model file or folder {model!r}" + (f"; a Hugging Face repository is written hf:{model}" if on_hub else "")
            )
        return find_pulled(model, state_dir, served_name)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise ModelError(f"cannot use model {model[:200]!r}: {error.strerror or error}{where}") from None
    except RuntimeError:  # from expanduser
        raise ModelError(f"no home directory for {model!r}") from None


def find_pulled(model: str, state_dir: Path, served_name: str = "") -> ModelFolder:
    """Return the folder of `model`, a catalogue name or hf:org/name that was pulled before. Raises ModelError."""
    if not model.isprintable():
        raise ModelError(f"{model[:200]!r} is not a model's name")
    folder = state_dir.absolute() / "models" / folder_name(model)
    record = _record(folder)
    if record.get("kind") != "pulled" or record.get("source") != model:
        raise ModelMissing(f"model {model!r} is not here; get it with: headrace models pull {model}")
    try:
        check_folder(folder)
    except ModelError as error:
        raise ModelError(f"{error}; get it again with: headrace models pull {model}") from None
    return _folder(folder, served_name or str(record["name"]))


def folder_name(model: str) -> str:
    """Name of the folder below `<state_dir>/models` of a model pulled by name. Raises ModelError for a name without letters or digits."""
    return _slug(model.removeprefix("hf:"))


def is_pulled(state_dir: Path, model: str) -> bool:
    """Whether `model` (a catalogue name or hf:org/name) was pulled in the current format."""
    record = _record(state_dir / "models" / folder_name(model))
    return record.get("kind") == "pulled" and record.get("source") == model and record.get("format") == FORMAT


def pulled(state_dir: Path) -> list[ModelFolder]:
    """Every model pulled into `state_dir`, by name."""
    found = []
    for path in sorted((state_dir.absolute() / "models").glob("*/")):
        record = _record(path)
        if record.get("kind") == "pulled" and not path.name.startswith("."):
            found.append(ModelFolder(path, str(record["name"]), _slug(str(record["name"]))))
    return found


def write_record(folder: Path, name: str, source: str, kind: str) -> None:
    """Note in a folder that we made what it is: `kind` is pulled or derived."""
    record = {"name": name, "source": source, "kind": kind, "format": FORMAT}
    (folder / RECORD).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def derive_gguf(gguf: Path, into: Path, name: str, sampling: Mapping[str, float] | None = None) -> None:
    """Write the small files of a Hugging Face folder for the file `gguf` into the folder `into`.

    `sampling` is what the model's makers recommend (`temperature`, `top_p`, `top_k`) and the file does not say. Raises ModelError, OSError.
    """
    try:
        files = gguf_files.derive(read_header(gguf), name, sampling)
    except GGUFError as error:
        raise ModelError(f"{gguf}: {error}") from None
    for file_name, text in files.items():
        (into / file_name).write_text(text, encoding="utf-8", newline="\n")


def check_folder(folder: Path) -> None:
    """Raise ModelError, naming the file, unless `folder` has a config, a tokenizer and complete weights."""
    _json_object(folder / "config.json")
    _json_object(folder / "tokenizer.json")
    for optional in ("tokenizer_config.json", "generation_config.json"):
        if (folder / optional).exists():
            _json_object(folder / optional)
    _check_weights(folder)


@contextmanager
def exclusive(models: Path, name: str, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock of the folder `name` below `models`, so that one process at a time makes it; `on_wait` is called if another has it."""
    models.mkdir(parents=True, exist_ok=True)
    with (models / f".{name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield  # closing releases, also when the process dies


@contextmanager
def staging(models: Path, name: str) -> Iterator[Path]:
    """A temporary folder beside the folder `name`; gone afterwards unless renamed. Callers hold `exclusive`: leftovers are nobody's."""
    for leftover in models.glob(f".{name}.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=f".{name}.tmp-", dir=models))
    made.chmod(0o755)  # other users' services may read models
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _from_gguf(gguf: Path, state_dir: Path, name: str) -> ModelFolder:
    if gguf.suffix.lower() != ".gguf":
        raise ModelError(f"{gguf} is neither a GGUF file nor a folder")
    gguf = gguf.resolve()

    def fill(made: Path) -> None:
        derive_gguf(gguf, made, name)
        (made / "model.gguf").symlink_to(gguf)

    return _folder(_derived(gguf, [gguf], state_dir, fill), name)


def _from_folder(path: Path, state_dir: Path, name: str) -> ModelFolder:
    path = path.resolve()
    if not (path / "config.json").exists():
        found = sorted(path.glob("*.gguf"))
        if len(found) == 1:
            return _from_gguf(found[0], state_dir, name)
        what = f"{len(found)} GGUF files; name one of them" if found else "neither config.json nor a GGUF file"
        raise ModelError(f"{path} holds {what}")
    if (path / "tokenizer.json").exists():
        check_folder(path)
        return _folder(path, name)

    inputs = [file for pattern in ("tokenizer.model", "vocab.json", "merges.txt") for file in path.glob(pattern)]
    if not inputs:
        raise ModelError(f"{path} has no tokenizer.json")
    _json_object(path / "config.json")
    _check_weights(path)

    def fill(made: Path) -> None:
        for file in path.iterdir():
            (made / file.name).symlink_to(file)
        _convert_tokenizer(path, made / "tokenizer.json")

    return _folder(_derived(path, inputs, state_dir, fill), name)


def _derived(source: Path, inputs: list[Path], state_dir: Path, fill: Callable[[Path], None]) -> Path:
    """Return the folder that `fill` makes from `inputs`; its name changes with them, so a finished one is never rewritten."""
    stamps = [(str(file), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in inputs]
    digest = hashlib.sha256(json.dumps([FORMAT, stamps]).encode()).hexdigest()[:12]
    models = state_dir.absolute() / "models"
    folder = models / f"{_slug(source.stem)[:50]}-{digest}"
    if (folder / RECORD).exists():
        return folder
    with exclusive(models, folder.name):
        if (folder / RECORD).exists():
            return folder
        with staging(models, folder.name) as made:
            fill(made)
            write_record(made, source.stem, str(source), "derived")
            made.rename(folder)
    return folder


def _convert_tokenizer(path: Path, to: Path) -> None:
    from transformers import AutoTokenizer  # slow to import, and only folders without tokenizer.json need it

    try:
        AutoTokenizer.from_pretrained(str(path), local_files_only=True).backend_tokenizer.save(str(to))
    except Exception as error:  # transformers raises whatever its many tokenizers do
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{path} has no tokenizer.json, and its tokenizer cannot be converted: {first[:200]}") from None


def _check_weights(folder: Path) -> None:
    safetensors, ggufs = sorted(folder.glob("*.safetensors")), sorted(folder.glob("*.gguf"))
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = _json_object(index).get("weight_map")
        for shard in sorted(set(shards.values())) if isinstance(shards, dict) else []:
            if not (folder / str(shard)).exists():
                raise ModelError(f"{folder / str(shard)} is missing, though {index.name} names it")
    if not safetensors and not ggufs:
        others = any(folder.glob("*.bin")) or any(folder.glob("*.pth"))
        raise ModelError(f"{folder} has no weights (*.safetensors or *.gguf){'; PyTorch pickles are not loaded' if others else ''}")
    for file in safetensors:
        _check_safetensors(file)
    for file in ggufs:
        try:
            read_header(file)
        except GGUFError as error:
            raise ModelError(f"{file}: {error}") from None


def _check_safetensors(file: Path) -> None:
    """The length that the header promises is the file's."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_size = int.from_bytes(stream.read(8), "little")
        if not 2 <= header_size <= min(size - 8, _LARGEST_SAFETENSORS_HEADER_BYTES):
            raise ModelError(f"{file} is truncated or not a safetensors file")
        try:
            header = json.loads(stream.read(header_size))
            end = max((entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"), default=0)
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ModelError(f"{file} has a broken safetensors header") from None
    if 8 + header_size + end != size:
        raise ModelError(f"{file} is truncated or corrupt: {size} bytes, its header promises {8 + header_size + end}")


def _json_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{file} is missing") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{file} is not a JSON object")
    return value


def _record(folder: Path) -> dict[str, Any]:
    try:
        record = json.loads((folder / RECORD).read_bytes())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _folder(path: Path, name: str) -> ModelFolder:
    return ModelFolder(path, name, _slug(name))


def _slug(name: str) -> str:
    try:
        return subjects.slug(name)
    except ValueError:
        raise ModelError(f"{name[:80]!r} cannot name a model: it needs a letter a-z or a digit") from None
