"""Absent parts of a direction and gradients that nobody wants: right answers, without the products they would cost."""

import itertools
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flashbob import blocked, fused, kernels, sdpa_bob
from flashbob.autograd import AttentionBackward
from flashbob.dropout import Dropout
from flashbob.geometry import Geometry
from flashbob.kernels import launch
from flashbob.plan import FirstOrder, Plan, SecondOrder, Wanted
from tests.attention_cases import Case, Inputs, attend, errors, inputs, outputs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Case("small", (2, 1), (9, 9), (8, 8), 1, {"is_causal": True})
LABELS = ("gq", "gk", "gv", "gdo")
GIVEN = [given for given in itertools.product((True, False), repeat=3) if any(given)]
WANTED = [Wanted(*flags) for flags in itertools.product((True, False), repeat=4)]
PARTS = ("uq", "uk", "uv")
EVERYTHING = Case(
    "everything",
    (2, 1),
    (9, 19),
    (8, 12),
    options={"window_size": 14, "softcap": 1.2, "key_lengths": (17,), "dropout_p": 0.2, "seed": 11},
    bias=(1, 2),
    holes=True,
)


def _id(flags: Any) -> str:
    return "".join(name if flag else "-" for name, flag in zip("qkvo", flags, strict=False))


every_part = pytest.mark.parametrize("given", GIVEN, ids=_id)
backends = pytest.mark.parametrize("backend", ["blocked", "triton"])


def zeroed(x: Inputs, given: tuple[bool, ...]) -> Inputs:
    """The inputs with zeros in the direction's absent parts."""
    zeros = {n: torch.zeros_like(getattr(x, n)) for n, flag in zip(PARTS, given, strict=True) if not flag}
    return Inputs(**{**vars(x), **zeros})


@backends
@every_part
def test_absent_parts_are_zeros(given: tuple[bool, ...], backend: str) -> None:
    dtype, device = (torch.float32, DEVICE) if backend == "triton" else (torch.float64, "cpu")
    x = inputs(EVERYTHING, dtype, device)
    exact = outputs(EVERYTHING, zeroed(x.to(torch.float64), given), "reference")
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v, x.do)]
    first = torch.autograd.grad(attend(EVERYTHING, x, backend), leaves[:3], x.do, create_graph=True)
    chosen, directions = zip(
        *((g, getattr(x, n)) for g, n, flag in zip(first, PARTS, given, strict=True) if flag), strict=True
    )
    found = dict(zip(LABELS, torch.autograd.grad(chosen, leaves, directions), strict=True))
    bound = 1e-5 if backend == "triton" else 1e-12
    assert max(errors(found, {label: exact[label] for label in found}).values()) < bound


def _call(backend: str, given: tuple[bool, ...], wanted: Wanted, *, plain: bool) -> tuple[Any, ...]:
    """A backend's double backward itself, over one tile."""
    dtype = torch.float32 if backend == "triton" else torch.float64
    draw = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=dtype).to(DEVICE if backend == "triton" else "cpu")

    q, k, v, do, uq, uk, uv = (tensor(1, 1, 16, 16) for _ in range(7))
    own = kernels if backend == "triton" else blocked
    plan = Plan(
        Geometry(16, 16),
        0.25,
        None if plain else 1.5,
        cast(FirstOrder, own),
        cast(SecondOrder, own),
        None if plain else Dropout(0.25, 1, 1),
    )
    o, lse = own.forward(q, k, v, None, None, plan)
    dq, _, _ = own.backward(q, k, v, o, lse, do, None, None, plan)
    parts = [u if flag else None for u, flag in zip((uq, uk, uv), given, strict=True)]
    counted = _Products()
    with counted:
        found = own.double_backward(q, k, v, o, lse, do, dq, *parts, None, None, plan, wanted)
    return found, counted.count


