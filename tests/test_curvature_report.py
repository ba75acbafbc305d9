"""Records, pages and pictures."""

from __future__ import annotations

import io
import json
import math
import re
import struct
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from curvature_oracles import MatrixOperator, with_spectrum
from transformers import AutoModelForCausalLM

import flashbob
from curvature import report, spectral_density, trace
from curvature.blocks import kind_of, layer_of
from curvature.breakdown import Breakdown
from curvature.models import architectures
from curvature.page import PageFigure, PageTable, report_html
from curvature.plots import figure_png, spectrum_figure, trace_figure

# Files


@dataclass(frozen=True)
class Fact:
    value: float
    where: Path


def test_json_holds_what_the_results_are_made_of(tmp_path: Path) -> None:
    content = {
        "array": np.arange(3.0), "number": np.float32(0.5), "count": np.int64(3), "flag": np.bool_(True), "none": None,
        "tensor": torch.tensor([1, 2]), "dtype": torch.bfloat16, "device": torch.device("cpu"), "pair": (1, "λ"),
        "fact": Fact(1.5, Path("a/b")), "nested": {"deep": [{"x": 1}]},
    }  # fmt: skip
    report.write_json(tmp_path / "r.json", content)
    text = (tmp_path / "r.json").read_text(encoding="utf-8")
    assert json.loads(text) == {
        "array": [0.0, 1.0, 2.0], "number": 0.5, "count": 3, "flag": True, "none": None, "tensor": [1, 2],
        "dtype": "bfloat16", "device": "cpu", "pair": [1, "λ"], "fact": {"value": 1.5, "where": "a/b"},
        "nested": {"deep": [{"x": 1}]},
    }  # fmt: skip
    assert text.endswith("}\n")
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize("value", [math.nan, math.inf, np.float64("nan"), torch.tensor(math.nan)], ids=str)
def test_numbers_that_json_lacks_are_refused_by_place(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"results\[1\]\.stderr is (nan|inf)"):
        report.write_json(tmp_path / "r.json", {"results": [0, {"stderr": value}]})
    with pytest.raises(TypeError, match="results is a object"):
        report.write_json(tmp_path / "r.json", {"results": object()})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_write_leaves_the_earlier_file_whole(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.json"
    report.write_json(path, {"run": 1})

    def interrupted(descriptor: int) -> None:
        raise error

    monkeypatch.setattr("curvature.report.os.fsync", interrupted)
    with pytest.raises(error):
        report.write_json(path, {"run": 2})
    assert json.loads(path.read_text()) == {"run": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_files_are_as_readable_as_others(tmp_path: Path) -> None:
    (tmp_path / "usual").write_text("x")
    report.write_text(tmp_path / "ours", "x")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "usual").stat().st_mode


# Records


def test_record_has_the_common_fields() -> None:
    with report.Measurement() as measurement:
        block = torch.ones(1000, 1000)
    made = report.record(
        "hvp", model={"name": "tiny"}, data={"tokens": 4}, settings={"seed": 0}, measurement=measurement, device="cpu",
        results={"seconds_per_product": 0.1},
    )  # fmt: skip
    assert block.sum() == 1e6
    assert list(made)[:8] == [
        "command",
        "version",
        "model",
        "data",
        "settings",
        "environment",
        "seconds",
        "peak_memory_bytes",
    ]
    assert made["version"] == flashbob.__version__
    assert set(made["environment"]) == {"python", "torch", "triton", "transformers", "device"}
    assert made["environment"]["torch"] == torch.__version__
    assert made["environment"]["device"].startswith("cpu: ")
    assert 0 < made["seconds"] < 60
    assert 50e6 < made["peak_memory_bytes"] < 1e12
    json.loads(report.to_json(made))
    with pytest.raises(ValueError, match="'seconds'"):
        report.record(
            "hvp", model={}, data={}, settings={}, measurement=measurement, device="cpu", results={"seconds": 1}
        )


def test_measurement_stands_still_after_the_block() -> None:
    with report.Measurement() as measurement:
        pass
    assert measurement.seconds == measurement.seconds


@pytest.mark.gpu
def test_measurement_on_a_gpu_counts_its_memory() -> None:
    with report.Measurement("cuda") as measurement:
        torch.empty(1 << 26, dtype=torch.uint8, device="cuda")
    assert measurement.peak_memory_bytes >= 1 << 26


# Pages


class Page(HTMLParser):
    """Checks that tags nest and gathers what a reader meets."""

    VOID = ("meta", "img", "link", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_page_is_self_contained_and_escaped() -> None:
    html = report_html(
        "Spectrum of <tiny>", lead="A & B",
        figures=[PageFigure(b"\x89PNG", 'Density "and" values', "Logarithmic scale")],
        tables=[PageTable("Eigenvalues", ["value", "name"], [[1.23456, "<a>"], [None, "b"]])],
        facts={"Settings": {"seq": 64, "model": {"name": "tiny", "position_extension": None}}},
        notices=["32768 positions > 1024"],
    )  # fmt: skip
    page = Page(html)
    assert html.startswith("<!doctype html>")
    assert ("html", {"lang": "en"}) in page.tags
    assert "Spectrum of <tiny>" in page.text
    for text in ("A & B", "32768 positions > 1024", "1.235", "<a>", "–", "model.position_extension", "none"):
        assert text in page.text
    (image,) = (attributes for tag, attributes in page.tags if tag == "img")
    assert image["alt"] == 'Density "and" values'
    assert (image["src"] or "").startswith("data:image/png;base64,")
    assert not [tag for tag, _ in page.tags if tag in ("link", "iframe")]
    assert [attributes for tag, attributes in page.tags if tag == "script"] == [{}], "no script from elsewhere"
    (policy,) = [a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert "default-src 'none'" in policy
    values = [attributes.get("data-value") for tag, attributes in page.tags if tag == "td"]
    assert values[:4] == ["1.23456", "<a>", None, "b"], "sorting goes by the full precision"
    assert not re.search(r"https?://|url\(", html), "nothing is fetched"
    assert "prefers-color-scheme: dark" in html
    assert "viewport" in html


# Pictures


def png_size(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


@pytest.mark.parametrize("probes", [1, 3])
def test_spectrum_figure_shows_density_error_and_residuals(probes: int) -> None:
    matrix, _ = with_spectrum([50.0, 20, -5, *np.linspace(-1, 1, 30)])
    density = spectral_density(MatrixOperator(matrix), probes=probes, steps=8)
    values, residuals = density.extremes(2)
    figure = spectrum_figure(density, values.tolist(), residuals.tolist(), title="A spectrum")
    upper, lower = figure.axes
    assert upper.get_title(loc="left") == "A spectrum"
    assert upper.get_yscale() == "log"
    assert "loss units per squared parameter unit" in lower.get_xlabel()
    assert len(upper.collections) == (1 if probes > 1 else 0), "the band of the standard error"
    assert lower.containers[0].has_xerr
    width, height = png_size(figure_png(figure))
    assert width > 1000 > height > 500


def test_trace_figure_has_layers_kinds_and_error_bars() -> None:
    matrix, _ = with_spectrum(np.linspace(-1, 5, 12))
    op = MatrixOperator(matrix, [4, 4, 4])
    figure = trace_figure(Breakdown.of(trace(op, probes=5), op.space), title="Traces")
    left, right = figure.axes
    assert [t.get_text() for t in left.get_xticklabels()] == ["other"]
    assert "loss units per squared parameter unit" in left.get_ylabel()
    assert any(getattr(c, "has_yerr", False) for c in left.containers)
    assert "mean eigenvalue" in right.get_ylabel()
    png_size(figure_png(figure))


def test_drawing_leaves_the_global_state_of_matplotlib_alone() -> None:
    import matplotlib.pyplot

    density = spectral_density(MatrixOperator(torch.diag(torch.arange(5.0))), probes=2, steps=3)
    figure = spectrum_figure(density, [1.0], [0.1], title="x")
    assert figure_png(figure)
    assert io.BytesIO(figure_png(figure)).read(4) == b"\x89PNG"
    assert matplotlib.pyplot.get_fignums() == []


# Kinds and layers


@pytest.mark.parametrize(
    ("name", "layer", "kind"),
    [
        ("transformer.wte.weight", None, "embedding"),
        ("transformer.wpe.weight", None, "position"),
        ("transformer.h.11.attn.c_attn.bias", 11, "qkv"),
        ("transformer.h.0.attn.c_proj.weight", 0, "o"),
        ("transformer.h.3.mlp.c_fc.weight", 3, "mlp in"),
        ("transformer.h.3.mlp.c_proj.weight", 3, "mlp out"),
        ("transformer.h.3.ln_2.bias", 3, "norm"),
        ("transformer.ln_f.weight", None, "norm"),
        ("lm_head.weight", None, "head"),
        ("model.embed_tokens.weight", None, "embedding"),
        ("model.layers.7.self_attn.q_proj.weight", 7, "q"),
        ("model.layers.7.self_attn.k_proj.bias", 7, "k"),
        ("model.layers.7.self_attn.v_proj.weight", 7, "v"),
        ("model.layers.7.self_attn.o_proj.weight", 7, "o"),
        ("model.layers.7.self_attn.q_norm.weight", 7, "norm"),
        ("model.layers.7.mlp.gate_proj.weight", 7, "mlp gate"),
        ("model.layers.7.mlp.up_proj.weight", 7, "mlp in"),
        ("model.layers.7.mlp.down_proj.weight", 7, "mlp out"),
        ("model.layers.7.post_attention_layernorm.weight", 7, "norm"),
        ("model.norm.weight", None, "norm"),
        ("model.layers.2.block_sparse_moe.router.layer.weight", 2, "router"),
        ("model.layers.2.block_sparse_moe.input_linear.weight", 2, "mlp in"),
        ("model.layers.2.block_sparse_moe.output_linear.weight", 2, "mlp out"),
        ("gpt_neox.embed_in.weight", None, "embedding"),
        ("gpt_neox.layers.5.attention.query_key_value.weight", 5, "qkv"),
        ("gpt_neox.layers.5.attention.dense.bias", 5, "o"),
        ("gpt_neox.layers.5.mlp.dense_h_to_4h.weight", 5, "mlp in"),
        ("gpt_neox.layers.5.mlp.dense_4h_to_h.weight", 5, "mlp out"),
        ("gpt_neox.final_layer_norm.weight", None, "norm"),
        ("embed_out.weight", None, "head"),
        ("model.decoder.embed_positions.weight", None, "position"),
        ("model.decoder.layers.0.self_attn.out_proj.weight", 0, "o"),
        ("model.decoder.layers.0.fc1.weight", 0, "mlp in"),
        ("transformer.h.0.mlp.fc_in.weight", 0, "mlp in"),
        ("transformer.h.0.mlp.fc_out.weight", 0, "mlp out"),
        ("block0", None, "other"),
    ],
)
def test_layer_and_kind_of_a_parameter(name: str, layer: int | None, kind: str) -> None:
    assert (layer_of(name), kind_of(name)) == (layer, kind)


@pytest.mark.parametrize("name", architectures())
def test_every_parameter_of_a_built_in_architecture_has_a_kind(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(architectures()[name].configuration())
    assert [n for n, _ in model.named_parameters() if kind_of(n) == "other"] == []
