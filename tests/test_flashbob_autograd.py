"""Differentiation rules: every way that PyTorch has to take a first or second derivative, against the reference."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from flashbob import blocked, fused, kernels, sdpa_bob

# torch's own rules for forward mode are TorchScript, which it warns about when the first of them is used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "window-padded": {"window_size": 2, "key_starts": [1], "key_lengths": [3]},
    "softcap": {"is_causal": True, "softcap": 0.8},
    "dropout": {"dropout_p": 0.4, "seed": 3},
    "bias": {"attn_bias": torch.linspace(-1, 1, 12, dtype=torch.float64).view(1, 1, 3, 4)},
}
every_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
both = pytest.mark.parametrize("backend", ["reference", "blocked"])


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "TILE_ELEMENTS", 0)
    monkeypatch.setattr(blocked, "MIN_TILE", 2)


def tensors(*, heads: int = 2, requires_grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """q [1, heads, 3, 2], k [1, 1, 4, 2], v [1, 1, 4, 1] in float64."""
    shapes = ((1, heads, 3, 2), (1, 1, 4, 2), (1, 1, 4, 1))
    q, k, v = (torch.randn(shape, dtype=torch.float64, requires_grad=requires_grad) for shape in shapes)
    return q, k, v


def attention(backend: str, **options: Any) -> Callable[..., Tensor]:
    return lambda q, k, v: sdpa_bob(q, k, v, **options, backend=backend)  # type: ignore[arg-type]


def scalar(backend: str, **options: Any) -> Callable[..., Tensor]:
    """A nonlinear function of attention, so that both do and its derivative matter."""
    return lambda q, k, v: torch.sin(2 * sdpa_bob(q, k, v, **options, backend=backend)).sum()  # type: ignore[arg-type]


def assert_same(found: Any, exact: Any) -> None:
    torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-11)


@both
@every_option
def test_gradcheck(options: dict[str, Any], backend: str) -> None:
    assert gradcheck(
        attention(backend, **options),
        tensors(requires_grad=True),
        check_forward_ad=True,
        check_batched_grad=True,
        check_batched_forward_grad=False,
        check_undefined_grad=True,
        fast_mode=backend == "reference",
    )


@both
@every_option
def test_gradgradcheck(options: dict[str, Any], backend: str) -> None:
    assert gradgradcheck(
        attention(backend, **options),
        tensors(requires_grad=True),
        check_fwd_over_rev=True,
        check_rev_over_rev=True,
        check_batched_grad=True,
        check_undefined_grad=True,
        fast_mode=backend == "reference",
    )


def test_gradgradcheck_through_the_fused_forward() -> None:
    q, k, v = (torch.randn(1, 1, 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    assert fused.CPU is not None
    assert gradcheck(attention("blocked", is_causal=True), (q, k, v), check_forward_ad=True)
    assert gradgradcheck(attention("blocked", is_causal=True), (q, k, v), check_fwd_over_rev=True)


TRANSFORMS: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Any]]] = {
    "grad": lambda f: grad(f, (0, 1, 2)),
    "jacrev": lambda f: jacrev(f, (0, 1, 2)),
    "jacfwd": lambda f: jacfwd(f, (0, 1, 2)),
    "hessian": lambda f: hessian(f, (0, 1, 2)),
    "jacfwd-of-jacrev": lambda f: jacfwd(jacrev(f, (0, 1, 2)), (0, 1, 2)),
    "jacrev-of-jacrev": lambda f: jacrev(jacrev(f, (0, 1, 2)), (0, 1, 2)),
    "jacrev-of-jacfwd": lambda f: jacrev(jacfwd(f, (0, 1, 2)), (0, 1, 2)),
    "jacfwd-of-grad": lambda f: jacfwd(grad(f, (0, 1, 2)), (0, 1, 2)),
    "grad-of-a-gradient's-norm": lambda f: grad(lambda *x: sum(g.square().sum() for g in grad(f, (0, 1, 2))(*x))),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
@every_option
def test_transforms_of_torch_func(options: dict[str, Any], transform: Callable[..., Any]) -> None:
    x = tensors()
    assert_same(transform(scalar("blocked", **options))(*x), transform(scalar("reference", **options))(*x))


@every_option
def test_jacobians_of_the_output_itself(options: dict[str, Any]) -> None:
    x = tensors(heads=1)
    for jacobian in (jacrev, jacfwd):
        found, exact = (jacobian(attention(b, **options), (0, 1, 2))(*x) for b in ("blocked", "reference"))
        assert_same(found, exact)
    found, exact = (jacrev(jacrev(attention(b, **options)))(*x) for b in ("blocked", "reference"))
    assert_same(found, exact)


@every_option
def test_vjp_and_jvp(options: dict[str, Any]) -> None:
    x, direction = tensors(), tensors()
    results = []
    for backend in ("blocked", "reference"):
        o, pull = vjp(attention(backend, **options), *x)
        results.append((o, pull(torch.ones_like(o)), jvp(attention(backend, **options), x, direction)))
    assert_same(*results)


@every_option
@pytest.mark.parametrize("moving", [(0,), (1,), (2,), (0, 2)], ids=["q", "k", "v", "q-and-v"])
def test_derivatives_in_some_arguments_only(options: dict[str, Any], moving: tuple[int, ...]) -> None:
    """Missing upstream gradients and tangents count as zero."""
    x = tensors()

    def hessian_of(backend: str) -> Any:
        return hessian(scalar(backend, **options), moving)(*x), jacrev(jacfwd(scalar(backend, **options), moving))(*x)

    assert_same(hessian_of("blocked"), hessian_of("reference"))
    leaves = [t.clone().requires_grad_(i in moving) for i, t in enumerate(x)]
    results = []
    for backend in ("blocked", "reference"):
        (first,) = torch.autograd.grad(scalar(backend, **options)(*leaves), leaves[moving[0]], create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), leaves[moving[0]]))
    assert_same(*results)


@every_option
def test_vmap_over_every_place(options: dict[str, Any]) -> None:
    """Mapped in some arguments only, along other dimensions than the first, and twice."""
    q, k, v = (torch.randn(4, *t.shape, dtype=torch.float64) for t in tensors())
    for in_dims, x in [
        ((0, 0, 0), (q, k, v)),
        ((0, None, None), (q, k[0], v[0])),
        ((None, 2, None), (q[0], k.movedim(0, 2), v[0])),
        ((4, None, 1), (q.movedim(0, 4), k[0], v.movedim(0, 1))),
    ]:
        for derive in (lambda f: f, lambda f: grad(lambda *t: f(*t).sin().sum(), (0, 1, 2))):
            found, exact = (vmap(derive(attention(b, **options)), in_dims)(*x) for b in ("blocked", "reference"))
            assert_same(found, exact)
    nested = [
        vmap(vmap(attention(b, **options), (0, None, 0)), (None, 0, None))(q, k, v) for b in ("blocked", "reference")
    ]
    assert_same(*nested)


def test_vmap_over_padding() -> None:
    q, k, v = tensors()
    lengths = torch.tensor([[4], [0], [2]])

    def padded(backend: str) -> Callable[[Tensor], Tensor]:
        return lambda n: sdpa_bob(q, k, v, key_lengths=n, backend=backend)  # type: ignore[arg-type]

    one_by_one = torch.stack([padded("reference")(n) for n in lengths])
    assert_same(vmap(padded("blocked"))(lengths), one_by_one)


def test_padding_is_checked_under_vmap() -> None:
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"key_lengths must lie in 0..4 .* got \[\[4\], \[5\]\]"):
        vmap(lambda n: sdpa_bob(q, k, v, key_lengths=n))(torch.tensor([[4], [5]]))


@pytest.mark.parametrize("square", [True, False], ids=["fused", "blocked"])
def test_vmap_over_nothing(square: bool) -> None:
    """A mapped dimension of size 0, through value, gradient and Hessian."""
    q, k, v = (torch.randn(1, 2, 3, 2, dtype=torch.float64) for _ in range(3))
    mapped = torch.randn(0, *q.shape, dtype=torch.float64, requires_grad=True)

    def f(x: Tensor) -> Tensor:
        return sdpa_bob(x, k, v, is_causal=square, dropout_p=0.0 if square else 0.3, seed=1)

    out = vmap(f)(mapped)
    assert out.shape == mapped.shape
    assert torch.autograd.grad(out.sum(), mapped)[0].shape == mapped.shape
    assert vmap(hessian(lambda x: f(x).square().sum()))(mapped).shape == (0, *q.shape, *q.shape)


@pytest.mark.parametrize("backend", ["blocked", "triton"])
def test_mapped_calls_are_folded_as_far_as_a_grid_reaches(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five calls of one sequence and two heads, under a limit of four: two, two and one."""
    own = pytest.importorskip("flashbob.kernels.launch") if backend == "triton" else blocked
    if backend == "triton" and not own.INTERPRETED:
        pytest.skip("interprets the kernels")
    sizes: dict[str, list[int]] = {}

    def recorded(name: str, compute: Callable[..., Any]) -> Callable[..., Any]:
        return lambda q, *rest: sizes.setdefault(name, []).append(q.shape[0] * q.shape[1]) or compute(q, *rest)

    for name in ("forward", "backward", "double_backward", "tangent"):
        monkeypatch.setattr(own, name, recorded(name, getattr(own, name)))
    monkeypatch.setattr(kernels, "MAX_GRID", 4)
    q, k, v = (t.float() for t in tensors())
    many = torch.randn(5, *q.shape)
    results = []
    for b in (backend, "reference"):
        leaf = q.clone().requires_grad_()
        first = torch.autograd.grad(scalar(b)(leaf, k, v), leaf, create_graph=True)
        results.append(
            (
                vmap(grad(scalar(b)), (0, None, None))(many, k, v),
                vmap(lambda u, b=b: jvp(lambda x: attention(b)(x, k, v), (q,), (u,))[1])(many),
                torch.autograd.grad(first, leaf, many[None].unbind(0), is_grads_batched=True)[0],
            )
        )
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    assert sizes["forward"][:4] == [2, 4, 4, 2]
    assert set(sizes) == {"forward", "backward", "double_backward", "tangent"}
    assert max(max(seen) for seen in sizes.values()) == 4


