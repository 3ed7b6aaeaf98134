"""The import boundaries and naming rules of the design, checked on the syntax tree of every source file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OWN = ("services", "shared")
LAUNCHER = ("services.cli", "services.local")  # starts the services, so it may import them

# (who, what it may not import), by dotted prefix
FORBIDDEN = [
    ("shared", "services"),
    ("services.gateway", "services.local"),
    ("services.router", "services.local"),
    ("services.worker", "services.local"),
    ("services.worker.engine", "nats"),
    ("services.worker.engine", "shared.bus"),
    ("services.worker.engine", "shared.subjects"),
    ("services.worker.models", "services.worker.engine"),
    ("services.worker.backends", "services.worker.engine"),
    ("services.worker.kernels", "services"),
    ("services.worker.kernels", "shared"),
    ("services.gateway", "torch"),
    ("services.gateway", "transformers"),
    ("services.router", "torch"),
    ("services.router", "tokenizers"),
    ("services.worker", "tokenizers"),
    ("services.worker.engine.scheduler", "torch"),
    ("services.worker.engine.block_pool", "torch"),
]
# one module speaks each protocol
ONLY_IMPORTER = {"nats": "shared.bus"}
ONLY_SPELLER = {"hr.": "shared.subjects", "hr:": "shared.keys"}


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def imports(tree: ast.Module, module: str, *, is_package: bool) -> Iterator[str]:
    """Every module that `tree` imports anywhere, also inside functions, as an absolute dotted name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = module.split(".")
                package = here[: len(here) - node.level + (1 if is_package else 0)]
                base = ".".join([*package, base] if base else package)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)  # `from services import router` names a module


def literals(tree: ast.Module) -> Iterator[str]:
    """Every string constant, also the fixed parts of f-strings, except docstrings."""
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in documentation:
            if isinstance(node.value, str):
                yield node.value
            elif isinstance(node.value, bytes):
                yield node.value.decode(errors="replace")


def violations(module: str, tree: ast.Module, *, is_package: bool = False) -> list[str]:
    """What a module does that the design forbids."""
    found = []
    for name in sorted(set(imports(tree, module, is_package=is_package))):
        for who, what in FORBIDDEN:
            if is_in(module, who) and is_in(name, what) and not (is_in(name, who) and who != what):
                found.append(f"{module} imports {name}")
        for what, who in ONLY_IMPORTER.items():
            if is_in(name, what) and module != who:
                found.append(f"{module} imports {name}; only {who} may")
        if is_in(module, "services") and not any(is_in(module, launcher) for launcher in LAUNCHER) and is_in(name, "services"):
            own = ".".join(module.split(".")[:2])
            if not is_in(name, own) and name != "services":
                found.append(f"{module} imports {name}, another service")
    for text in literals(tree):
        for start, who in ONLY_SPELLER.items():
            if text.startswith(start) and module != who:
                found.append(f"{module} spells {text!r}; only {who} may")
    return found


def sources() -> list[Path]:
    return sorted(path for folder in OWN for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_keeps_the_boundaries(path: Path) -> None:
    assert violations(module_of(path), ast.parse(path.read_text()), is_package=path.name == "__init__.py") == []


@pytest.mark.parametrize("path", sources(), ids=module_of)
def test_says_its_boundary(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not tree.body or ast.get_docstring(tree), "a module begins with what it knows and must never know"


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("services.gateway.app", "from services.router import app"),
        ("services.gateway.app", "from services import router"),
        ("services.gateway.app", "def f():\n    import services.worker.engine"),
        ("services.gateway.app", "from ..router.placement import choose"),
        ("services.router.app", "from services.local import state"),
        ("services.worker.engine.engine", "from shared.bus import Bus"),
        ("services.worker.engine.engine", "from shared import bus"),
        ("services.worker.models.decoder", "from services.worker.engine.scheduler import Scheduler"),
        ("services.worker.models.decoder", "from ..engine import scheduler"),
        ("services.worker.kernels.attention", "from shared import hashing"),
        ("services.worker.kernels.attention", "from services.worker.backends import cpu"),
        ("services.worker.intake", "import nats.js"),
        ("services.worker.intake", "import tokenizers"),
        ("services.gateway.relay", "subject = f'hr.frames.{gateway}'"),
        ("services.gateway.limits", "key = b'hr:tenant'"),
        ("shared.settings", "import services.cli"),
    ],
)
def test_the_check_finds(module: str, code: str) -> None:
    assert violations(module, ast.parse(code))


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("services.gateway.app", "from services.gateway import relay\nfrom shared import bus"),
        ("services.gateway.app", "from . import relay"),
        ("services.cli", "from services.worker.app import run"),
        ("services.local.up", "import services.gateway.app"),
        ("services.worker.app", "from services.worker.engine.engine import Engine\nimport torch"),
        ("services.worker.kernels.attention", "from services.worker.kernels import norm\nimport torch"),
        ("shared.subjects", "ROUTE = 'hr.route'"),
        ("shared.keys", "TENANT = 'hr:tenant'"),
        ("services.gateway.relay", "'''hr.frames carries them.'''"),
    ],
)
def test_the_check_allows(module: str, code: str) -> None:
    assert violations(module, ast.parse(code)) == []
