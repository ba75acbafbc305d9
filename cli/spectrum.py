"""`flashbob-curv spectrum`: extreme eigenvalues with residuals, and the spectral density, of a curvature matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.console import estimate, memory, progress_bar, shown_checks
from cli.options import MatrixOptions, check_tolerance

if TYPE_CHECKING:
    from cli.session import Session
    from curvature import Eigenpairs, SpectralDensity
    from curvature.page import PageFigure, PageTable

__all__ = ["SpectrumOptions", "spectrum"]

_SPREAD_SIGMA = 0.1
"""Width of the Gaussian that spectra are compared through, of their root mean squares."""


@dataclass(frozen=True, kw_only=True)
class SpectrumOptions(MatrixOptions):
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
            callback=check_tolerance,
            help="Residual that these must reach, relative to the largest magnitude, by restarted Lanczos beside the "
            "probes. [default: report what the probes' runs found]",
        ),
    ] = None
    max_products: Annotated[int, typer.Option(min=1, help="With --tol: products that the restarted run may take.")] = (
        300
    )
    per_layer: Annotated[
        bool,
        typer.Option(
            "--per-layer", help="Also the spectrum of each layer's diagonal block, by runs of its own of --steps steps."
        ),
    ] = False

    @property
    def most_probes(self) -> int:
        """See `RunOptions`."""
        return self.probes

    @property
    def residual(self) -> float | None:
        """See `RunOptions`."""
        return self.tol


def spectrum(options: SpectrumOptions) -> None:
    """Extreme eigenvalues and spectral density of the Hessian, by Lanczos.

    Writes spectrum.json, spectrum.png and report.html into --out. One Lanczos run per probe gives both the eigenvalues
    at the two ends, each with its residual, and the density. With --tol a further run, restarted so that its memory
    stays bounded, brings the eigenvalues to that residual. The runs are saved as they go, so that an interrupted one
    can go on with --resume; under torchrun several processes share the probes. With --per-layer the same is done for
    the diagonal block of each layer, and spectrum_layers.png is written too.
    """
    # Imported here, as in the other commands, so that --help does not wait for torch.
    from cli.session import open_session
    from curvature import spectral_density
    from curvature.plots import figure_png, spectra_figure, spectrum_figure
    from curvature.report import Measurement

    session = open_session("spectrum", options, long=True)
    with Measurement(session.operator.device) as measurement:
        loss = session.loss()
        checks = session.checks(wanted=options.check)
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
        layers = _layers(session, options) if options.per_layer else {}
    values, residuals = density.extremes(options.top) if pairs is None else (pairs.eigenvalues, pairs.residuals)
    title = session.matrix.words
    heading = f"{title[0].upper()}{title[1:]} of {session.label}"
    pictures = {
        "spectrum.png": figure_png(
            spectrum_figure(density, values.tolist(), residuals.tolist(), title=heading, matrix=title)
        )
    }
    if layers:
        pictures["spectrum_layers.png"] = figure_png(
            spectra_figure(layers, top=options.top, title=f"{heading}, by layer", matrix=title)
        )
    else:
        (session.out / "spectrum_layers.png").unlink(missing_ok=True)  # of an earlier run, whose record is replaced
    content = session.record(
        measurement,
        {
            "operator": options.operator.value,
            "loss": loss,
            "eigenvalues": _pairs(values, residuals),
            "density": _curve(density),
            "trace": {"value": density.trace, "stderr": density.trace_stderr},
            "layers": [_layer(session, *entry, options.top) for entry in layers.items()] if layers else None,
            "heterogeneity": _heterogeneity(layers, options.probes),
            **checks,
            "products": density.products
            + (pairs.products if pairs else 0)
            + sum(layer.products for layer in layers.values()),
            "converged": pairs.converged if pairs else density.converged,
            "restarts": pairs.restarts if pairs else None,
            "steps": options.steps,
            "probes": options.probes,
            "precision": session.precision(options.probes if options.probes > 1 else None),
        },
    )
    page = _page(session, density, content, pictures)
    session.finish(content, _table(content, density), {**pictures, "report.html": page})


def _layers(session: Session, options: SpectrumOptions) -> dict[str, SpectralDensity]:
    """The spectrum of each layer's diagonal block."""
    from curvature import layer_spectra

    with progress_bar("Lanczos by layer") as report:
        return layer_spectra(
            session.operator,
            probes=options.probes,
            steps=options.steps,
            seed=options.seed,
            progress=report,
            state=session.state,
            processes=session.processes,
        )


