"""Gauss-Newton and Fisher operators against dense Jacobians, against each other, and at the edges of their domain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from curvature_oracles import NormFree, relative, tiny_gpt2, tiny_llama, token_batch
from torch import Tensor, nn

from curvature import CausalLMLoss, FisherOperator, GGNOperator, HessianOperator
from curvature.chain import Chain, Segment
from curvature.gauss_newton import model_logits
from curvature.storage import Stretches
from curvature.streamed_gauss_newton import StreamedGaussNewton
from curvature.streaming import Streaming
from curvature.tangents import ForwardMode, Push, reverse_mode
from curvature.token_curvature import LossCurvature, sampled_labels
from tests.tiny_causal_lms import tiny_lm, tokens

SHORT = Streaming(stretches=Stretches(tokenwise=8, head=6))
"""Stretches that divide nothing."""

MODELS = {"gpt2-tied": tiny_gpt2, "llama-gqa-tied": tiny_llama}
KINDS: dict[str, dict[str, Any]] = {
    "ggn": {},
    "empirical": {"kind": "empirical"},
    "monte-carlo": {"kind": "monte-carlo", "samples": 3, "seed": 5},
}


def make(name: str, model: nn.Module, batches: Any, **options: Any) -> GGNOperator | FisherOperator:
    return (FisherOperator if KINDS[name] else GGNOperator)(model, batches, **KINDS[name], **options)


def jacobian(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """(J [T, V, P], probabilities [T, V], labels [T]) of the counted tokens, by one batched backward pass."""
    loss, parameters = CausalLMLoss(), list(model.parameters())
    targets = loss.targets(batch)
    logits = model_logits(model, loss, batch)[targets != loss.ignore_index]
    eye = torch.eye(logits.numel(), dtype=logits.dtype)
    rows = torch.autograd.grad(
        logits.reshape(-1), parameters, eye, is_grads_batched=True, materialize_grads=True, allow_unused=True
    )
    flat = torch.cat([r.reshape(logits.numel(), -1) for r in rows], dim=1)
    return flat.reshape(*logits.shape, -1), logits.softmax(-1).detach(), targets[targets != loss.ignore_index]


def dense(kind: str, model: nn.Module, batches: list[dict[str, Tensor]], method: str = "whole") -> Tensor:
    """The matrix by its definition: J^T Lambda J over the counted tokens, one Jacobian at a time."""
    total, count = 0.0, 0
    for number, batch in enumerate(batches):
        j, p, labels = jacobian(model, batch)
        if kind == "ggn":
            inner = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        elif kind == "empirical":
            score = p - nn.functional.one_hot(labels, p.shape[-1])
            inner = score[:, :, None] * score[:, None, :]
        else:
            targets = CausalLMLoss().targets(batch)
            logits = model_logits(model, CausalLMLoss(), batch).detach()
            drawn = sampled_labels(targets, -100, samples=3, seed=5, number=number)(logits, 0)[:, targets != -100]
            scores = p - nn.functional.one_hot(drawn, p.shape[-1])
            inner = torch.einsum("stv,stw->tvw", scores, scores) / len(scores)
        total = total + torch.einsum("tvp,tvw,twq->pq", j, inner, j)
        count += len(p)
    return total / count


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_products_are_those_of_the_dense_matrix(name: str, kind: str) -> None:
    model, batches = MODELS[name](), [token_batch(7, (2, 6)), token_batch(7, (1, 4), seed=5)]
    expected = dense(kind, model, batches)
    v = torch.randn(len(expected), 2, dtype=torch.float64)
    for method in ("whole", "streamed"):
        op = make(kind, model, batches, method=method, streaming=SHORT)
        assert op.method == method
        assert op.shape == tuple(expected.shape)
        assert relative(op @ v, expected @ v) < 1e-10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["gpt2", "mistral-window", "bloom"])
def test_streamed_equals_whole_with_padding_and_labels(name: str, kind: str) -> None:
    model, batch = tiny_lm(name), tokens((3, 11), padding=True)
    labels = batch["input_ids"].masked_fill(torch.arange(11) % 4 == 1, -100)
    batches = [batch | {"labels": labels}, tokens((1, 5), seed=3)]
    streamed = make(kind, model, batches, method="streamed", streaming=SHORT)
    # Bloom's activation has no rule for forward mode.
    assert (streamed.forward_mode_reason is None) == (name != "bloom")
    whole = make(kind, model, batches, method="whole")
    v = torch.randn(whole.shape[0], 2, dtype=torch.float64)
    assert relative(streamed @ v, whole @ v) < 1e-12
    assert streamed.symmetry_error() < 1e-12


def test_restriction_is_the_diagonal_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Monte-Carlo Fisher keeps its labels, and a streamed product starts in the middle of the chain."""
    model, batches = tiny_lm("gpt2"), [tokens((2, 9))]
    for kind in ("ggn", "monte-carlo"):
        whole = make(kind, model, batches, method="whole")
        part = make(kind, model, batches, method="streamed", params=r"h\.1\.mlp")
        with monkeypatch.context() as patch:
            patch.setattr("curvature.model_operator.find_segments", None)  # what is known of the model is handed on
            inner = part.restricted(part.space.names[:1])
        assert inner.space.names == part.space.names[:1]
        first = torch.zeros(part.shape[0], dtype=torch.float64)
        first[: inner.shape[0]] = torch.randn(inner.shape[0], dtype=torch.float64)
        assert relative(inner @ first[: inner.shape[0]], (part @ first)[: inner.shape[0]]) < 1e-12
        inside = torch.cat([torch.arange(whole.shape[0])[whole.space.slices()[name]] for name in part.space.names])
        v = torch.zeros(whole.shape[0], dtype=torch.float64)
        v[inside] = torch.randn(len(inside), dtype=torch.float64)
        assert relative(part @ v[inside], (whole @ v)[inside]) < 1e-12


