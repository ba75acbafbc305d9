"""The public call: bad input, defaults, the choice of implementations, and what `import flashbob` costs."""

import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

import flashbob
from flashbob import blocked, explain, fused, sdpa_bob
from flashbob.hybrid import hybrid_attention

Q = torch.zeros(2, 4, 6, 8)
K = torch.zeros(2, 2, 6, 8)
NAN = float("nan")

BAD: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "q-not-a-tensor": (TypeError, r"q must be a torch.Tensor, got list", {"q": [1.0]}),
    "k-not-a-tensor": (TypeError, r"k must be a torch.Tensor, got NoneType", {"k": None}),
    "three-dimensions": (ValueError, r"q must have four dimensions .* got shape \(4, 6, 8\)", {"q": Q[0]}),
    "integers": (TypeError, r"q must be float64, float32, bfloat16 or float16, got torch.int64", {"q": Q.long()}),
    "mixed-dtypes": (
        TypeError,
        r"share dtype and device: q is torch.float32 on cpu, v torch.float64",
        {"v": K.double()},
    ),
    "mixed-devices": (TypeError, r"share dtype and device: .* k torch.float32 on meta", {"k": K.to("meta")}),
    "k-v-tokens": (
        ValueError,
        r"agree in batch, heads and tokens, got k \(2, 2, 6, 8\) and v \(2, 2, 5, 8\)",
        {"v": K[:, :, :5]},
    ),
    "k-v-heads": (ValueError, r"agree in batch, heads and tokens", {"v": K[:, :1]}),
    "batch": (ValueError, r"same batch size, got q \(1, 4, 6, 8\) and k \(2, 2, 6, 8\)", {"q": Q[:1]}),
    "head-size": (ValueError, r"same head size, got q \(2, 4, 6, 7\) and k \(2, 2, 6, 8\)", {"q": Q[..., :7]}),
    "head-size-zero": (ValueError, r"head size must be at least 1", {"q": Q[..., :0], "k": K[..., :0]}),
    "head-ratio": (ValueError, r"multiple of the number of key/value heads, got 3 and 2", {"q": Q[:, :3]}),
    "no-key-heads": (
        ValueError,
        r"multiple of the number of key/value heads, got 4 and 0",
        {"k": K[:, :0], "v": K[:, :0]},
    ),
    "scale-nan": (ValueError, r"scale must be finite, got nan", {"scale": NAN}),
    "scale-infinite": (ValueError, r"scale must be finite, got inf", {"scale": float("inf")}),
    "scale-tensor": (TypeError, r"scale must be an int or a float .* got Tensor", {"scale": torch.tensor(0.3)}),
    "scale-bool": (TypeError, r"scale must be an int or a float .* got bool", {"scale": True}),
    "softcap-tensor": (TypeError, r"softcap must be an int or a float .* got Tensor", {"softcap": torch.tensor(2.0)}),
    "dropout-tensor": (TypeError, r"dropout_p must be an int or a float", {"dropout_p": torch.tensor(0.5)}),
    "q-offset-float": (TypeError, r"q_offset must be an integer, got 1.5", {"q_offset": 1.5}),
    "k-offset-bool": (TypeError, r"k_offset must be an integer, got True", {"k_offset": True}),
    "window-negative": (ValueError, r"window_size must be an integer >= 0 .* got -1", {"window_size": -1}),
    "window-float": (ValueError, r"window_size must be an integer >= 0 .* got 2.0", {"window_size": 2.0}),
    "window-bool": (ValueError, r"window_size must be an integer >= 0 .* got True", {"window_size": True}),
    "dropout-negative": (ValueError, r"dropout_p must lie in \[0, 1\), got -0.1", {"dropout_p": -0.1}),
    "dropout-one": (ValueError, r"dropout_p must lie in \[0, 1\), got 1.0", {"dropout_p": 1.0}),
    "seed-negative": (
        ValueError,
        r"seed must be an integer in 0 .. 2\^64 - 1 .* got -1",
        {"dropout_p": 0.1, "seed": -1},
    ),
    "seed-large": (ValueError, r"seed must be an integer in 0 .. 2\^64 - 1", {"dropout_p": 0.1, "seed": 2**64}),
    "seed-float": (ValueError, r"seed must be an integer .* got 1.0", {"dropout_p": 0.1, "seed": 1.0}),
    "softcap-zero": (ValueError, r"softcap must be a finite number > 0 or None, got 0.0", {"softcap": 0.0}),
    "softcap-nan": (ValueError, r"softcap must be a finite number > 0 or None, got nan", {"softcap": NAN}),
    "backend": (
        ValueError,
        r"backend must be one of auto, triton, blocked, reference, got 'cuda'",
        {"backend": "cuda"},
    ),
    "lengths-too-long": (ValueError, r"key_lengths must lie in 0..6 .* got \[6, 7\]", {"key_lengths": [6, 7]}),
    "lengths-negative": (ValueError, r"key_lengths must lie in 0..6", {"key_lengths": torch.tensor([-1, 6])}),
    "starts-too-long": (ValueError, r"key_starts must lie in 0..6 .* got \[0, 9\]", {"key_starts": [0, 9]}),
    "lengths-count": (
        ValueError,
        r"key_lengths must hold one integer per sequence, shape \(2,\), got shape \(3,\)",
        {"key_lengths": [6, 6, 6]},
    ),
    "lengths-float": (
        ValueError,
        r"key_lengths must hold one integer per sequence.*float32",
        {"key_lengths": torch.ones(2)},
    ),
    "starts-mask": (
        ValueError,
        r"key_starts must hold one integer per sequence.*bool",
        {"key_starts": torch.ones(2, dtype=torch.bool)},
    ),
    "bias-list": (TypeError, r"attn_bias must be a torch.Tensor, got list", {"attn_bias": [[0.0] * 6] * 6}),
    "bias-device": (
        TypeError,
        r"attn_bias must be on q's device cpu, got meta",
        {"attn_bias": torch.zeros(6, 6, device="meta")},
    ),
    "bias-bool": (
        TypeError,
        r"attn_bias must be floating .* got torch.bool; for a boolean mask",
        {"attn_bias": torch.ones(6, 6, dtype=torch.bool)},
    ),
    "bias-shape": (
        ValueError,
        r"attn_bias must be broadcastable to \(2, 4, 6, 6\), got shape \(5, 6\)",
        {"attn_bias": torch.zeros(5, 6)},
    ),
    "bias-too-large": (ValueError, r"attn_bias must be broadcastable", {"attn_bias": torch.zeros(3, 2, 4, 6, 6)}),
    "bias-gradient": (
        NotImplementedError,
        r"attn_bias with requires_grad.*detach",
        {"attn_bias": torch.zeros(6, 6, requires_grad=True)},
    ),
    "triton-double": (
        NotImplementedError,
        r"backend='triton' does not support this call.*backend='auto'",
        {"q": Q.double(), "k": K.double(), "v": K.double(), "backend": "triton"},
    ),
}


