"""`flashbob-curv spectrum`: extreme eigenvalues with residuals, and the spectral density, of the Hessian."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.console import estimate, memory, progress_bar
from cli.options import RunOptions

if TYPE_CHECKING:
    from cli.session import Session
    from curvature import Eigenpairs, SpectralDensity

__all__ = ["SpectrumOptions", "spectrum"]


@dataclass(frozen=True, kw_only=True)
class SpectrumOptions(RunOptions):
    """Options of `spectrum`."""

    steps: Annotated[int, typer.Option(min=1, help="Lanczos steps per probe; each is one Hessian product.")] = 20
    probes: Annotated[
        int,
        typer.Option(min=1, help="Random start vectors; from two on the density and the trace have standard errors."),
    ] = 2
    top: Annotated[int, typer.Option(min=1, help="Eigenvalues to report from each end of the spectrum.")] = 10
    tol: Annotated[
        float | None,
        typer.Option(
            help="Residual that these must reach, relative to the largest magnitude, by restarted Lanczos beside the "
            "probes. [default: report what the probes' runs found]"
        ),
    ] = None
    max_products: Annotated[int, typer.Option(min=1, help="With --tol: products that the restarted run may take.")] = (
        300
    )


def spectrum(options: SpectrumOptions) -> None:
    """Extreme eigenvalues and spectral density of the Hessian, by Lanczos.

    Writes spectrum.json, spectrum.png and report.html into --out. One Lanczos run per probe gives both the eigenvalues
    at the two ends, each with its residual, and the density. With --tol a further run, restarted so that its memory
    stays bounded, brings the eigenvalues to that residual. The runs are saved as they go, so that an interrupted one
    can go on with --resume; under torchrun several processes share the probes.
    """
    # Imported here, as in the other commands, so that --help does not wait for torch.
    from cli.session import open_session
    from curvature import spectral_density
    from curvature.plots import figure_png, spectrum_figure
    from curvature.report import Measurement

    session = open_session("spectrum", options, long=True)
    with Measurement(session.operator.device) as measurement:
        loss = session.loss()
        symmetry_error = session.check_symmetry()
        with progress_bar("Lanczos") as report:
            density = spectral_density(
                session.operator,
                probes=options.probes,
                steps=options.steps,
                seed=options.seed,
                progress=report,
                state=session.state,
                processes=session.processes,
            )
        pairs = None if options.tol is None else _to_tolerance(session, options, options.tol)
    values, residuals = density.extremes(options.top) if pairs is None else (pairs.eigenvalues, pairs.residuals)
    png = figure_png(spectrum_figure(density, values.tolist(), residuals.tolist(), title=f"Hessian of {session.label}"))
    content = session.record(
        measurement,
        {
            "operator": "hessian",
            "loss": loss,
            "eigenvalues": [{"value": v, "residual": r} for v, r in zip(values, residuals, strict=True)],
            "density": {
                "grid": density.grid,
                "values": density.values,
                "stderr": density.stderr,
                "sigma": density.sigma,
            },
            "trace": {"value": density.trace, "stderr": density.trace_stderr},
            "symmetry_error": symmetry_error,
            "products": density.products + (pairs.products if pairs else 0),
            "converged": pairs.converged if pairs else density.converged,
            "restarts": pairs.restarts if pairs else None,
            "steps": options.steps,
            "probes": options.probes,
        },
    )
    page = _page(session, density, content, png)
    session.finish(content, _table(content, density), {"spectrum.png": png, "report.html": page})


def _to_tolerance(session: Session, options: SpectrumOptions, tol: float) -> Eigenpairs:
    """The extreme eigenvalues by restarted Lanczos; the first process finds them."""
    from curvature import eigenpairs

    def find() -> Eigenpairs:
        with progress_bar("restarted Lanczos") as report:
            return eigenpairs(
                session.operator,
                top=options.top,
                tol=tol,
                max_products=options.max_products,
                seed=options.seed,
                progress=session.processes.listening(report),
                state=session.state,
            )

    (pairs,) = session.processes.share([find])
    if not pairs.converged:
        worst = pairs.residuals.max() / abs(pairs.eigenvalues).max()
        session.remark(
            f"after {pairs.products} products the largest residual of the {len(pairs.eigenvalues)} eigenvalues is "
            f"{worst:.1e} of the largest magnitude, not yet {tol:.2g}; raise --max-products"
        )
    return pairs


def _table(content: dict[str, Any], density: SpectralDensity) -> list[tuple[str, str]]:
    pairs = [(e["value"], e["residual"]) for e in content["eigenvalues"]]
    shown = pairs if len(pairs) <= 6 else [*pairs[:3], *pairs[-3:]]
    return [
        ("loss", f"{content['loss']:.4f} nats per token"),
        *(
            (f"eigenvalue {number}", f"{value:.6g}, residual {residual:.1e}")
            for number, (value, residual) in zip(("1", "2", "3", "-3", "-2", "-1"), shown, strict=False)
        ),
        ("trace", estimate(density.trace, density.trace_stderr)),
        ("symmetry error", f"{content['symmetry_error']:.1e}"),
        ("products", f"{content['products']}"),
        ("time, peak memory", f"{content['seconds']:.1f} s, {memory(content['peak_memory_bytes'])}"),
    ]


def _page(session: Session, density: SpectralDensity, content: dict[str, Any], png: bytes) -> str:
    from curvature.page import PageFigure, PageTable, report_html

    first = content["eigenvalues"][0]
    trace = estimate(density.trace, density.trace_stderr)
    return report_html(
        "Hessian spectrum",
        lead=f"{session.subject}. Largest eigenvalue {first['value']:.6g} (residual {first['residual']:.1e}); "
        f"trace {trace}.",
        figures=[
            PageFigure(
                png,
                alt=f"Spectral density on a logarithmic scale from {density.grid[0]:.3g} to {density.grid[-1]:.3g}, "
                f"with {len(content['eigenvalues'])} Ritz values below it",
                caption=f"Density of the eigenvalues, smoothed by a Gaussian of width {density.sigma:.3g}; below it "
                "the Ritz values of one Lanczos run with their residuals as bars.",
            )
        ],
        tables=[
            PageTable(
                "Ritz values from both ends, in loss units per squared parameter unit; an eigenvalue lies within the "
                "residual of each",
                ("eigenvalue", "residual"),
                [(e["value"], e["residual"]) for e in content["eigenvalues"]],
            )
        ],
        facts={name: content[name] for name in ("settings", "model", "data", "environment")},
        notices=session.notices,
    )
