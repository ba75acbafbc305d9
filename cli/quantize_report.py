"""What `quantize` writes and shows: its record, its table and its page."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from cli.console import estimate, memory
from cli.evaluate import shown_perplexity

if TYPE_CHECKING:
    from cli.session import Session
    from quant import Expansion, Perplexity, QuantizedModel, Written

__all__ = ["page", "results", "table"]


def results(
    found: QuantizedModel,
    written: Written,
    before: Perplexity,
    after: Perplexity,
    whole: Expansion,
    frontier: list[dict[str, Any]],
    singles: dict[str, Any] | None,
) -> dict[str, Any]:
    """The command's own fields of quantize.json."""
    from quant.perplexity import rise

    change, stderr = rise(after, before)
    return {
        **found.plan.as_record(),
        "loss_before": before.loss,
        "loss_after": after.loss,
        "perplexity_before": before.perplexity,
        "perplexity_after": after.perplexity,
        "evaluation_tokens": before.tokens,
        "whole_plan": whole.as_record(),
        "measured_loss_change": change,
        "measured_loss_change_stderr": stderr if math.isfinite(stderr) else None,
        "quantizer": found.settings.quantizer,
        "storage_dtype": found.dtype,
        "checkpoint": {
            "export": written.export,
            "bytes": written.bytes,
            "verified": written.verified,
            "largest_difference": written.largest_difference,
            "writer": written.writer,
        },
        "scores": {
            metric: {"seconds": table.seconds, "products": table.products} for metric, table in found.scores.items()
        },
        "frontier": frontier,
        "single_weights": singles,
    }


def table(content: dict[str, Any]) -> list[tuple[str, str]]:
    """The short table on stdout."""
    predicted = content["predicted_loss_change"]
    singles = content["single_weights"]
    rows = [
        *((f"loss {when}", _loss(content, when)) for when in ("before", "after")),
        ("rise, measured", estimate(content["measured_loss_change"], content["measured_loss_change_stderr"])),
        ("rise, to second order", _prediction(content["whole_plan"])),
        ("rise, weight by weight", "the metric only ranks" if predicted is None else f"{predicted:.4g}"),
        ("average bits", f"{content['average_bits']:.3f} ({content['average_stored_bits']:.3f} with scales)"),
        ("planned size", f"{content['bytes']:,} bytes, unquantized tensors included"),
        ("checkpoint", f"{content['settings']['out']}/model: {_checkpoint(content['checkpoint'])}"),
    ]
    rows += [
        (f"{row['metric']}, {row['average_bits']:.2f} bits", f"rise {estimate(row['rise'], row['rise_stderr'])}")
        for row in content["frontier"]
    ]
    if singles is not None and singles["spearman"] is not None:
        rows.append(("single weights", f"predicted against measured: Spearman {singles['spearman']:.2f}"))
    return [*rows, ("time, peak memory", f"{content['seconds']:.1f} s, {memory(content['peak_memory_bytes'])}")]


def _loss(content: dict[str, Any], when: str) -> str:
    perplexity = shown_perplexity(content[f"perplexity_{when}"], ".4g")
    return f"{content[f'loss_{when}']:.4f} nats, perplexity {perplexity}"


def _prediction(whole: dict[str, Any]) -> str:
    parts = f"gradient {whole['linear']:+.4g}, curvature {whole['quadratic']:+.4g}"
    return f"{estimate(whole['change'], whole['stderr'])} ({parts})"


def _checkpoint(facts: dict[str, Any]) -> str:
    read = "read back without any difference" if facts["verified"] else "not verified"
    return f"{facts['export']}, {facts['bytes']:,} bytes, {read}"


