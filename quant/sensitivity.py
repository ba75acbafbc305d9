"""What each weight costs at each option: predictions from the exact Hessian, and the scores of rival methods."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import torch
from safetensors.numpy import load_file, save
from torch import nn

from curvature.estimate import Progress
from curvature.loss import Batch, CausalLMLoss, Loss
from curvature.operators import HessianOperator, Method
from curvature.report import write_bytes
from curvature.trace import trace
from curvature.vectors import inner
from quant.candidates import Candidates
from quant.linear import linear_terms, shrunk
from quant.perplexity import evaluating, on_device
from quant.quadratic import hessians, quadratic_forms
from quant.rivals import first_order_scores, fisher_scores, random_scores, weight_errors

__all__ = ["METRICS", "Metric", "Sensitivity", "sensitivity", "with_linear"]

Metric: TypeAlias = Literal[
    "trace", "quadratic", "taylor", "interaction", "fisher", "first_order", "weight_error", "random"
]
METRICS: tuple[Metric, ...] = get_args(Metric)
_PREDICTIONS = ("trace", "quadratic", "taylor", "interaction")
_SIGNED = ("quadratic", "taylor")
_FILE_VERSION = 2
_CONFIG_ELSEWHERE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


@dataclass(frozen=True, eq=False)
class Sensitivity:
    """A table of scores: what weight t costs at option b.

    Attributes:
        metric: How it was made.
        weights: The weights' names.
        options: The options' fields, in column order.
        values: float64 [weights, options]; NaN where an option does not fit a weight. Predictions of the loss change
            in nats per token for "trace", "quadratic", "taylor" and "interaction"; otherwise scores that only rank.
        stderr: Standard errors of the same shape, or None where nothing was sampled.
        cross: For "interaction" the matrix D_tb.H D_uc over all (weight, option) pairs in row-major order, float64
            [weights * options, weights * options], NaN for pairs that do not exist; otherwise None.
        products: Hessian products, each over one batch.
        seconds: Wall time.
        fingerprint: Of the model, options, text, loss and settings; tells whether a file belongs to a question.
        settings: What it was made with.
    """

    metric: Metric
    weights: tuple[str, ...]
    options: tuple[dict[str, Any], ...]
    values: npt.NDArray[np.float64] = field(repr=False)
    stderr: npt.NDArray[np.float64] | None = field(repr=False)
    cross: npt.NDArray[np.float64] | None = field(repr=False)
    products: int
    seconds: float
    fingerprint: str
    settings: dict[str, Any]

    @property
    def predicts(self) -> bool:
        """Whether the values are loss changes in nats per token."""
        return self.metric in _PREDICTIONS

    def save(self, path: str | Path) -> None:
        """Write the table to a .safetensors file, whole or not at all."""
        arrays = {"values": self.values}
        arrays |= {k: v for k, v in (("stderr", self.stderr), ("cross", self.cross)) if v is not None}
        names = ("metric", "weights", "options", "products", "seconds", "fingerprint", "settings")
        facts = {name: getattr(self, name) for name in names} | {"file_version": _FILE_VERSION}
        write_bytes(path, save(arrays, metadata={"sensitivity": json.dumps(facts)}))

    @classmethod
    def load(cls, path: str | Path) -> Sensitivity:
        """Read a table.

        Raises:
            ValueError: If the file is not one, or of another version.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), framework="np") as file:
                facts = json.loads((file.metadata() or {})["sensitivity"])
            arrays = load_file(str(path))
        except (OSError, SafetensorError, KeyError, json.JSONDecodeError) as error:
            raise ValueError(f"sensitivity file {str(path)!r} cannot be read: {error}") from error
        if facts.pop("file_version") != _FILE_VERSION:
            raise ValueError(f"sensitivity file {str(path)!r} is of another version; compute it again")
        facts["weights"], facts["options"] = tuple(facts["weights"]), tuple(facts["options"])
        return cls(values=arrays["values"], stderr=arrays.get("stderr"), cross=arrays.get("cross"), **facts)