def test_gauss_newton_is_the_hessian_where_the_logits_are_linear_in_the_parameters() -> None:
    model, batches = tiny_lm("gpt2-untied"), [tokens((2, 7))]
    hessian = HessianOperator(model, batches, params="lm_head", method="whole")
    ggn = GGNOperator(model, batches, params="lm_head", method="whole")
    v = torch.randn(ggn.shape[0], dtype=torch.float64)
    assert relative(ggn @ v, hessian @ v) < 1e-12
    everything = torch.randn(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    full = GGNOperator(model, batches, method="whole") @ everything
    assert relative(full, HessianOperator(model, batches, method="whole") @ everything) > 0.01


def test_quadratic_forms_are_not_negative_where_those_of_the_hessian_are() -> None:
    model, batches = tiny_gpt2(layers=1), [token_batch(7, (1, 5))]
    vectors = torch.randn(sum(p.numel() for p in model.parameters()), 12, dtype=torch.float64)
    for kind in KINDS:
        assert ((make(kind, model, batches, method="whole") @ vectors) * vectors).sum(0).min() > 0
    forms = ((HessianOperator(model, batches, method="whole") @ vectors) * vectors).sum(0)
    assert forms.min() < 0, "the Hessian of this model is no test of the difference"


def test_monte_carlo_fisher_tends_to_gauss_newton() -> None:
    """Means over independent seeds: the difference shrinks as the error of a mean does, and is within it."""
    model, batches = tiny_gpt2(layers=1), [token_batch(7, (2, 6))]
    v = torch.randn(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    expected = GGNOperator(model, batches, method="whole") @ v
    draws = torch.stack(
        [FisherOperator(model, batches, samples=8, seed=seed, method="whole") @ v for seed in range(25)]
    )
    error = draws.std(0) / len(draws) ** 0.5
    z = (draws.mean(0) - expected)[error > 1e-12] / error[error > 1e-12]
    assert float(z.abs().mean()) < 1.3  # 0.8 for standard normal numbers, which these are not independently
    assert relative(draws[0], expected) > 2 * relative(draws.mean(0), expected)


def test_a_seed_gives_one_fixed_matrix() -> None:
    model, batches = tiny_gpt2(layers=1), [token_batch(7, (2, 6)), token_batch(7, (2, 6))]
    op = FisherOperator(model, batches, seed=1, method="whole")
    v = torch.randn(op.shape[0], dtype=torch.float64)
    assert torch.equal(op @ v, op @ v)
    assert op.repeatability_error() == 0
    assert torch.equal(FisherOperator(model, batches, seed=1, method="whole") @ v, op @ v)
    assert relative(FisherOperator(model, batches, seed=2, method="whole") @ v, op @ v) > 1e-3
    alone = FisherOperator(model, batches[:1], seed=1, method="whole")
    assert relative(alone @ v, op @ v) > 1e-3, "equal batches drew equal labels"


def test_loss_and_gradient_are_those_of_the_loss() -> None:
    model, batches = tiny_lm("llama"), [tokens((2, 9))]
    hessian = HessianOperator(model, batches, method="whole")
    for method in ("whole", "streamed"):
        op = GGNOperator(model, batches, method=method)
        assert op.loss_value() == pytest.approx(hessian.loss_value(), rel=1e-13)
        assert relative(op.gradient(), hessian.gradient()) < 1e-12


def test_head_in_stretches_makes_no_whole_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []
    product = LossCurvature.product
    monkeypatch.setattr(
        LossCurvature, "product", lambda self, x, u, start: widths.append(x.shape[1]) or product(self, x, u, start)
    )
    op = GGNOperator(tiny_lm("gpt2"), [tokens((1, 20))], method="streamed", streaming=SHORT)
    widths.clear()
    op @ torch.ones(op.shape[0], dtype=torch.float64)
    assert widths == [6, 6, 6, 2]


# Directions pushed forward


def hand_written(model: nn.Module, batch: dict[str, Tensor]) -> Chain:
    """A chain whose parts have rules for every mode: a table, layers of tanh and running means, a linear head."""
    ids = batch["input_ids"]

    def segment(layer: nn.Linear) -> Segment:
        parameters = list(layer.parameters())
        mix = lambda x: torch.tanh(x).cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]  # noqa: E731
        return Segment("layer", parameters, lambda x, a: x + layer(a + x).tanh(), attend=mix, tokenwise=True)

    return Chain(
        embed=lambda: model["table"](ids),
        segments=[segment(layer) for layer in model["layers"]],
        head=lambda x, a, b: model["head"](x),
        outer=[*model["table"].parameters(), *model["head"].parameters()],
        length=ids.shape[1],
        tokens=int((CausalLMLoss().targets(batch) != -100).sum()),
    )


@pytest.mark.parametrize("mode", ["forward", "reverse"])
def test_either_mode_gives_the_product(mode: str) -> None:
    torch.manual_seed(3)
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    model = nn.ModuleDict({"table": nn.Embedding(7, 4), "layers": layers, "head": nn.Linear(4, 7)}).double()
    batch, parameters, loss = token_batch(7, (2, 9)), list(model.parameters()), CausalLMLoss()
    curvature, chain = LossCurvature(loss.token_sum, loss.targets(batch)), hand_written(model, batch)
    push: Push = ForwardMode(model, parameters) if mode == "forward" else reverse_mode
    streamed = StreamedGaussNewton(chain, curvature, parameters, push, stretches=SHORT.stretches)
    directions = [[torch.randn_like(p) for p in parameters] for _ in range(2)]

    x = chain.embed()
    for segment in chain.segments:
        x = segment.combine(x, segment.attend(x))
    logits = chain.head(x, 0, 9)
    w = torch.zeros_like(logits, requires_grad=True)
    pulled = torch.autograd.grad(logits, parameters, w, create_graph=True)
    for direction, found in zip(directions, streamed.products(directions), strict=True):
        [u] = torch.autograd.grad(pulled, w, direction, retain_graph=True)
        p = logits.detach().softmax(-1)
        c = p * (u - (p * u).sum(-1, keepdim=True)) * (loss.targets(batch) != -100)[..., None] / chain.tokens
        for a, b in zip(found, torch.autograd.grad(logits, parameters, c, retain_graph=True), strict=True):
            assert relative(a, b) < 1e-13


def test_a_chain_that_answers_with_the_loss_is_refused() -> None:
    chain = Chain(lambda: torch.zeros(1, 4, 2), [], lambda x, a, b: x.sum(), [], 4, 3)
    curvature = LossCurvature(CausalLMLoss().token_sum, torch.zeros(1, 4, dtype=torch.int64))
    parameter = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="answer with logits"):
        StreamedGaussNewton(chain, curvature, [parameter], reverse_mode).product([torch.ones(2)])