def _pairs(values: Any, residuals: Any) -> list[dict[str, float]]:
    return [{"value": value, "residual": residual} for value, residual in zip(values, residuals, strict=True)]


def _curve(density: SpectralDensity) -> dict[str, Any]:
    return {"grid": density.grid, "values": density.values, "stderr": density.stderr, "sigma": density.sigma}


def _layer(session: Session, name: str, density: SpectralDensity, top: int) -> dict[str, Any]:
    from curvature import layer_groups

    (group,) = [group for group in layer_groups(session.operator.space) if group.name == name]
    return {
        "name": name,
        "numel": group.numel(session.operator.space),
        "eigenvalues": _pairs(*density.extremes(top)),
        "density": _curve(density),
        "quadratures": [{"nodes": n, "weights": w} for n, w in zip(density.nodes, density.weights, strict=True)],
        "trace": {"value": density.trace, "stderr": density.trace_stderr},
        "products": density.products,
        "converged": density.converged,
    }


def _heterogeneity(layers: Mapping[str, SpectralDensity], probes: int) -> dict[str, Any] | None:
    """How much the spectra of transformer blocks differ, each divided by its root mean square; None of fewer than two.

    Divided by their largest eigenvalues, spectra of many parameters are all one peak at zero.
    """
    from curvature import spectra_distances

    blocks = {name: density for name, density in layers.items() if name.startswith("layer ")}
    if probes < 2 or len(blocks) < 2 or any(not any(n.any() for n in density.nodes) for density in blocks.values()):
        return None
    return asdict(spectra_distances(blocks, scaling="spread", sigma=_SPREAD_SIGMA))


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


def _few(probes: int) -> str:
    return f" ({probes} probes: the error itself is rough)" if 1 < probes < 5 else ""


