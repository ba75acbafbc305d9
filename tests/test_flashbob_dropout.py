"""The dropout mask: known answers, one mask for all backends and passes, its statistics, where its seed comes from."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from flashbob import blocked, sdpa_bob
from flashbob.dropout import Dropout, philox

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ["reference", "blocked", "triton"]

# Random123's file kat_vectors, philox4x32 with 10 rounds: counter, key, result.
KNOWN = {
    "zeros": ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    "pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN.values(), ids=KNOWN.keys())
def test_philox_gives_its_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], result: tuple[int, ...]
) -> None:
    c0, c1, c2, c3 = (torch.tensor(word) for word in counter)
    assert tuple(int(word) for word in philox((c0, c1, c2, c3), key[0] | key[1] << 32)) == result


def weights(backend: str, dropout_p: float, seed: int | None, *, batch: int = 2, heads: int = 3, n: int = 45) -> Tensor:
    """The mask's factors [B, H, N, N] as a backend's forward applies them: equal weights, one-hot values."""
    dtype = torch.float32 if backend == "triton" else torch.float64
    q = torch.zeros(batch, heads, n, 1, dtype=dtype, device=DEVICE if backend == "triton" else "cpu")
    v = torch.eye(n, dtype=dtype, device=q.device).expand(batch, heads, n, n)
    return n * sdpa_bob(q, q, v, dropout_p=dropout_p, seed=seed, backend=backend)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [0, 7, 2**31, 2**32 - 1, 2**63 + 12345, 2**64 - 1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_applies_the_same_mask(backend: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "TILE_ELEMENTS", 0)
    monkeypatch.setattr(blocked, "MIN_TILE", 7)
    mask = Dropout(0.3, seed, 2)
    whole = mask.factors((2, 3), 0, 45, 0, 45, torch.device("cpu"), torch.float64)
    found = weights(backend, 0.3, seed).cpu().double()
    assert torch.equal(found > 0, whole > 0)
    torch.testing.assert_close(found, whole, rtol=1e-6, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_passes_over_keys_see_the_mask_of_the_passes_over_queries(backend: str) -> None:
    """dv = (factors * P)^T do with do = 1 is the transpose of what the forward applied."""
    dtype, n = (torch.float32 if backend == "triton" else torch.float64), 45
    q = torch.zeros(1, 2, n, 1, dtype=dtype, device=DEVICE if backend == "triton" else "cpu")
    eye = torch.eye(n, dtype=dtype, device=q.device).expand(1, 2, n, n)
    v = eye.clone().requires_grad_()
    o = sdpa_bob(q, q, v, dropout_p=0.4, seed=5, backend=backend)  # type: ignore[arg-type]
    (dv,) = torch.autograd.grad(o, v, eye)
    assert torch.equal(dv.mT > 0, o > 0)
    torch.testing.assert_close(dv.mT, o.detach(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("span", [(0, 16), (3, 9), (8, 11), (5, 45)], ids=str)
def test_a_tile_of_the_mask_is_that_part_of_the_mask(span: tuple[int, int]) -> None:
    mask = Dropout(0.6, 123456789, 2)
    whole = mask.factors((2, 3), 0, 45, 0, 45, torch.device("cpu"), torch.float32)
    rows, columns = (11, 37), span
    tile = mask.factors((2, 3), *rows, *columns, torch.device("cpu"), torch.float32)
    assert torch.equal(tile, whole[:, :, slice(*rows), slice(*columns)])


@pytest.mark.parametrize("p", [0.02, 0.3, 0.5, 0.9])
def test_the_share_of_dropped_weights_is_p(p: float) -> None:
    """Within five standard errors, over the whole mask and within each head; kept weights are divided by 1 - p."""
    factors = Dropout(p, 42, 4).factors((4, 8), 0, 128, 0, 128, torch.device("cpu"), torch.float64)
    dropped = (factors == 0).double()
    for count, shares in ((factors.numel(), dropped.mean()[None]), (128 * 128, dropped.mean((-1, -2)).flatten())):
        assert (shares - p).abs().max() < 5 * math.sqrt(p * (1 - p) / count)
    torch.testing.assert_close(factors[factors > 0], torch.full_like(factors[factors > 0], 1 / (1 - p)))


def test_heads_sequences_queries_keys_and_seeds_have_masks_of_their_own() -> None:
    """Correlations of neighbours vanish, within five standard errors."""
    z = [
        Dropout(0.5, seed, 2).factors((2, 2), 0, 128, 0, 128, torch.device("cpu"), torch.float64) - 1 for seed in (0, 1)
    ]
    pairs = {
        "seed": (z[0], z[1]),
        "sequence": (z[0][0], z[0][1]),
        "head": (z[0][:, 0], z[0][:, 1]),
        "query": (z[0][:, :, 1:], z[0][:, :, :-1]),
        "key": (z[0][..., 1:], z[0][..., :-1]),
        "transposed": (z[0], z[0].mT.roll(1, -1)),
    }
    for name, (a, b) in pairs.items():
        assert (a * b).mean().abs() < 5 / math.sqrt(a.numel()), name


def test_no_seed_draws_one_from_the_default_generator() -> None:
    torch.manual_seed(3)
    first, second = weights("blocked", 0.5, None), weights("blocked", 0.5, None)
    torch.manual_seed(3)
    assert torch.equal(weights("reference", 0.5, None) > 0, first > 0)
    assert not torch.equal(first, second)
    state = torch.get_rng_state()
    weights("blocked", 0.5, 1)
    weights("blocked", 0.0, None)
    assert torch.equal(torch.get_rng_state(), state), "only a call that needs a seed draws one"


def test_one_seed_serves_value_gradient_and_second_derivative() -> None:
    """Derivatives of a call with a drawn seed are those of its own mask, not of another one."""
    q, k, v = (torch.randn(1, 2, 9, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    torch.manual_seed(8)
    results = []
    for backend in ("blocked", "reference"):
        torch.manual_seed(8)
        o = sdpa_bob(q, k, v, dropout_p=0.5, backend=backend)  # type: ignore[arg-type]
        first = torch.autograd.grad(o.sin().sum(), (q, k, v), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), (q, k, v))
        results.append((o.detach(), *first, *second))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


def test_a_dropped_softmax_keeps_its_expectation() -> None:
    """The mean over seeds of the output is the output without dropout, within five standard errors."""
    q, k, v = (torch.randn(1, 1, 6, 4, dtype=torch.float64) for _ in range(3))
    draws = torch.stack([sdpa_bob(q, k, v, dropout_p=0.4, seed=seed, backend="blocked") for seed in range(400)])
    error = (draws.mean(0) - sdpa_bob(q, k, v, backend="reference")).abs()
    assert (error < 5 * draws.std(0) / math.sqrt(400)).all()
    assert (draws.std(0) > 0.05).any()


BATCHED: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Any]]] = {
    "value": lambda f: f,
    "gradient": lambda f: grad(lambda q: f(q).square().sum()),
}


@pytest.mark.parametrize("derive", BATCHED.values(), ids=BATCHED.keys())
def test_mapped_calls_share_the_mask(derive: Callable[[Callable[..., Tensor]], Callable[..., Any]]) -> None:
    """vmap folds into the batch, and still gives what one call after the other gives."""
    q, k = torch.randn(3, 2, 2, 7, 4, dtype=torch.float64), torch.randn(2, 2, 7, 4, dtype=torch.float64)

    def f(backend: str) -> Callable[[Tensor], Any]:
        return derive(lambda x: sdpa_bob(x, k, k, dropout_p=0.5, seed=4, backend=backend))  # type: ignore[arg-type]

    one_by_one = torch.stack([f("reference")(x) for x in q])
    torch.testing.assert_close(vmap(f("blocked"))(q), one_by_one, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(vmap(f("reference"))(q), one_by_one, rtol=1e-10, atol=1e-12)
    nested = vmap(vmap(f("blocked")))(torch.stack([q, -q]))
    torch.testing.assert_close(nested[0], one_by_one, rtol=1e-10, atol=1e-12)


def test_what_vmap_cannot_draw_is_refused() -> None:
    q = torch.randn(3, 1, 1, 4, 2)

    def f(x: Tensor) -> Tensor:
        return sdpa_bob(x, x, x, dropout_p=0.5, backend="blocked")

    with pytest.raises(NotImplementedError, match=r"share their dropout mask; use randomness=.same. or pass a seed"):
        vmap(f, randomness="different")(q)
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(f)(q)
    torch.manual_seed(1)
    same = vmap(f, randomness="same")(q)
    torch.manual_seed(1)
    torch.testing.assert_close(same[0], f(q[0]))