def test_forward_mode_over_a_bias_is_refused() -> None:
    q, k, v = tensors()
    bias = torch.zeros(3, 4, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="forward mode over attn_bias"):
        jvp(lambda b: sdpa_bob(q, k, v, attn_bias=b), (bias,), (bias,))
    with pytest.raises(NotImplementedError, match="forward mode over attn_bias"):
        jvp(lambda q, b: sdpa_bob(q, k, v, attn_bias=b), (q, bias), (q, bias))


@every_option
def test_hessian_vector_products_agree_however_they_are_taken(options: dict[str, Any]) -> None:
    x, direction = tensors(), tensors()
    leaves = [t.clone().requires_grad_() for t in x]
    f = scalar("blocked", **options)
    first = torch.autograd.grad(f(*leaves), leaves, create_graph=True)
    reverse_over_reverse = torch.autograd.grad(first, leaves, direction)
    forward_over_reverse = jvp(grad(f, (0, 1, 2)), x, direction)[1]
    reverse_over_forward = grad(lambda *t: jvp(f, t, direction)[1], (0, 1, 2))(*x)
    exact = jvp(grad(scalar("reference", **options), (0, 1, 2)), x, direction)[1]
    for found in (reverse_over_reverse, forward_over_reverse, reverse_over_forward):
        assert_same(found, exact)