def _table(content: dict[str, Any], density: SpectralDensity) -> list[tuple[str, str]]:
    pairs = [(e["value"], e["residual"]) for e in content["eigenvalues"]]
    upper = min(3, (len(pairs) + 1) // 2)  # numbers count from either end
    lower = min(3, len(pairs) - upper)
    shown = [*zip(range(1, upper + 1), pairs, strict=False)]
    shown += zip(range(-lower, 0), pairs[len(pairs) - lower :], strict=True)
    return [
        ("loss", f"{content['loss']:.4f} nats per token"),
        *((f"eigenvalue {number}", f"{value:.6g}, residual {residual:.1e}") for number, (value, residual) in shown),
        ("trace", estimate(density.trace, density.trace_stderr) + _few(content["probes"])),
        *(
            (row["name"], "{:.5g} to {:.5g}".format(row["eigenvalues"][-1]["value"], row["eigenvalues"][0]["value"]))
            for row in content["layers"] or ()
        ),
        *_shown_heterogeneity(content),
        *shown_checks(content),
        ("products", f"{content['products']}"),
        ("time, peak memory", f"{content['seconds']:.1f} s, {memory(content['peak_memory_bytes'])}"),
    ]


def _shown_heterogeneity(content: dict[str, Any]) -> list[tuple[str, str]]:
    found = content["heterogeneity"]
    if found is None:
        return []
    beyond = f"mean squared Jensen-Shannon distance beyond that of two probes of one block, {found['floor']:.2g}"
    return [("blocks differ by", f"{_mean_difference(found)}, {beyond}")]


def _mean_difference(found: dict[str, Any]) -> str:
    if found["mean_stderr"] is None:
        return f"{found['mean']:.2g} (two blocks, two probes: no standard error)"
    return f"{estimate(found['mean'], found['mean_stderr'])} (equal blocks: p = {found['p_value']:.2g})"


def _page(session: Session, density: SpectralDensity, content: dict[str, Any], pictures: dict[str, bytes]) -> str:
    from curvature.page import PageFigure, PageTable, report_html

    first = content["eigenvalues"][0]
    trace = estimate(density.trace, density.trace_stderr)
    title = session.matrix.words
    return report_html(
        f"{title[0].upper()}{title[1:]} spectrum",
        lead=f"{session.subject}. Largest eigenvalue {first['value']:.6g} (residual {first['residual']:.1e}); "
        f"trace {trace}.",
        remarks=[content["precision"]["text"]],
        figures=[
            PageFigure(
                pictures["spectrum.png"],
                alt=f"Spectral density on a logarithmic scale from {density.grid[0]:.3g} to {density.grid[-1]:.3g}, "
                f"with {len(content['eigenvalues'])} Ritz values below it",
                caption=f"Density of the eigenvalues, smoothed by a Gaussian of width {density.sigma:.3g}; below it "
                "the Ritz values of one Lanczos run with their residuals as bars.",
            ),
            *_layer_figures(content, pictures),
        ],
        tables=[
            PageTable(
                "Ritz values from both ends, in loss units per squared parameter unit; an eigenvalue lies within the "
                "residual of each",
                ("eigenvalue", "residual"),
                [(e["value"], e["residual"]) for e in content["eigenvalues"]],
            ),
            *_layer_tables(content),
        ],
        facts={name: content[name] for name in ("settings", "model", "data", "environment")},
        notices=session.notices,
    )


def _layer_figures(content: dict[str, Any], pictures: dict[str, bytes]) -> list[PageFigure]:
    from curvature.page import PageFigure

    if not content["layers"]:
        return []
    widest = max(content["layers"], key=lambda row: row["eigenvalues"][0]["value"])
    alt = (
        f"Spectral density of the diagonal block of each layer, one panel each for {len(content['layers'])} blocks; "
        f"the largest eigenvalue is that of {widest['name']}, {widest['eigenvalues'][0]['value']:.3g}"
    )
    caption = (
        "Density of the eigenvalues of each layer's diagonal block, each on an axis of its own; below it Ritz values."
    )
    return [PageFigure(pictures["spectrum_layers.png"], alt=alt, caption=caption)]


def _layer_tables(content: dict[str, Any]) -> list[PageTable]:
    from curvature.page import PageTable

    if not content["layers"]:
        return []
    columns = (
        "name",
        "numel",
        "largest",
        "residual",
        "smallest",
        "residual of the smallest",
        "trace",
        "standard error",
    )
    rows = []
    for row in content["layers"]:
        first, last = row["eigenvalues"][0], row["eigenvalues"][-1]
        ends = [first["value"], first["residual"], last["value"], last["residual"]]
        rows.append([row["name"], row["numel"], *ends, row["trace"]["value"], row["trace"]["stderr"]])
    tables = [PageTable("Diagonal block of each layer, in loss units per squared parameter unit", columns, rows)]
    if found := content["heterogeneity"]:
        title = (
            "Squared Jensen-Shannon distances between the spectra of transformer blocks, divided by their root mean "
            f"squares, from 0 for equal to 1 for disjoint; mean {_mean_difference(found)}. What two probes of one "
            f"block differ by, on average {found['floor']:.2g}, is taken off, so that noise alone averages to zero"
        )
        distances = [[name, *map(float, line)] for name, line in zip(found["names"], found["values"], strict=True)]
        tables.append(PageTable(title, ("block", *found["names"]), distances))
    return tables
