"""The distribution: what it declares, pins, contains and leaves out."""

import ast
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_layout import ROOMS, imported_modules, python_files

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
REQUIREMENTS = [Requirement(line) for line in PROJECT["project"]["dependencies"]]
PINS = {
    canonicalize_name(requirement.name): requirement
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
    for requirement in [Requirement(line)]
}


def test_every_library_that_the_rooms_import_is_declared() -> None:
    imported = {
        name.split(".")[0]
        for path in python_files(*ROOMS)
        for name in imported_modules(ast.parse(path.read_text(encoding="utf-8")))
    }
    foreign = imported - set(sys.stdlib_module_names) - set(ROOMS)
    distributions = packages_distributions()
    extras = PROJECT["project"]["optional-dependencies"]
    optional = map(Requirement, [*extras["export"], *extras["quantizers"]])
    declared = {canonicalize_name(requirement.name) for requirement in [*REQUIREMENTS, *optional]}
    undeclared = {
        module
        for module in foreign
        if not {canonicalize_name(name) for name in distributions.get(module, [module])} & declared
    }
    assert not undeclared, f"add to [project] dependencies: {undeclared}"


@pytest.mark.parametrize(
    "requirement",
    [*REQUIREMENTS, *map(Requirement, PROJECT["project"]["optional-dependencies"]["dev"])],
    ids=lambda requirement: requirement.name,
)
def test_every_requirement_is_pinned_within_its_bounds(requirement: Requirement) -> None:
    (pin,) = PINS[canonicalize_name(requirement.name)].specifier
    assert pin.operator == "=="
    assert requirement.specifier.contains(pin.version), f"{pin} is outside {requirement}"


def test_torch_is_pinned_to_the_tested_release_and_triton_is_asked_for_on_linux_only() -> None:
    assert str(PINS["torch"]) == "torch==2.13.0"
    (triton,) = [requirement for requirement in REQUIREMENTS if requirement.name == "triton"]
    assert triton.marker is not None
    assert triton.marker.evaluate({"platform_system": "Linux"})
    assert not triton.marker.evaluate({"platform_system": "Darwin"})


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of the files in a wheel built from this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    # The build leaves its products beside its sources, so it gets sources of its own.
    tree = folder / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", *ROOMS, "configs", "tests"):
        (tree / name).symlink_to(ROOT / name)
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", build, folder], cwd=tree, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_holds_the_rooms_and_no_other_top_level_name(wheel_names: set[str]) -> None:
    top = {name.split("/")[0] for name in wheel_names}
    assert {name for name in top if not name.endswith(".dist-info")} == set(ROOMS)


def test_the_wheel_holds_every_source_file(wheel_names: set[str]) -> None:
    assert {str(path.relative_to(ROOT)) for path in python_files(*ROOMS)} <= wheel_names


@pytest.mark.parametrize(
    "name",
    [
        "curvature/configs/data/sample.txt",
        "curvature/configs/gpt2_spectrum.yaml",
        "curvature/configs/models/tiny-gpt2/config.json",
        "curvature/configs/models/tiny-gpt2/model.safetensors",
        "curvature/configs/models/tiny-gpt2/tokenizer.json",
        "curvature/py.typed",
        "flashbob/py.typed",
        "quant/py.typed",
        "cli/py.typed",
    ],
)
def test_the_wheel_holds_what_the_defaults_need(wheel_names: set[str], name: str) -> None:
    assert name in wheel_names


def test_make_help_lists_the_documented_targets() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"make (\S+)", shown)) >= {"install", "demo", "test", "lint", "test-gpu", "bench", "help"}


def test_ci_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()
    planned = subprocess.run(["make", "--dry-run", "test"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert all(step in planned for step in ("ruff check", "ruff format --check", "mypy", "pytest"))
