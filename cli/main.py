"""The `flashbob-curv` application: the commands, and the version."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.bench import app as bench
from cli.diagonal import diagonal
from cli.doctor import doctor
from cli.evaluate import evaluate
from cli.hvp import hvp
from cli.options import bind
from cli.quantize import quantize
from cli.report import report
from cli.spectrum import spectrum
from cli.trace import trace
from cli.train import train

__all__ = ["app", "main"]

app = typer.Typer(
    name="flashbob-curv",
    help="Exact second derivatives of attention language models at long context.",
    epilog="Exit codes: 0 done, 1 expected failure (one line on stderr), 2 wrong usage.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for body in (spectrum, trace, diagonal, report, hvp, quantize, evaluate, train, doctor):
    app.command(body.__name__)(bind(body))
app.add_typer(bench, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        from flashbob import __version__

        print(f"flashbob-curv {__version__}")
        raise typer.Exit


@app.callback()
def version(
    wanted: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Exact second derivatives of attention language models at long context."""


def main() -> None:
    """Run the command line with the process's own arguments."""
    app()
