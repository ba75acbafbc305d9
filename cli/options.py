"""The options of the commands: one frozen dataclass per command, its fields the flags and the YAML file's keys."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
import yaml

from cli.failure import failures_told

__all__ = [
    "CheckedOptions",
    "Dtype",
    "Extend",
    "Matrix",
    "MatrixOptions",
    "Method",
    "Options",
    "RunOptions",
    "bind",
    "check_device",
    "check_tolerance",
]


class Dtype(StrEnum):
    """Dtype of the model."""

    auto = "auto"
    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"


class Matrix(StrEnum):
    """Which curvature matrix a command works on."""

    hessian = "hessian"
    ggn = "ggn"
    fisher = "fisher"
    empirical_fisher = "empirical-fisher"

    @property
    def words(self) -> str:
        """Its name in text and titles."""
        return {
            Matrix.hessian: "Hessian",
            Matrix.ggn: "Gauss-Newton matrix",
            Matrix.fisher: "Fisher information",
            Matrix.empirical_fisher: "empirical Fisher matrix",
        }[self]


class Method(StrEnum):
    """How products are computed."""

    auto = "auto"
    streamed = "streamed"
    whole = "whole"


class Extend(StrEnum):
    """What happens beyond the model's own positions."""

    interpolate = "interpolate"
    tile = "tile"
    refuse = "refuse"


class _Loader(yaml.SafeLoader):
    """Reads YAML in which no key stands twice; of two values the last would win without a word."""

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        # As written: later, what `<<` merges into a mapping may have keys that the mapping has as well, and wins over.
        node = super().compose_mapping_node(anchor)
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        spelled = [key.replace("-", "_") for key in keys]
        if twice := [key for key, name in zip(keys, spelled, strict=True) if spelled.count(name) > 1]:
            raise yaml.YAMLError(f"{twice[-1]!r} is given twice; leave one")
        return node


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make a YAML file's values the defaults of the other options, so that flags win."""
    if path is None:
        return None
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise typer.BadParameter(f"{path} must hold a mapping of option names to values, not {type(content).__name__}")
    options = {parameter.name: parameter for parameter in context.command.params if parameter.name != "config"}
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in options:
            known = ", ".join(str(known).replace("_", "-") for known in options)
            raise typer.BadParameter(f"{path}: unknown key {key!r}; the keys of {context.command.name} are {known}")
        flag = bool(getattr(options[name], "is_flag", False))
        if isinstance(value, bool) is not flag or not isinstance(value, str | int | float):
            wanted = "true or false" if flag else "one value"
            raise typer.BadParameter(f"{path}: {key} must be {wanted}, got {value!r}")
        # As text, a value passes the same checks as a flag's: 2.7 is then no integer.
        values[name] = value if flag else str(value)
    context.default_map = values
    return path


