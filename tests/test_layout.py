"""The rooms and the one direction in which they may import each other: flashbob <- curvature <- quant <- cli."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("flashbob", "curvature", "quant", "cli")
NAMELESS = {"utils.py", "util.py", "helpers.py", "helper.py", "common.py", "misc.py"}
OUTSIDE = {"tests", "configs", "notebooks"}


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Absolute names of all modules that a file imports anywhere, `importlib.import_module("name")` included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in {"import_module", "__import__"}:
                yield str(node.args[0].value)


def reversed_arrows(room: str, source: str) -> list[str]:
    """Modules imported by `source`, a file of `room`, that lie in a room downstream of it, or outside all rooms."""
    forbidden = {*ROOMS[ROOMS.index(room) + 1 :], *OUTSIDE}
    return [name for name in imported_modules(ast.parse(source)) if name.split(".")[0] in forbidden]


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", python_files(*ROOMS), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    found = reversed_arrows(room, path.read_text(encoding="utf-8"))
    assert not found, f"{path.relative_to(ROOT)} imports {found}; allowed: flashbob <- curvature <- quant <- cli"


@pytest.mark.parametrize(
    ("room", "source", "found"),
    [
        ("flashbob", "import curvature", ["curvature"]),
        ("flashbob", "def f():\n    from curvature.operators import HessianOperator", ["curvature.operators"]),
        ("curvature", "from quant import allocate", ["quant"]),
        ("curvature", "import importlib\nimportlib.import_module('cli.main')", ["cli.main"]),
        ("quant", "import numpy, cli.main", ["cli.main"]),
        ("cli", "from tests.conftest import ROOT", ["tests.conftest"]),
        ("cli", "import flashbob, curvature, quant\nfrom cli.options import Options", []),
        ("curvature", "from flashbob import sdpa_bob\nfrom curvature.loss import Loss\nfrom . import quantiles", []),
    ],
    ids=[
        "plain",
        "inside-function",
        "from",
        "importlib",
        "several",
        "tests",
        "downstream-may",
        "upstream-may-not-need",
    ],
)
def test_a_reversed_arrow_is_found(room: str, source: str, found: list[str]) -> None:
    assert reversed_arrows(room, source) == found


def private_names(source: str) -> list[str]:
    """Names with an underscore that a file takes from another module of the project."""
    tree, modules, found = ast.parse(source), set[str](), list[str]()
    for node in ast.walk(tree):
        names = node.names if isinstance(node, ast.Import | ast.ImportFrom) else []
        origin = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        for alias in names:
            if (origin or alias.name).split(".")[0] in ROOMS:
                modules.add(alias.asname or alias.name.split(".")[0])
                found += [f"{origin}.{alias.name}"] * is_private(alias.name)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and is_private(node.attr)
            and isinstance(node.value, ast.Name | ast.Attribute)
        ):
            first = ast.unparse(node.value).split(".")[0]
            found += [ast.unparse(node)] * (first in modules)
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@pytest.mark.parametrize("path", python_files(*ROOMS), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_takes_anothers_private_names(path: Path) -> None:
    found = private_names(path.read_text(encoding="utf-8"))
    assert not found, f"{path.relative_to(ROOT)} uses {found}: give them public names where they live"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from curvature.text import _plain", ["curvature.text._plain"]),
        ("def f():\n    from flashbob.kernels import launch\n    launch._compiled.clear()", ["launch._compiled"]),
        ("import curvature.state\ncurvature.state._SHARE = 1", ["curvature.state._SHARE"]),
        ("from curvature import trace\nimport torch\ntorch._C\nself._x = trace(op).value\ntrace.__doc__", []),
    ],
    ids=["from", "inside-function", "attribute", "ones-own-and-others"],
)
def test_a_private_name_is_found(source: str, found: list[str]) -> None:
    assert private_names(source) == found


def test_files_are_named_after_what_they_hold() -> None:
    nameless = [path for path in python_files(*ROOMS, "tests", "configs") if path.name in NAMELESS]
    assert not nameless, f"name these after their content: {nameless}"


def test_every_package_in_the_tree_is_listed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        ".".join(path.parent.relative_to(ROOT).parts) for path in python_files(*ROOMS) if path.name == "__init__.py"
    }
    # curvature.configs is the folder configs/ under the name that it has in a wheel.
    assert {name for name in listed if not name.startswith("curvature.configs")} == found


def test_every_python_file_lies_in_a_listed_package() -> None:
    orphans = [path for path in python_files(*ROOMS) if not (path.parent / "__init__.py").is_file()]
    assert not orphans
