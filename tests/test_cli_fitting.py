"""Before a run: settings that fit, or a line that says what would."""

from __future__ import annotations

import pytest
import torch

from cli import fitting
from curvature import LoadedModel, load_model
from curvature.costs import measure_costs
from curvature.memory import forecast

CUDA = torch.device("cuda", 0)  # only asked for its type: the model stays where it is


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("tiny", dtype=torch.float32)


def _free(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    monkeypatch.setattr(fitting, "spare_bytes", lambda _: int(size / (1 - fitting._SPARE)) + 1)


def _fit(loaded: LoadedModel, method: str = "auto", device: torch.device = CUDA, seq: int = 2048) -> tuple[object, str]:
    streaming, remark = fitting.fitting_streaming(loaded, seq=seq, batch=1, method=method, device=device)
    return streaming, remark or ""


def test_plenty_settles_nothing(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    _free(monkeypatch, 100 << 30)
    assert _fit(loaded) == (None, "")
    assert _fit(loaded, "whole") == (None, "")


def test_on_a_cpu_only_what_can_never_fit_is_refused(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    config = loaded.model.config
    least = 2 * config.num_hidden_layers * config.hidden_size * 4 * 2048
    monkeypatch.setattr(fitting, "spare_bytes", lambda _: least)
    assert _fit(loaded, device=torch.device("cpu")) == (None, "")
    monkeypatch.setattr(fitting, "spare_bytes", lambda _: least - 1)
    with pytest.raises(ValueError, match=r"2,048 tokens of tiny in float32 do not fit: .* --seq 896 may, or a smaller"):
        _fit(loaded, device=torch.device("cpu"))


def test_little_memory_chooses_frugal_settings_or_says_what_would_fit(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = measure_costs(loaded.model)
    usual = forecast(costs, seq=2048).peak_bytes
    least = forecast(costs, seq=2048, keep=False, reuse_bytes=0, offload=True).peak_bytes
    _free(monkeypatch, usual - 1)
    streaming, remark = _fit(loaded)
    assert streaming is not None
    assert "keep less" in remark
    _free(monkeypatch, 0.6 * least)
    with pytest.raises(
        ValueError, match=r"1 x 2,048 tokens of tiny in float32 do not fit: .* free on cuda:0; --seq \d+"
    ):
        _fit(loaded)
    _free(monkeypatch, 1 << 20)
    with pytest.raises(ValueError, match="not even 128 tokens would"):
        _fit(loaded)


def test_the_whole_graph_is_refused_where_it_does_not_fit(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    _free(monkeypatch, forecast(measure_costs(loaded.model), seq=2048, method="whole").peak_bytes - 1)
    with pytest.raises(ValueError, match=r"do not fit with --method whole: .*; --method streamed takes"):
        _fit(loaded, "whole")