def page(
    session: Session,
    found: QuantizedModel,
    content: dict[str, Any],
    frontier: list[dict[str, Any]],
    singles: dict[str, Any] | None,
) -> str:
    """The report as HTML."""
    from curvature.page import report_html

    change = estimate(content["measured_loss_change"], content["measured_loss_change_stderr"])
    return report_html(
        "Quantization",
        lead=(
            f"{session.subject}. {found.plan.average_bits:.3f} bits on average by {found.plan.metric!r}, "
            f"{memory(found.plan.bytes)} with all unquantized tensors, scales and the file's header; the loss on "
            f"evaluation text rises by {change} nats per token."
        ),
        figures=_figures(session, found, content, frontier, singles),
        tables=_tables(found, content, frontier, singles),
        facts={name: content[name] for name in ("checkpoint", "settings", "model", "data", "environment")},
        notices=session.notices,
    )


def _figures(
    session: Session,
    found: QuantizedModel,
    content: dict[str, Any],
    frontier: list[dict[str, Any]],
    singles: dict[str, Any] | None,
) -> list[Any]:
    from curvature.page import PageFigure
    from curvature.plots import figure_png
    from quant.figures import bits_figure, frontier_figure, prediction_figure

    heat = figure_png(bits_figure(found.plan, title=f"Bits of {session.label}"))
    figures = [
        PageFigure(heat, alt="Heat map of bits by layer and kind of weight", caption="Bits of every quantized weight.")
    ]
    if frontier:
        own = {
            "metric": found.plan.metric + " (this plan)",
            "bytes": found.plan.bytes,
            "rise": content["measured_loss_change"],
            "rise_stderr": content["measured_loss_change_stderr"],
        }
        png = figure_png(frontier_figure([*frontier, own], title="Rise of the loss on evaluation text"))
        caption = "Bars: paired standard error between evaluation batches. Sizes are of the whole weights file."
        figures.append(PageFigure(png, alt="Rise of the loss against bytes, by metric", caption=caption))
    if singles is not None:
        rows = singles["weights"]
        errors = [row["predicted_stderr"] for row in rows]
        png = figure_png(
            prediction_figure(
                [row["predicted"] for row in rows],
                None if None in errors else errors,
                [row["measured"] for row in rows],
                title=f"Single weights, predicted by {singles['metric']!r}",
            )
        )
        caption = "Each weight alone at its fewest and its most bits, on the calibration text."
        figures.append(PageFigure(png, alt="Measured against predicted changes of the loss", caption=caption))
    return figures


def _tables(
    found: QuantizedModel, content: dict[str, Any], frontier: list[dict[str, Any]], singles: dict[str, Any] | None
) -> list[Any]:
    from curvature.page import PageTable

    stability = content.get("stability") or {}
    keys = ("name", "bits", "group_size", "predicted_loss_change", "predicted_stderr")
    redrawn = {"share of redraws with other bits": stability.get("share_changed", [None] * len(content["weights"]))}
    if "metric" in stability:  # the plan is another one than that which was redrawn
        by = f"by {stability['metric']!r} alone"
        redrawn = {
            f"bits {by}": stability["bits"],
            f"share of redraws {by} with other bits": stability["share_changed"],
        }
    weights = [[*(w[k] for k in keys), *more] for w, *more in zip(content["weights"], *redrawn.values(), strict=True)]
    tables = []
    columns: tuple[str, ...]
    if frontier:
        columns = ("metric", "average_bits", "bytes", "rise", "rise_stderr")
        rows = [[row[c] for c in columns] for row in frontier]
        tables.append(PageTable("Other plans, on the evaluation text", columns, rows))
    if singles is not None:
        columns = ("name", "bits", "predicted", "predicted_stderr", "measured", "misses_by")
        rows = [[row[c] for c in columns] for row in singles["weights"][:10]]
        tables.append(PageTable("The biggest misses: one weight alone, nats per token", columns, rows))
    if "steps" in content:
        columns = ("round", "share", "moved", "predicted", "measured", "measured_stderr", "accepted")
        rows = [[step[c] for c in columns] for step in content["steps"]]
        tables.append(PageTable("Re-linearization: steps tried, on held-out calibration text", columns, rows))
    head = (*keys, *redrawn)
    tables.append(PageTable(f"The plan, by {found.plan.metric!r}", head, weights))
    return tables