def check_device(name: str) -> str:
    """The name of a device, if it is one."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise typer.BadParameter(f"{name!r} is not one of auto, cpu, cuda, cuda:INDEX")
    return name


def check_tolerance(value: float | None) -> float | None:
    """A tolerance, if it is one."""
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise typer.BadParameter(f"{value} is not a positive number")
    return value


@dataclass(frozen=True, kw_only=True)
class Options:
    """What every command takes.

    Attributes:
        origins: {option: "flag" | "file" | "default"}, where each value comes from.
    """

    json: Annotated[bool, typer.Option("--json", help="Print the record as JSON, alone on stdout.")] = False
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of a failure.")] = False
    origins: dict[str, str] = field(default_factory=dict)

    def as_settings(self, *left_out: str) -> dict[str, Any]:
        """The options as a record states them, `origins` last; without those that say what is shown, and these."""
        unsaid = ("json", "debug", "origins", *left_out)
        values = {name: value for name, value in vars(self).items() if name not in unsaid}
        return values | {"origins": {name: origin for name, origin in self.origins.items() if name in values}}


@dataclass(frozen=True, kw_only=True)
class RunOptions(Options):
    """What every command takes that computes something about a model on text."""

    model: Annotated[str, typer.Option(help="`tiny` (shipped), a local folder, or a hub name.")] = "tiny"
    random_init: Annotated[
        bool, typer.Option("--random-init", help="Random weights from the model's configuration; needs no hub.")
    ] = False
    extend_positions: Annotated[
        Extend, typer.Option(help="What to do with a learned position table shorter than --seq.")
    ] = Extend.interpolate
    data: Annotated[
        str, typer.Option(help="`sample` (shipped), a .txt, .jsonl or .parquet file, or hub:DATASET[:CONFIG[:SPLIT]].")
    ] = "sample"
    seq: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens per window. [default: 1024, or the model's own context if that is shorter]"),
    ] = None
    batch: Annotated[int, typer.Option(min=1, help="Windows per batch.")] = 1
    batches: Annotated[int, typer.Option(min=1, help="Number of batches, weighted by their tokens.")] = 1
    params: Annotated[
        str | None, typer.Option(help="Regular expression: restrict the Hessian to the parameters it finds.")
    ] = None
    dtype: Annotated[
        Dtype,
        typer.Option(help="`auto`: the fastest whose measured rounding stays below the run's own error."),
    ] = Dtype.auto
    device: Annotated[str, typer.Option(callback=check_device, help="auto, cpu, cuda or cuda:INDEX.")] = "auto"
    method: Annotated[Method, typer.Option(help="How products are computed.")] = Method.auto
    seed: Annotated[int, typer.Option(min=0, help="Seed of the probes and of random weights.")] = 0
    config: Annotated[
        Path | None,
        typer.Option(callback=_read_config, is_eager=True, help="YAML file of options; flags win over it."),
    ] = None
    deterministic: Annotated[
        bool,
        typer.Option("--deterministic", help="Products that repeat to the last bit on a GPU too; slower there."),
    ] = False
    out: Annotated[Path | None, typer.Option(help="Folder for the results. [default: runs/COMMAND]")] = None
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the state that an interrupted run left in --out.")
    ] = False

    @property
    def most_probes(self) -> int:
        """Independent probes that the run takes at most: the more, the smaller its error beside that of rounding."""
        return 1

    @property
    def residual(self) -> float | None:
        """What eigenvalues are asked for to, relative to the largest magnitude."""
        return None

    @property
    def stop(self) -> tuple[float, int] | None:
        """The relative standard error of a trace at which the run may end, and the least number of probes."""
        return None


@dataclass(frozen=True, kw_only=True)
class CheckedOptions(RunOptions):
    """What commands take that can check their products first."""

    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="First check the products: repeatable, symmetric, and (a Hessian in float32 or float64) equal to "
            "differences of gradients; a failure stops the run.",
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class MatrixOptions(CheckedOptions):
    """What commands take that work on the Hessian or on another curvature matrix."""

    operator: Annotated[
        Matrix,
        typer.Option(
            help="`ggn`: Gauss-Newton matrix of the cross-entropy. `fisher`: Fisher information from labels drawn from "
            "the model. `empirical-fisher`: second moment of the tokens' gradients."
        ),
    ] = Matrix.hessian
    samples: Annotated[int, typer.Option(min=1, help="Labels drawn per token, for --operator fisher.")] = 1


Chosen = TypeVar("Chosen", bound=Options)


def bind(body: Callable[[Chosen], None]) -> Callable[..., None]:
    """Make a command for typer of a function that takes one options object.

    Args:
        body: Function of one argument, annotated with its options class.

    Returns:
        A function with one parameter per option, which builds the object, notes where each value comes from, and ends
        with the exit codes of `cli.failure`.
    """
    (name,) = inspect.signature(body).parameters
    kind: type[Chosen] = get_type_hints(body)[name]
    hints = get_type_hints(kind, include_extras=True)
    # The command's own options first, those that all commands share last.
    declared = [name for level in kind.__mro__ for name in vars(level).get("__annotations__", ()) if name != "origins"]
    names = list(dict.fromkeys(declared))  # a command may give a shared option another default

    def command(context: typer.Context, **values: Any) -> None:
        with failures_told(debug=values["debug"]):
            body(kind(**values, origins={name: _origin(context, name) for name in names}))

    parameter = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    empty = inspect.Parameter.empty
    defaults = {entry.name: empty if entry.default is MISSING else entry.default for entry in fields(kind)}
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=hints[name])
        for name in names
    ]
    signature = inspect.Signature([parameter, *options], return_annotation=None)
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    command.__doc__ = body.__doc__
    return command


def _origin(context: typer.Context, name: str) -> str:
    source = context.get_parameter_source(name)
    return {"COMMANDLINE": "flag", "DEFAULT_MAP": "file"}.get(source.name if source else "", "default")
