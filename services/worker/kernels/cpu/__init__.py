"""C++ operators for CPUs, compiled once on the machine that runs them, for exactly its instructions. Knows tensors only.

`load` makes `torch.ops.headrace` appear. `reference.py` has the same operators in torch, which serve where there is no compiler.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils import cpp_extension

log = logging.getLogger(__name__)

PANEL = 32  # output features that lie side by side in a packed weight; as in linear.h
LANES = 16  # tokens of a KV page, and gates beside ups; as in vector.h
_HERE = Path(__file__).parent
_FLAGS = ["-std=c++20", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC", "-w"]
_COMPILE_SECONDS = 300


class NotCompiled(RuntimeError):
    """The operators cannot be had on this machine; the message says why in one line."""


def cache_directory() -> Path:
    """Where compiled operators are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace" / "kernels"


def loaded() -> bool:
    """Whether this process has the operators."""
    return hasattr(torch.ops.headrace, "attention")


def load() -> None:
    """Load the operators into this process, compiling them when this machine has not done so yet (about 20 s).

    Raises:
        NotCompiled: there is no compiler, or it failed.
    """
    if loaded():
        return
    compiler = shutil.which(os.environ.get("CXX") or "c++")
    if compiler is None:
        raise NotCompiled("no C++ compiler (c++) is installed")
    try:
        directory = cache_directory()
        directory.mkdir(parents=True, exist_ok=True)
        library = directory / f"cpu-{_fingerprint(compiler)}.so"
        if not library.exists():
            with (directory / "lock").open("w") as lock:  # released by the system, however this process ends
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not library.exists():
                    log.info("compiling the CPU operators for this machine, once: about half a minute")
                    _compile(compiler, library)
        torch.ops.load_library(library)
    except (OSError, subprocess.SubprocessError) as error:
        raise NotCompiled(str(error).splitlines()[0][:300]) from None


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Return `weight` [out, in] as the operators take it, padded with zeros.

    float32: [⌈out / PANEL⌉, in, PANEL]; bfloat16: [⌈out / PANEL⌉, ⌈in / 2⌉, PANEL × 2], each two inputs of a feature side by side.
    """
    rows = weight.shape[0]
    return _pack(F.pad(weight, (0, 0, 0, -rows % PANEL)).view(-1, PANEL, weight.shape[1]))


def pack_gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return two weights [out, in] packed as one, each panel LANES features of the gate and LANES of the other."""
    rows, columns = gate.shape
    both = [F.pad(one, (0, 0, 0, -rows % LANES)).view(-1, LANES, columns) for one in (gate, up)]
    return _pack(torch.cat(both, 1))


def _pack(panels: torch.Tensor) -> torch.Tensor:
    together = 2 if panels.dtype == torch.bfloat16 else 1
    padded = F.pad(panels, (0, -panels.shape[2] % together))
    pairs: torch.Tensor = padded.unflatten(2, (-1, together))
    return pairs.transpose(1, 2).flatten(2).contiguous()


def unpack(packed: torch.Tensor, inputs: int) -> torch.Tensor:
    """Undo `_pack`: return [panels, PANEL, inputs]."""
    together = packed.shape[2] // PANEL
    pairs: torch.Tensor = packed.unflatten(2, (PANEL, together))
    return pairs.transpose(1, 2).flatten(2)[:, :, :inputs]


def _fingerprint(compiler: str) -> str:
    digest = hashlib.sha256()
    for part in [torch.__version__, platform.machine(), _cpu_flags(), " ".join(_FLAGS), compiler, str(os.stat(compiler).st_mtime_ns)]:
        digest.update(part.encode() + b"\0")
    for source in sorted([*_HERE.glob("*.cpp"), *_HERE.glob("*.h")]):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compile(compiler: str, library: Path) -> None:
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    links = [f"-L{path}" for path in cpp_extension.library_paths()] + ["-ltorch_cpu", "-lc10"]
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        made = Path(scratch) / library.name
        command = [compiler, *_FLAGS, *includes, str(_HERE / "ops.cpp"), *links, "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False)
        if done.returncode != 0:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:300])
            raise NotCompiled(f"{compiler} failed: {first}")
        os.replace(made, library)