# Refusals and remarks


def test_what_streams_is_settled_by_inspection() -> None:
    batches = [token_batch(7, (1, 5))]
    op = GGNOperator(NormFree(), batches)
    assert op.method == "whole"
    assert op.method_reason
    segments = Streaming(segments=lambda batch: hand_written(nn.ModuleDict(), batch))
    assert "hand-written" in str(GGNOperator(tiny_gpt2(), batches, streaming=segments).method_reason)
    with pytest.raises(ValueError, match="method='streamed' does not apply"):
        GGNOperator(tiny_gpt2(), batches, method="streamed", streaming=segments)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kind": "exact"}, ValueError, "kind must be one of monte-carlo, empirical, got 'exact'"),
        ({"samples": 0}, ValueError, "samples must be at least 1 label per token, got 0"),
        ({"seed": -1}, ValueError, r"seed must be in \[0, 2\*\*64\), got -1"),
        ({"loss": lambda model, batch: (model(**batch).logits.sum(), 1)}, TypeError, "token by token"),
    ],
    ids=["kind", "samples", "seed", "loss"],
)
def test_bad_settings_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        FisherOperator(tiny_gpt2(), [token_batch(7, (1, 5))], **options)


def test_bfloat16_is_close_to_float64() -> None:
    exact, batches = tiny_lm("llama"), [tokens((2, 9))]
    op = GGNOperator(tiny_lm("llama", dtype=torch.bfloat16), batches, method="streamed")
    v = torch.randn(op.shape[0])
    assert op.dtype == torch.float32
    assert relative((op @ v).double(), GGNOperator(exact, batches, method="whole") @ v.double()) < 0.05


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("kind", ["ggn", "empirical"])
def test_products_on_a_gpu_are_those_of_float64(kind: str, dtype: torch.dtype, limit: float) -> None:
    """Through the tangent kernel, in forward mode, with the attention outputs recalled in the adjoint sweep."""
    batch = tokens((2, 50))
    exact = make(kind, tiny_lm("llama", head_dim=16), [batch], method="whole")
    op = make(kind, tiny_lm("llama", head_dim=16, dtype=dtype).cuda(), [batch], method="streamed", streaming=SHORT)
    assert op.forward_mode_reason is None
    v = torch.randn(op.shape[0])
    assert relative((op @ v.cuda()).cpu().double(), exact @ v.double()) < limit