class _Products(TorchDispatchMode):
    """Counts matrix products: of PyTorch, and of Triton's interpreter."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Any:
        from triton.runtime.interpreter import InterpreterBuilder

        self.patch = pytest.MonkeyPatch()
        dot = InterpreterBuilder.create_dot

        def counted(builder: Any, *args: Any) -> Any:
            self.count += 1
            return dot(builder, *args)

        self.patch.setattr(InterpreterBuilder, "create_dot", counted)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.patch.undo()
        super().__exit__(*error)


def test_a_whole_product_costs_eighteen_tile_products() -> None:
    assert launch.products(True, True, True, Wanted()) == 18


@every_part
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "softcap-dropout"])
def test_blocked_computes_the_wanted_and_nothing_else(given: tuple[bool, ...], plain: bool) -> None:
    whole, _ = _call("blocked", given, Wanted(), plain=plain)
    for wanted in WANTED:
        found, count = _call("blocked", given, wanted, plain=plain)
        for x, exact, asked in zip(found, whole, wanted, strict=True):
            assert (x is not None) == asked
            if x is not None:
                torch.testing.assert_close(x, exact, rtol=1e-12, atol=1e-13)
        if not (wanted.q or wanted.k):  # only then a pass is replaced by the tangent, or left out
            continue
        assert count == launch.products(*given, wanted), (given, wanted)


@pytest.mark.skipif(DEVICE == "cuda", reason="counts products in Triton's interpreter; TRITON_INTERPRET is not set")
@every_part
def test_triton_computes_the_wanted_and_nothing_else(given: tuple[bool, ...]) -> None:
    whole, _ = _call("triton", given, Wanted(), plain=True)
    for wanted in (Wanted(), *(Wanted(*(label == one for label in LABELS)) for one in LABELS)):
        found, count = _call("triton", given, wanted, plain=True)
        for x, exact, asked in zip(found, whole, wanted, strict=True):
            assert (x is not None) == asked
            if x is not None:
                torch.testing.assert_close(x, exact, rtol=1e-5, atol=1e-5)
        if wanted.q or wanted.k:
            assert count == launch.products(*given, wanted), (given, wanted)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, bool]]]:
    """The kernels that are launched, with what they are given and asked for."""
    launched = []
    original = launch._launch

    def recorded(which: Any, *args: Any, **parts: bool) -> None:
        launched.append((which, parts))
        original(which, *args, **parts)

    monkeypatch.setattr(launch, "_launch", recorded)
    monkeypatch.setattr(fused, "find", lambda *_: None)
    return launched


NEEDED = {
    "do": ["tangent"],
    "q": ["row"],
    "q-do": ["row"],
    "k": ["row", "column"],
    "v": ["row", "column"],
    "q-k-v-do": ["row", "column"],
}


@pytest.mark.parametrize(("moving", "expected"), NEEDED.items(), ids=NEEDED.keys())
def test_passes_that_nobody_needs_do_not_run(
    passes: list[tuple[str, dict[str, bool]]], moving: str, expected: list[str]
) -> None:
    x = inputs(SMALL, torch.float32, DEVICE)
    q, k, v, do = (getattr(x, n).requires_grad_(n in moving.split("-")) for n in ("q", "k", "v", "do"))
    plan = Plan(Geometry(9, 9, 0, None, 0), 8**-0.5, None, cast(FirstOrder, kernels), cast(SecondOrder, kernels))
    o, lse = kernels.forward(q.detach(), k.detach(), v.detach(), None, None, plan)
    first = AttentionBackward.apply(q, k, v, o, lse, do, None, None, plan)
    passes.clear()
    torch.autograd.grad(first, [t for t in (q, k, v, do) if t.requires_grad], (x.uq, x.uk, x.uv))
    assert [which for which, _ in passes] == expected


def test_a_gradient_that_enters_alone_brings_no_zeros(passes: list[tuple[str, dict[str, bool]]]) -> None:
    x = inputs(SMALL, torch.float32, DEVICE)
    q, k, v = (t.requires_grad_() for t in (x.q, x.k, x.v))
    first = torch.autograd.grad(sdpa_bob(q, k, v, is_causal=True, backend="triton"), (q, k, v), x.do, create_graph=True)
    passes.clear()
    torch.autograd.grad(first[1], (q, k, v), x.uk)
    (row, column) = passes
    assert row[0] == "row"
    assert column[0] == "column"
    for _, parts in passes:
        assert (parts["HAS_UQ"], parts["HAS_UK"], parts["HAS_UV"]) == (False, True, False)
    assert not row[1]["WANT_DO"], "x.do requires no grad"
    passes.clear()
    torch.func.jvp(lambda t: sdpa_bob(q.detach(), t, v.detach(), backend="triton"), (k.detach(),), (x.uk,))
    assert [(which, parts) for which, parts in passes if which == "tangent"] == [
        ("tangent", {"HAS_UQ": False, "HAS_UK": True, "HAS_UV": False})
    ]


@backends
def test_the_gradient_of_the_values_is_zero_without_a_direction_of_scores(backend: str) -> None:
    """dv is linear in do and does not depend on v: a zero that autograd is given, not one it has to guess."""
    x = inputs(Case("v", (1, 1), (7, 7), (8, 8)), torch.float32, DEVICE if backend == "triton" else "cpu")
    v = x.v.requires_grad_()
    q = x.q.requires_grad_()
    o = sdpa_bob(q, x.k, v, backend=backend)  # type: ignore[arg-type]
    dq, dv = torch.autograd.grad(o, (q, v), x.do, create_graph=True)
    gq, gv = torch.autograd.grad(dv, (q, v), x.uv, retain_graph=True)
    assert torch.equal(gv, torch.zeros_like(v))
    assert gq.abs().max() > 0
    assert torch.autograd.grad(dq, v, x.uq)[0].abs().max() > 0
