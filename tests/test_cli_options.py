"""Options from flags and from YAML files: which wins, what is refused, and where each value came from."""

from pathlib import Path

import pytest
import yaml
from command_line import Run

import cli.session
from cli.options import RunOptions


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[RunOptions]:
    """The options that reach the work, which is not done."""
    options: list[RunOptions] = []

    def stop(_command: str, given: RunOptions, **_: object) -> None:
        options.append(given)
        raise ValueError("far enough")

    monkeypatch.setattr(cli.session, "open_session", stop)
    return options


def test_flags_win_over_the_file_and_the_file_over_defaults(run: Run, seen: list[RunOptions], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("seq: 512\nsteps: 7\nextend-positions: tile\nrandom_init: true\nparams: ln_\n")
    run("spectrum", "--steps", 9, "--config", "run.yaml")
    (options,) = seen
    assert (options.seq, options.steps, options.extend_positions) == (512, 9, "tile")
    assert (options.random_init, options.params, options.batch) == (True, "ln_", 1)
    wanted = {"seq": "file", "steps": "flag", "random_init": "file", "config": "flag", "batch": "default"}
    assert {name: options.origins[name] for name in wanted} == wanted


def test_numbers_in_scientific_notation_are_numbers(run: Run, seen: list[RunOptions], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("tol: 1e-2\n")
    run("trace", "--config", "run.yaml")
    assert seen[0].tol == 0.01


def test_mappings_are_merged(run: Run, seen: list[RunOptions], tmp_path: Path) -> None:
    merged = "<<: [&a {<<: {seq: 16, top: 2}, seq: 32}, {steps: 3, probes: 5}]\nsteps: 4\n"
    (tmp_path / "run.yaml").write_text(merged)
    run("spectrum", "--config", "run.yaml")
    (options,) = seen
    assert [getattr(options, name) for name in ("seq", "top", "steps", "probes")] == [32, 2, 4, 5]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("stepz: 3", ["unknown key 'stepz'", "steps"]),
        ("repeat: 1", ["unknown key 'repeat'"]),
        ("config: other.yaml", ["unknown key 'config'"]),
        ("steps: many", ["--steps"]),
        ("steps: 2.7", ["--steps"]),
        ("steps: true", ["steps must be one value", "True"]),
        ("steps: 0", ["--steps"]),
        ("steps: [1, 2]", ["steps must be one value"]),
        ("steps:", ["steps must be one value", "None"]),
        ("random-init: 1", ["random-init must be true or false"]),
        ("dtype: float12", ["dtype", "float12"]),
        ("device: tpu", ["tpu"]),
        ("steps: 3\nsteps: 4", ["'steps' is given twice"]),
        ("<<: {steps: 3, steps: 4}", ["'steps' is given twice"]),
        ("seq: &n 16\n<<: *n", ["expected a mapping", "for merging"]),
        ("max-products: 3\nmax_products: 4", ["'max_products' is given twice"]),
        ("- steps", ["must hold a mapping"]),
        ("steps: [", ["cannot be read"]),
        ("", ["must hold a mapping"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_file_is_wrong_usage(
    content: str, told: list[str], run: Run, seen: list[RunOptions], tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(content)
    outcome = run("spectrum", "--config", "run.yaml")
    assert outcome.code == 2
    assert all(part in " ".join(outcome.err.split()) for part in told), outcome.err
    assert not seen


@pytest.mark.parametrize("name", ["gpt2_spectrum.yaml"])
def test_the_shipped_files_are_valid(name: str, run: Run, seen: list[RunOptions], root: Path) -> None:
    path = root / "configs" / name
    run(name.removesuffix(".yaml").split("_")[-1], "--config", path)
    (options,) = seen
    for key, value in yaml.safe_load(path.read_text()).items():
        assert getattr(options, key.replace("-", "_")) == value


@pytest.mark.parametrize("command", ["spectrum", "trace", "hvp", "doctor"])
def test_help_names_every_option_of_the_interface(command: str, run: Run) -> None:
    common = (
        "--model --random-init --data --seq --batch --batches --params --dtype --device --method --seed --config --out "
        "--resume --deterministic"
    )
    own = {
        "spectrum": "--steps --probes --top --tol --max-products --per-layer --operator --samples --check",
        "trace": "--tol --max-products --per-head --operator --samples --check",
        "hvp": "--check",
        "doctor": "",
    }[command]
    wanted = f"{own} --json --debug {'' if command == 'doctor' else common + ' --extend-positions'}".split()
    outcome = run(command, "--help")
    assert outcome.code == 0
    assert all(option in outcome.out for option in wanted)


def test_version(run: Run) -> None:
    from flashbob import __version__

    assert run("--version").out.strip() == f"flashbob-curv {__version__}"