def test_dual_numbers_through_backward() -> None:
    """Forward-over-reverse with torch.autograd.forward_ad instead of torch.func."""
    x, direction = tensors(), tensors()
    results = []
    for backend in ("blocked", "reference"):
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(t.clone().requires_grad_(), u) for t, u in zip(x, direction, strict=True)]
            gradient = torch.autograd.grad(scalar(backend)(*duals), duals, create_graph=True)
            results.append([forward_ad.unpack_dual(g).tangent.detach() for g in gradient])
    assert_same(*results)


def test_a_module_with_attention_inside() -> None:
    """hessian through functional_call: attention between linear layers, all parameters at once."""

    class Model(torch.nn.Module):
        def __init__(self, backend: str) -> None:
            super().__init__()
            self.backend = backend
            self.qkv = torch.nn.Linear(4, 12, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(1, 5, 3, 2, 2).permute(2, 0, 3, 1, 4)
            return sdpa_bob(q, k, v, is_causal=True, backend=self.backend).square().sum()  # type: ignore[arg-type]

    x = torch.randn(5, 4, dtype=torch.float64)
    models = [Model(backend) for backend in ("blocked", "reference")]
    models[1].load_state_dict(models[0].state_dict())
    found, exact = (hessian(lambda p, m=m: functional_call(m, p, x))(dict(m.named_parameters())) for m in models)
    assert_same(found, exact)


def test_first_backward_alone_keeps_no_graph() -> None:
    x = tensors(requires_grad=True)
    for gradient in torch.autograd.grad(sdpa_bob(*x, backend="blocked").sum(), x):
        assert not gradient.requires_grad
    with torch.no_grad():
        assert not sdpa_bob(*x, backend="blocked").requires_grad


def test_second_backward_does_not_repeat_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output enters the first backward detached: attached, its graph would run once more on a zero gradient."""
    calls = []
    backward = blocked.backward
    monkeypatch.setattr(blocked, "backward", lambda *args: calls.append(1) or backward(*args))
    x = tensors(requires_grad=True)
    do = torch.randn(1, 2, 3, 1, dtype=torch.float64)
    first = torch.autograd.grad(sdpa_bob(*x, backend="blocked"), x, do, create_graph=True)
    torch.autograd.grad(first, x, [torch.randn_like(g) for g in first])
    assert len(calls) == 1


THIRD: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Any]]] = {
    "reverse-reverse-reverse": lambda f: jacrev(jacrev(jacrev(f))),
    "forward-reverse-reverse": lambda f: jacfwd(jacrev(jacrev(f))),
    "reverse-forward-reverse": lambda f: jacrev(jacfwd(jacrev(f))),
    "reverse-reverse-forward": lambda f: jacrev(jacrev(jacfwd(f))),
    "forward-forward": lambda f: jacfwd(jacfwd(f)),
}


@pytest.mark.parametrize("transform", THIRD.values(), ids=THIRD.keys())
def test_what_is_not_supported_raises(transform: Callable[..., Any]) -> None:
    x = tensors(heads=1)
    with pytest.raises(NotImplementedError, match=r"third derivative|forward mode over forward mode"):
        transform(scalar("blocked"))(*x)
    transform(scalar("reference"))(*x)


@pytest.mark.parametrize("last", [0, 1, 2], ids=["q", "k", "v"])
def test_a_third_derivative_raises_instead_of_returning_zero(last: int) -> None:
    x = tensors(requires_grad=True)
    do = torch.randn(1, 2, 3, 1, dtype=torch.float64, requires_grad=True)
    first = torch.autograd.grad(sdpa_bob(*x, backend="blocked"), x, do, create_graph=True)
    directions = [torch.randn_like(g, requires_grad=True) for g in first]
    second = torch.autograd.grad(first, (*x, do), directions, create_graph=True)
    for g in second:
        assert g.requires_grad
        for leaf in (x[last], do, directions[0]):
            with pytest.raises(NotImplementedError, match="third derivative of attention is not implemented"):
                torch.autograd.grad(g.sum(), leaf, retain_graph=True)
