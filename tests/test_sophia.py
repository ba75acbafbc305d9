"""SophiaH: its steps are those of the algorithm, its estimates are unbiased, and its state survives."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from tiny_causal_lms import VOCABULARY, tiny_lm
from torch import Tensor, nn

from curvature import CausalLMLoss, HessianOperator
from curvature.sophia import Curvature, SophiaH, hutchinson_diagonal, signs


class Restated:
    """The algorithm in scalar Python floats, which are float64, one weight at a time."""

    def __init__(self, weights: list[float], curvature: str = "diagonal", **settings: float) -> None:
        self.weights, self.settings, self.kind = list(weights), settings, curvature
        self.m, self.h, self.v, self.n = *([0.0] * len(weights) for _ in range(3)), 0

    def curvature(self, diagonal: list[float]) -> None:
        beta2 = self.settings["beta2"]
        if self.kind == "diagonal":
            self.h = [beta2 * h + (1 - beta2) * d for h, d in zip(self.h, diagonal, strict=True)]
            return
        self.n += 1
        self.v = [beta2 * v + (1 - beta2) * d * d for v, d in zip(self.v, diagonal, strict=True)]
        self.h = [math.sqrt(v / (1 - beta2**self.n)) for v in self.v]

    def step(self, gradient: list[float]) -> None:
        s = self.settings
        for i, g in enumerate(gradient):
            self.m[i] = s["beta1"] * self.m[i] + (1 - s["beta1"]) * g
            ratio = self.m[i] / max(s["gamma"] * self.h[i], s["eps"])
            clipped = min(max(ratio, -s["rho"]), s["rho"])
            self.weights[i] = self.weights[i] - s["lr"] * s["weight_decay"] * self.weights[i] - s["lr"] * clipped


SETTINGS = {"lr": 0.03, "beta1": 0.9, "beta2": 0.7, "gamma": 0.2, "rho": 0.8, "eps": 1e-8, "weight_decay": 0.1}


def optimizer_of(parameters: Any, interval: int = 3, curvature: Curvature = "diagonal", **changes: float) -> SophiaH:
    s = SETTINGS | changes
    return SophiaH(
        parameters,
        lr=s["lr"],
        betas=(s["beta1"], s["beta2"]),
        gamma=s["gamma"],
        rho=s["rho"],
        eps=s["eps"],
        weight_decay=s["weight_decay"],
        interval=interval,
        curvature=curvature,
    )


def weights(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]


def fake(parameters: list[nn.Parameter], step: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [scale * torch.randn(p.shape, dtype=p.dtype, generator=generator) for p in parameters]


def flat(tensors: Any) -> list[float]:
    return torch.cat([t.detach().reshape(-1) for t in tensors]).tolist()


def advance(optimizer: SophiaH, steps: range) -> None:
    """Steps with made-up gradients and estimates that depend on the number of the step alone."""
    for step in steps:
        parameters = [p for p in optimizer.parameters if isinstance(p, nn.Parameter)]
        if optimizer.curvature_due:
            optimizer.update_curvature(fake(parameters, 1000 + step, 4.0))
        for p, g in zip(parameters, fake(parameters, step), strict=True):
            p.grad = g
        optimizer.step()


@pytest.mark.parametrize("curvature", get_args(Curvature))
def test_steps_are_those_of_the_algorithm(curvature: Curvature) -> None:
    parameters = weights((3, 4), (5,), ())
    plain = Restated(flat(parameters), curvature, **SETTINGS)
    optimizer = optimizer_of(parameters, curvature=curvature)
    clipped = 0
    for step in range(12):
        assert optimizer.curvature_due == (step % 3 == 0)
        if optimizer.curvature_due:
            estimate = fake(parameters, 100 + step, 8.0)
            optimizer.update_curvature(estimate)
            plain.curvature(flat(estimate))
        gradient = fake(parameters, step)
        for p, g in zip(parameters, gradient, strict=True):
            p.grad = g
        optimizer.step()
        plain.step(flat(gradient))
        torch.testing.assert_close(flat(parameters), plain.weights, rtol=1e-12, atol=1e-14)
        at_bound = [
            abs(m) >= SETTINGS["rho"] * max(SETTINGS["gamma"] * h, 1e-8) for m, h in zip(plain.m, plain.h, strict=True)
        ]
        assert optimizer.bounded_share() == pytest.approx(sum(at_bound) / len(at_bound))
        clipped += sum(at_bound)
    assert 0 < clipped < 12 * len(plain.m), "the case holds updates on both sides of the bound"


def test_a_model_trained_by_hand_follows_the_restatement() -> None:
    """Gradients and Hessian samples of a real loss, taken by the operator in the restatement and by the graph here."""
    model = tiny_lm("gpt2")
    batch = {"input_ids": torch.randint(0, VOCABULARY, (2, 12))}
    other = copy.deepcopy(model)
    loss = CausalLMLoss()
    optimizer = optimizer_of(model.parameters(), interval=2)
    plain = Restated(flat(other.parameters()), **SETTINGS)

    def mean() -> Tensor:
        total, tokens = loss(model, batch)
        return total / tokens

    first = float(mean().detach())
    for step in range(4):
        operator = HessianOperator(other, [batch], method="whole")
        if optimizer.curvature_due:
            optimizer.update_curvature(hutchinson_diagonal(mean(), optimizer.parameters, seed=step))
            z = torch.cat([s.reshape(-1) for s in signs(other.parameters(), step)])
            plain.curvature((z * (operator @ z)).tolist())
        optimizer.zero_grad()
        mean().backward()
        optimizer.step()
        plain.step(operator.gradient().tolist())
        with torch.no_grad():
            rest = torch.tensor(plain.weights, dtype=torch.float64)
            for p in other.parameters():
                piece, rest = rest[: p.numel()], rest[p.numel() :]
                p.copy_(piece.view_as(p))
        torch.testing.assert_close(flat(model.parameters()), plain.weights, rtol=1e-8, atol=1e-10)
    assert float(mean().detach()) < first


def test_the_norms_of_the_rows_of_a_hessian() -> None:
    """Of a quadratic form whose diagonal is zero, so that only what lies beside it can divide."""
    hessian = torch.tensor([[0.0, 3.0, 4.0], [3.0, 0.0, 0.5], [4.0, 0.5, 0.0]], dtype=torch.float64)
    x = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = SophiaH([x], betas=(0.0, 0.999), gamma=1.0, lr=1.0, weight_decay=0.0, curvature="row-norm")
    for seed in range(400):
        optimizer.update_curvature(hutchinson_diagonal(x @ hessian @ x / 2, [x], seed=seed))
    x.grad = torch.ones_like(x)
    optimizer.step()
    torch.testing.assert_close(-1 / x.detach(), hessian.norm(dim=1), rtol=0.1, atol=0.0)


def test_groups_have_settings_of_their_own() -> None:
    a, b = weights((4,), (3,))
    plain = [Restated(flat([a]), **SETTINGS), Restated(flat([b]), **(SETTINGS | {"weight_decay": 0.0, "lr": 0.5}))]
    optimizer = optimizer_of([{"params": [a]}, {"params": [b], "weight_decay": 0.0, "lr": 0.5}])
    for step in range(4):
        if optimizer.curvature_due:
            estimate = fake([a, b], 50 + step)
            optimizer.update_curvature(estimate)
            for one, e in zip(plain, estimate, strict=True):
                one.curvature(flat([e]))
        a.grad, b.grad = fake([a, b], step)
        for one, p in zip(plain, (a, b), strict=True):
            one.step(flat([p.grad]))
        optimizer.step()
    for one, p in zip(plain, (a, b), strict=True):
        torch.testing.assert_close(flat([p]), one.weights, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("curvature", get_args(Curvature))
def test_an_eps_that_the_dtype_cannot_hold_divides_all_the_same(curvature: Curvature) -> None:
    x = nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = SophiaH([x], lr=0.5, weight_decay=0.0, curvature=curvature)
    x.grad = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float16)
    optimizer.step()
    assert x.tolist() == [0.5, 1.0, 1.5]
    assert optimizer.bounded_share() == pytest.approx(2 / 3)


@pytest.mark.parametrize("through_a_file", [False, True], ids=["in-memory", "through-a-file"])
@pytest.mark.parametrize("curvature", get_args(Curvature))
def test_a_restored_state_goes_on_to_the_last_bit(curvature: Curvature, through_a_file: bool, tmp_path: Any) -> None:
    parameters = weights((3, 4), (5,))
    optimizer = optimizer_of(parameters, curvature=curvature)
    advance(optimizer, range(4))  # not at an estimate, so that the count of steps matters
    kept = [nn.Parameter(p.detach().clone()) for p in parameters]
    state = copy.deepcopy(optimizer.state_dict())
    if through_a_file:
        torch.save(state, tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt", weights_only=True)
    restored = optimizer_of(kept, interval=99, lr=9.0)
    restored.load_state_dict(state)
    assert not restored.curvature_due
    assert optimizer_of(kept).bounded_share() == 0.0
    advance(optimizer, range(4, 10))
    advance(restored, range(4, 10))
    assert all(torch.equal(p, q) for p, q in zip(parameters, kept, strict=True))


def test_parameters_without_a_gradient_or_an_estimate() -> None:
    a, b = weights((2,), (2,))
    before = b.detach().clone()
    optimizer = optimizer_of([a, b])
    optimizer.update_curvature([torch.ones(2, dtype=torch.float64), None])
    optimizer.update_curvature([None, None])
    a.grad = torch.ones_like(a)
    optimizer.step()
    assert torch.equal(b, before)
    expected = (1 - SETTINGS["beta2"]) * SETTINGS["beta2"]
    torch.testing.assert_close(optimizer.state[a]["hessian"], torch.full((2,), expected, dtype=torch.float64))
    assert torch.equal(optimizer.state[b]["hessian"], torch.zeros(2, dtype=torch.float64))


def test_a_closure_is_called_with_gradients_on() -> None:
    (a,) = weights((3,))
    optimizer = optimizer_of([a])

    def closure() -> float:
        optimizer.zero_grad()
        loss = (a**2).sum()
        loss.backward()
        return float(loss.detach())

    expected = float((a.detach() ** 2).sum())
    assert optimizer.step(closure) == pytest.approx(expected)


def test_the_estimate_is_unbiased_within_its_standard_error() -> None:
    torch.manual_seed(3)
    a = torch.randn(6, 6, dtype=torch.float64)
    matrix = a + a.T
    x, y = (nn.Parameter(torch.randn(3, dtype=torch.float64)) for _ in range(2))
    samples = []
    for seed in range(600):
        v = torch.cat([x, y])
        samples.append(torch.cat(hutchinson_diagonal(0.5 * v @ matrix @ v, [x, y], seed=seed)))
    stacked = torch.stack(samples)
    stderr = stacked.std(0) / math.sqrt(len(samples))
    assert bool(((stacked.mean(0) - matrix.diagonal()).abs() < 4 * stderr).all())
    off = matrix - torch.diag(matrix.diagonal())
    torch.testing.assert_close(stacked.var(0), (off**2).sum(1), rtol=0.3, atol=0.0)


def test_products_that_are_each_others_directions_are_kept_apart() -> None:
    """The product of x y with a direction is that direction itself, the other way round."""
    x, y = weights((4,), (4,))
    zx, zy = signs([x, y], 5)
    dx, dy = hutchinson_diagonal((x * y).sum(), [x, y], seed=5)
    assert dx is not None
    assert dy is not None
    assert torch.equal(dx, zx * zy)
    assert torch.equal(dy, zx * zy)


def test_an_estimate_leaves_gradients_alone_and_knows_what_is_linear() -> None:
    x, y = weights((4,), (2,))
    x.grad = torch.ones_like(x)
    found = hutchinson_diagonal((x**3).sum() + y.sum(), [x, y], seed=0)
    assert found[1] is None
    torch.testing.assert_close(found[0], 6 * x.detach())
    assert torch.equal(x.grad, torch.ones_like(x))
    assert y.grad is None
    assert hutchinson_diagonal(y.sum(), [y], seed=0) == [None]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"lr": -1.0}, "lr must be finite and at least 0, got -1.0"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\] must be finite and in \[0, 1\), got 1.0"),
        ({"betas": (0.9, -0.1)}, r"betas\[1\]"),
        ({"gamma": 0.0}, "gamma must be finite and above 0"),
        ({"rho": math.nan}, "rho must be finite"),
        ({"eps": 0.0}, "eps must be finite and above 0"),
        ({"weight_decay": -0.1}, "weight_decay must be finite and at least 0"),
        ({"curvature": "trace"}, "curvature must be one of diagonal, row-norm, got 'trace'"),
        ({"interval": 0}, "interval must be at least 1 step, got 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_out_of_range_are_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        SophiaH(weights((2,)), **change)


@pytest.mark.parametrize(
    ("change", "told"), [({"gamma": -1.0}, "gamma"), ({"interval": 5}, "the same in all groups.*; got 3 and 5")]
)
def test_a_group_out_of_range_is_not_added(change: dict[str, Any], told: str) -> None:
    optimizer = optimizer_of(weights((2,)), interval=3)
    with pytest.raises(ValueError, match=told):
        optimizer.add_param_group({"params": weights((3,)), **change})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match=told):
        optimizer_of([{"params": weights((2,))}, {"params": weights((2,)), **change}])


def unlike(optimizer: SophiaH, case: str) -> None:
    ones = torch.ones(2, dtype=torch.float64)
    given = {"number": [ones], "shape": [ones, ones], "not-finite": [ones, ones.new_full((3,), math.nan)]}
    optimizer.update_curvature(given[case])


@pytest.mark.parametrize(
    ("case", "kind", "told"),
    [
        ("number", ValueError, "expected 2 tensors, one per parameter, got 1"),
        ("shape", ValueError, r"diagonal\[1\]: expected shape \(3,\), got \(2,\)"),
        ("not-finite", FloatingPointError, "not finite"),
    ],
)
def test_an_estimate_that_does_not_fit_is_refused_whole(case: str, kind: type[Exception], told: str) -> None:
    optimizer = optimizer_of(weights((2,), (3,)))
    with pytest.raises(kind, match=told):
        unlike(optimizer, case)
    assert not optimizer.state


def of_a_loss(change: Callable[[Tensor], Tensor]) -> None:
    (x,) = weights((3,))
    hutchinson_diagonal(change(x), [x], seed=0)


def test_a_loss_without_a_hessian_is_refused() -> None:
    with pytest.raises(FloatingPointError, match="loss: it is nan"):
        of_a_loss(lambda x: (x * math.nan).sum())
    q = torch.randn(1, 1, 8, 8, requires_grad=True)
    loss = nn.functional.scaled_dot_product_attention(q, q, q).square().sum()
    with pytest.raises(NotImplementedError, match="no second derivative"):
        hutchinson_diagonal(loss, [q], seed=0)


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = SophiaH(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(NotImplementedError, match="dense gradients"):
        optimizer.step()