def sensitivity(
    model: nn.Module,
    candidates: Candidates,
    batches: Sequence[Batch],
    metric: Metric = "quadratic",
    *,
    loss: Loss | None = None,
    draws: int = 2,
    probes: int = 24,
    seed: int = 0,
    method: Method = "auto",
    cache: str | Path | None = None,
    progress: Progress | None = None,
) -> Sensitivity:
    """Score every weight at every option.

    With D = candidates.delta(t, b) and H the Hessian of the loss over the batches, the metrics are

    - trace: 1/2 tr(H_tt) / n_t |D|^2 (Dong et al., HAWQ-V2, 2020). `probes` products over all batches. Estimated.
    - quadratic: 1/2 D.H_tt D, by random signs (`quant.quadratic`). `draws` products per batch and option. Estimated.
    - taylor: g.D + the above, with that part of g.D that repeats between batches (`quant.linear`). One backward pass
      per batch more. For one weight alone; over the weights of a plan the sum is too low, since a plan takes the
      options that noise favours (see `quant.expansion` for a whole plan).
    - interaction: 1/2 D.H_tt D exactly, and D_tb.H D_uc for all pairs. One product over all batches per weight and
      option.
    - fisher: sum over tokens of (dL/dy)^2 (D x)^2 at the layer's output y: squared output gradients times squared
      output errors. One backward pass per batch.
    - first_order: sum |g * D| over entries, g the gradient of a batch. One backward pass per batch.
    - weight_error: |D|^2. random: a uniform number per weight times n_t 4^-bits.

    Except by taylor the linear term g.D is left out: at a trained model it is mostly the sampling noise of the
    calibration text. Memory is that of one batch, whatever their number. Padding and labels of -100 are not counted.

    Args:
        model: The unquantized model that the candidates were made of.
        candidates: The weights at all options.
        batches: Calibration batches of equal numbers of counted tokens. Of others, `trace` and `interaction` weigh
            every token alike, the other metrics every batch.
        metric: One of the above.
        loss: The loss; `CausalLMLoss` if None.
        draws: Sign vectors per batch, for quadratic and taylor.
        probes: Probe vectors, for trace.
        seed: Seed of what is drawn.
        method: How Hessian products are computed; see `HessianOperator`.
        cache: A file: read if it holds the answer to the same question, written otherwise.
        progress: Called as the work proceeds.

    Returns:
        See `Sensitivity`.

    Raises:
        ValueError: If the metric is unknown, there is no batch, or the cache file is not readable.
        NotImplementedError: For fisher on stacks of experts, whose inputs are not a module's.
    """
    if metric not in METRICS:
        raise ValueError(f"metric must be one of {', '.join(METRICS)}, got {metric!r}")
    if not batches:
        raise ValueError("batches: there is none; give at least one calibration batch")
    settings = {"seed": seed, "batches": len(batches)}
    settings |= {"trace": {"probes": probes}}.get(metric, {"draws": draws} if metric in _SIGNED else {})
    loss = CausalLMLoss() if loss is None else loss
    mark = _fingerprint(model, candidates, batches, metric, settings, loss)
    if cache is not None and Path(cache).is_file():
        known = Sensitivity.load(cache)
        if known.fingerprint == mark:
            return known
    started = time.perf_counter()
    values, stderr, cross, products = _compute(
        metric, model, candidates, batches, loss, draws, probes, seed, method, progress
    )
    result = Sensitivity(
        metric, tuple(w.name for w in candidates.weights), tuple(asdict(o) for o in candidates.options), values, stderr,
        cross, products, time.perf_counter() - started, mark, settings,
    )  # fmt: skip
    if cache is not None:
        result.save(cache)
    return result