@pytest.mark.parametrize(("error", "message", "change"), BAD.values(), ids=BAD.keys())
def test_bad_input(error: type[Exception], message: str, change: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"q": Q, "k": K, "v": K, **change}
    with pytest.raises(error, match=message):
        sdpa_bob(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


def test_the_arguments_before_the_changes_are_fine() -> None:
    assert sdpa_bob(Q, K, K).shape == Q.shape


def test_defaults_are_those_of_pytorch() -> None:
    q, k, v = (torch.randn(2, 3, 9, 16, dtype=torch.float64) for _ in range(3))
    for causal in (False, True):
        exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        for backend in ("reference", "blocked", "auto"):
            torch.testing.assert_close(sdpa_bob(q, k, v, is_causal=causal, backend=backend), exact)  # type: ignore[arg-type]


def test_the_output_has_the_dtype_of_the_input() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for backend in ("reference", "blocked"):
            assert sdpa_bob(Q.to(dtype), K.to(dtype), K.to(dtype), backend=backend).dtype == dtype  # type: ignore[arg-type]


def test_lists_and_tensors_of_lengths_are_the_same() -> None:
    q, k = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
    assert torch.equal(sdpa_bob(q, k, k, key_lengths=[3, 6]), sdpa_bob(q, k, k, key_lengths=torch.tensor([3, 6])))


def test_explain_names_who_computes() -> None:
    same_heads = torch.zeros(2, 4, 6, 8)
    assert explain(Q, same_heads, same_heads, is_causal=True) == ("torch fused CPU", "blocked")
    assert explain(Q, same_heads, same_heads, is_causal=True, padded=True) == ("blocked", "blocked")
    assert explain(Q, same_heads, same_heads, softcap=2.0) == ("blocked", "blocked")
    assert explain(Q, same_heads, same_heads, window_size=2) == ("blocked", "blocked")
    assert explain(Q, same_heads, same_heads, is_causal=True, dropout_p=0.1) == ("blocked", "blocked")
    assert explain(Q, K, K) == ("blocked", "blocked")
    assert explain(Q, K, K, backend="reference") == ("reference", "reference")
    assert explain(Q, same_heads, same_heads, is_causal=True, scale=-1.0) == ("blocked", "blocked")
    assert explain(Q, same_heads, same_heads, is_causal=True, scale=1.0) == ("torch fused CPU", "blocked")


def test_explain_refuses_what_the_call_refuses() -> None:
    with pytest.raises(ValueError, match="backend must be one of auto, triton, blocked, reference, got 'foo'"):
        explain(Q, K, K, backend="foo")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scale must be finite, got nan"):
        explain(Q, K, K, scale=NAN, backend="reference")


def test_the_installed_torch_has_the_signatures_that_were_written_for() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(fused._operator(name) is not None for name in fused._SIGNATURES)


@pytest.mark.parametrize("change", ["renamed-argument", "missing-operator"])
def test_a_changed_operator_is_left_unused_with_one_warning(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    q, k, v = (torch.randn(1, 2, 7, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    name = "_scaled_dot_product_flash_attention_for_cpu"

    def run() -> tuple[torch.Tensor, ...]:
        o = sdpa_bob(q, k, v, is_causal=True)
        return (o, *torch.autograd.grad(o.square().sum(), (q, k, v)))

    before, with_fused = run(), explain(q, k, v, is_causal=True)
    if change == "renamed-argument":
        monkeypatch.setitem(fused._SIGNATURES, name, ("query", "key", "value", "something_new"))
        operator = name
    else:
        operator = "_an_operator_that_is_gone"
        monkeypatch.setitem(fused._SIGNATURES, operator, ("query",))
        monkeypatch.setitem(fused._SIGNATURES, f"{operator}_backward", fused._SIGNATURES[f"{name}_backward"])
        monkeypatch.setattr(
            fused,
            "_operator",
            lambda n, real=fused._operator: real(n) if n == operator else real(f"{name}_backward"),
        )
    with pytest.warns(RuntimeWarning, match=rf"has changed aten::{operator} .* left unused") as caught:
        loaded = fused._load(fused._Cpu, "torch fused CPU", operator)
    assert loaded is None
    assert len(caught) == 1
    monkeypatch.setattr(fused, "CPU", loaded)
    assert with_fused == ("torch fused CPU", "blocked")
    assert explain(q, k, v, is_causal=True) == ("blocked", "blocked")
    torch.testing.assert_close(run(), before, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_fused_kernels_are_not_given_a_scale_that_they_cannot_take(scale: float) -> None:
    """PyTorch's own kernel returns NaN under a causal mask there."""
    q, k, v = (torch.randn(1, 2, 7, 8, dtype=torch.float64) for _ in range(3))
    exact = sdpa_bob(q, k, v, is_causal=True, scale=scale, backend="reference")
    torch.testing.assert_close(sdpa_bob(q, k, v, is_causal=True, scale=scale), exact)
    with pytest.raises(NotImplementedError, match=rf"hybrid: .* needs a scale > 0, got {scale}"):
        hybrid_attention(q, k, v, is_causal=True, scale=scale)


def test_importing_flashbob_and_calling_it_imports_no_compiler_and_no_transformers() -> None:
    code = (
        "import sys, torch, flashbob; x = torch.zeros(1, 1, 2, 4); flashbob.sdpa_bob(x, x, x, is_causal=True); "
        "print(sorted({'torch._dynamo', 'transformers', 'triton'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_exports() -> None:
    assert {"sdpa_bob", "register_attention", "explain"} <= set(flashbob.__all__)
    assert all(hasattr(flashbob, name) for name in flashbob.__all__)
    assert blocked.name == "blocked"
