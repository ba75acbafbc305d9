"""Recalled attention calls: the same derivatives as computed ones, with nothing computed twice."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from flashbob import blocked, fused, sdpa_bob
from flashbob.recall import Recall


def tensors(count: int) -> list[Tensor]:
    return [torch.randn(1, 2, 6, 4, dtype=torch.float64) for _ in range(count)]


def derivatives(context: Any, q: Tensor, k: Tensor, v: Tensor, do: Tensor, u: list[Tensor]) -> list[Tensor]:
    """Output, gradient and second derivative of two stacked attention calls, whose gradient depends on the output."""
    leaves = [t.clone().requires_grad_() for t in (q, k, v, do)]
    with context:
        inner = sdpa_bob(*leaves[:3], is_causal=True)
        out = sdpa_bob(inner, leaves[1], leaves[2]) * inner
    first = torch.autograd.grad(out, leaves[:3], leaves[3], create_graph=True)
    return [out, *first, *torch.autograd.grad(first, leaves, u)]


@pytest.mark.parametrize("limit", [None, 0, 1000], ids=["all", "nothing", "some"])
def test_derivatives_are_those_of_computed_calls(limit: int | None) -> None:
    q, k, v, do, *u = tensors(7)
    expected = derivatives(nullcontext(), q, k, v, do, u)
    room = [limit]

    def admit(size: int) -> bool:
        if room[0] is not None:
            if size > room[0]:
                return False
            room[0] -= size
        return True

    recall = Recall(admit)
    for _ in range(3):
        found = derivatives(recall.calls(gradients=True), q, k, v, do, u)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    other = torch.randn_like(do)
    found = derivatives(recall.calls(gradients=False), q, k, v, other, u)
    assert all(torch.equal(a, b) for a, b in zip(found, derivatives(nullcontext(), q, k, v, other, u), strict=True))
    outputs, gradients = recall.bytes()
    if limit is None:
        assert outputs == 2 * (q.numel() + q.numel() // 4) * 8
        assert gradients == 2 * 3 * q.numel() * 8
        recall.forget_gradients()
        assert recall.bytes() == (outputs, 0)
    else:
        assert outputs + gradients <= limit


def test_first_backwards_without_room_wait_in_a_store() -> None:
    class Cellar:
        def __init__(self) -> None:
            self.fetched = 0

        def put(self, t: Tensor) -> Tensor:
            return t.numpy().copy()  # type: ignore[return-value]

        def get(self, t: Tensor) -> Tensor:
            self.fetched += 1
            return torch.from_numpy(t)

    q, k, v, do, *u = tensors(7)
    expected, cellar = derivatives(nullcontext(), q, k, v, do, u), Cellar()
    recall = Recall(lambda size: size < 3 * q.numel() * 8, (cellar, lambda _: True))  # outputs are smaller
    for _ in range(2):
        found = derivatives(recall.calls(gradients=True), q, k, v, do, u)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert cellar.fetched == 2 * 3
    assert len(recall.gradients()) == 2 * 3


def test_what_is_recalled_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()

    class Counted:
        name = "counted"

        def forward(self, *args: Any) -> Any:
            counts["forward"] += 1
            return blocked.forward(*args)

        def backward(self, *args: Any) -> Any:
            counts["backward"] += 1
            return blocked.backward(*args)

    monkeypatch.setattr(fused, "find", lambda *_: Counted())
    q, k, v = (t.requires_grad_() for t in tensors(3))
    recall = Recall()
    for gradients in (False, True, True, False):
        with recall.calls(gradients=gradients):
            out = sdpa_bob(q, k, v)
        torch.autograd.grad(out.sum(), (q, k, v))
    assert counts == {"forward": 1, "backward": 3}