def with_linear(
    table: Sensitivity, model: nn.Module, candidates: Candidates, batches: Sequence[Batch], *,
    loss: Loss | None = None, progress: Progress | None = None,
) -> Sensitivity:  # fmt: skip
    """A table of curvature with the linear term of more text added: "taylor" where the table is "quadratic".

    The linear term is cheap, one backward pass per batch, and noisier than the curvature, so that it is worth more
    batches.

    Args:
        table: Predictions without a linear term.
        model: The unquantized model that the candidates were made of.
        candidates: Those of the table.
        batches: At least two, or no linear term can be told from noise.
        loss: The loss; `CausalLMLoss` if None.
        progress: Called after each batch.

    Raises:
        ValueError: If the table has a linear term or only ranks.
    """
    if not table.predicts or table.metric == "taylor":
        raise ValueError(f"table: a linear term belongs to predictions by curvature alone, got {table.metric!r}")
    started = time.perf_counter()
    loss = CausalLMLoss() if loss is None else loss
    scores = (table.values, table.stderr, None, table.products)
    values, stderr, _, _ = _with_linear(scores, model, candidates, batches, loss, progress)
    settings = table.settings | {"gradient_batches": len(batches)}
    mark = _fingerprint(model, candidates, batches, "taylor", {"table": table.fingerprint}, loss)
    seconds = table.seconds + time.perf_counter() - started
    return replace(
        table, metric="taylor", values=values, stderr=stderr, cross=None, seconds=seconds, fingerprint=mark,
        settings=settings,
    )  # fmt: skip


_Table: TypeAlias = npt.NDArray[np.float64]
_Scores: TypeAlias = tuple[_Table, _Table | None, _Table | None, int]


def _compute(
    metric: Metric, model: nn.Module, candidates: Candidates, batches: Sequence[Batch], loss: Loss, draws: int,
    probes: int, seed: int, method: Method, progress: Progress | None,
) -> _Scores:  # fmt: skip
    if metric == "trace":
        return _trace(model, candidates, batches, loss, probes, seed, method, progress)
    if metric == "quadratic":
        return _quadratic(model, candidates, batches, loss, draws, seed, method, progress)
    if metric == "taylor":
        ahead = draws * len(batches) * len(candidates.options)
        total = ahead + len(batches)
        scores = _quadratic(model, candidates, batches, loss, draws, seed, method, _share(progress, 0, total))
        return _with_linear(scores, model, candidates, batches, loss, _share(progress, ahead, total))
    if metric == "interaction":
        return _interaction(model, candidates, batches, loss, method, progress)
    if metric == "weight_error":
        return weight_errors(candidates), None, None, 0
    if metric == "random":
        return random_scores(candidates, seed), None, None, 0
    score = fisher_scores if metric == "fisher" else first_order_scores
    samples = score(model, candidates, batches, loss, progress)
    stderr = samples.std(axis=0, ddof=1) / math.sqrt(len(samples)) if len(samples) > 1 else None
    return samples.mean(axis=0), stderr, None, 0


def _share(progress: Progress | None, ahead: int, total: int) -> Progress | None:
    """Progress of one stretch of a longer work."""
    return None if progress is None else lambda done, _, label: progress(ahead + done, total, label)


def _trace(
    model: nn.Module, candidates: Candidates, batches: Sequence[Batch], loss: Loss, probes: int, seed: int,
    method: Method, progress: Progress | None,
) -> _Scores:  # fmt: skip
    operator = HessianOperator(model, batches, loss=loss, params=[w.name for w in candidates.weights], method=method)
    found = trace(operator, probes=probes, seed=seed, progress=progress)
    squares = weight_errors(candidates)
    blocks = np.array([found.per_block[w.name] for w in candidates.weights])
    sizes = np.array([w.numel for w in candidates.weights], dtype=float)
    half = 0.5 * blocks / sizes[:, None]
    operator.release()
    return half[:, :1] * squares, half[:, 1:] * squares, None, found.products * len(batches)


def _quadratic(
    model: nn.Module, candidates: Candidates, batches: Sequence[Batch], loss: Loss, draws: int, seed: int,
    method: Method, progress: Progress | None,
) -> _Scores:  # fmt: skip
    weights = candidates.weights
    missing = np.array([[b not in kept for b in range(len(candidates.options))] for kept in candidates.rounded])

    def perturbation(option: int) -> Any:
        # A weight without this option stands still in its products.
        return lambda t: candidates.delta(t, None if missing[t, option] else option)

    forms = quadratic_forms(
        hessians(model, [w.name for w in weights], batches, loss, method),
        weights,
        [perturbation(b) for b in range(len(candidates.options))],
        draws=draws,
        seed=seed,
        progress=progress,
    )
    values, stderr = (np.where(missing, np.nan, table.T) for table in (forms.values, forms.stderr))
    return values, stderr, None, forms.products


def _with_linear(
    curvature: _Scores, model: nn.Module, candidates: Candidates, batches: Sequence[Batch], loss: Loss,
    progress: Progress | None,
) -> _Scores:  # fmt: skip
    values, stderr, _, products = curvature
    linear, spread = shrunk(linear_terms(model, candidates, batches, loss, progress))
    return values + linear, None if stderr is None else np.hypot(stderr, spread), None, products


def _interaction(
    model: nn.Module,
    candidates: Candidates,
    batches: Sequence[Batch],
    loss: Loss,
    method: Method,
    progress: Progress | None,
) -> _Scores:
    weights, count = candidates.weights, len(candidates.options)
    operator = HessianOperator(model, batches, loss=loss, params=[w.name for w in weights], method=method)
    cross = np.full((len(weights) * count,) * 2, np.nan)
    pairs = [(t, b) for t in range(len(weights)) for b in candidates.available(t)]
    places = {name: i for i, name in enumerate(operator.space.names)}
    for done, (t, b) in enumerate(pairs):
        direction = torch.zeros(operator.space.size, dtype=operator.dtype, device=operator.device)
        operator.space.split(direction)[places[weights[t].name]].copy_(candidates.delta(t, b))
        pieces = operator.space.split(operator @ direction)
        for u, c in pairs:
            piece = pieces[places[weights[u].name]]
            cross[t * count + b, u * count + c] = float(inner(candidates.delta(u, c).to(piece.dtype), piece))
        if progress is not None:
            progress(done + 1, len(pairs), weights[t].name)
    operator.release()
    cross = (cross + cross.T) / 2
    return 0.5 * np.diag(cross).reshape(len(weights), count).copy(), None, cross, len(pairs) * len(batches)


def _fingerprint(
    model: nn.Module, candidates: Candidates, batches: Sequence[Batch], metric: str, settings: Mapping[str, Any],
    loss: Loss,
) -> str:  # fmt: skip
    """Of all that a table depends on, but for the library. Tensors of the model by their sums and norms."""
    said: list[object] = [metric, sorted(settings.items()), candidates.options, _loss_mark(loss, model, batches)]
    config = getattr(model, "config", None)
    if config is not None:
        entries = {k: v for k, v in config.to_dict().items() if k not in _CONFIG_ELSEWHERE}
        said.append(json.dumps(entries, sort_keys=True, default=str))
    tensors = [*model.named_parameters(), *model.named_buffers()]
    sums = [f(t.detach().double()) for _, t in tensors for f in (torch.sum, torch.linalg.vector_norm)]
    said += [(name, t.dtype, tuple(t.shape)) for name, t in tensors]
    said.append(torch.stack([s.cpu() for s in sums]).tolist())
    for index, weight in enumerate(candidates.weights):
        said.append((weight.name, weight.layout))
        for option in candidates.available(index):
            rounded = candidates.rounded[index][option]
            said.append((option, int(rounded.codes.long().sum()), float(rounded.scale.double().sum())))
    digest = hashlib.sha256(repr(said).encode())
    for batch in batches:
        for key, value in sorted(batch.items()):
            digest.update(f"{key} {value!r}".encode() if not isinstance(value, torch.Tensor) else key.encode())
            if isinstance(value, torch.Tensor):
                digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
                digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _loss_mark(loss: Loss, model: nn.Module, batches: Sequence[Batch]) -> object:
    """What tells losses apart: settings of the library's own, of others what they say about the first batch."""
    if type(loss) is CausalLMLoss:
        return repr(loss)
    with torch.no_grad(), evaluating(model):
        total, tokens = loss(model, on_device(batches[0], next(model.parameters()).device))
    return type(loss).__qualname__, f"{float(total):.6g}", tokens
