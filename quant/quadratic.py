"""Quadratic forms of the loss's exact Hessian in the perturbation of every single weight, from full products.

For perturbations D_t of the weights t and independent signs s_t, put z = sum_t s_t D_t. Then

    s_t D_t.(H z)_t = D_t.H_tt D_t + sum_{u != t} s_t s_u D_t.H_tu D_u

has the expectation D_t.H_tt D_t, for all weights at once: one full product serves them all. The signs of a block of
draws are the columns of a Hadamard matrix, a row per kind of neighbour, with a random sign for each weight's
neighbourhood: within a block the cross terms of weights in one transformer layer then cancel exactly, not only on
average, and those between layers average out as with independent signs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from curvature.blocks import layer_of
from curvature.capture import Recordings
from curvature.estimate import Progress
from curvature.loss import Batch, CausalLMLoss, Loss
from curvature.operators import HessianOperator, Method
from curvature.streaming import Streaming
from curvature.vectors import inner
from quant.weights import WeightMatrix

__all__ = ["Forms", "block_order", "hessians", "neighbourhoods", "quadratic_forms", "sign_blocks"]

_TOGETHER = 1 << 30
"""Entries of all directions that go through one call."""


@dataclass(frozen=True, eq=False)
class Forms:
    """Estimates of D_t.H_tt D_t / 2 for every weight t and every set of perturbations.

    Attributes:
        values: float64 [sets, weights].
        stderr: Standard errors of the same shape: between windows where there are several, else between draws.
        products: Hessian products used, each over one window.
        samples: float64 [windows, draws, sets, weights].
        cross: Estimates of B_t.H_tt D_t [sets, weights] for the vectors B that were given beside; without any, B = D.
    """

    values: npt.NDArray[np.float64]
    stderr: npt.NDArray[np.float64]
    products: int
    samples: npt.NDArray[np.float64] = field(repr=False)
    cross: npt.NDArray[np.float64]


def hessians(
    model: nn.Module,
    names: Sequence[str],
    batches: Sequence[Batch],
    loss: Loss | None = None,
    method: Method = "auto",
) -> list[Callable[[], HessianOperator]]:
    """One operator per batch, made when it is called for, with the model inspected once.

    They share what is recorded of their launches.

    Args:
        model: The model; read when an operator is called for.
        names: The parameters that the operators are restricted to.
        batches: One or more batches.
        loss: The loss; `CausalLMLoss` if None.
        method: How products are computed; see `HessianOperator`.
    """
    loss = CausalLMLoss() if loss is None else loss
    first = HessianOperator(model, batches[:1], loss=loss, params=list(names), method=method)
    if first.method_reason is not None:
        warnings.warn(f"products go through the whole graph: {first.method_reason}", stacklevel=2)
    streaming = None
    if first.method == "streamed":
        streaming = Streaming(segments=first.segments, recordings=Recordings())

    def make(batch: Batch) -> Callable[[], HessianOperator]:
        return lambda: HessianOperator(
            model, [batch], loss=loss, params=list(names), method=first.method, streaming=streaming
        )

    return [make(batch) for batch in batches]


def quadratic_forms(
    operators: Sequence[Callable[[], HessianOperator]],
    weights: Sequence[WeightMatrix],
    perturbations: Sequence[Callable[[int], Tensor]],
    *,
    draws: int = 2,
    seed: int = 0,
    beside: Callable[[int], Tensor] | None = None,
    progress: Progress | None = None,
) -> Forms:
    """Estimate 1/2 D_t.H_tt D_t for every weight and every set of perturbations.

    Unbiased for the mean Hessian of the batches (each counts equally: give batches of equal numbers of tokens). Cost:
    `draws` products per batch and set, each over one batch only; memory of one batch and of the directions.

    Args:
        operators: From `hessians`; each is restricted to exactly the parameters of `weights`.
        weights: The weights.
        perturbations: For each set, the function that gives D_t in the parameter's shape.
        draws: Sign vectors per batch.
        seed: Seed of the signs.
        beside: Gives B_t in the parameter's shape, for B_t.H_tt D_t from the same products.
        progress: Called after each product.

    Returns:
        See `Forms`.

    Raises:
        ValueError: If draws is less than 1, or a single batch is given with a single draw (no standard error).
    """
    if draws < 1 or draws * len(operators) < 2:
        raise ValueError(
            f"draws must be at least 1, and draws times batches at least 2 for a standard error, got {draws} draws on "
            f"{len(operators)} batches"
        )
    generator = np.random.default_rng(seed)
    hoods = neighbourhoods(weights)
    samples = np.zeros((len(operators), draws, len(perturbations), 1 if beside is None else 2, len(weights)))
    done, total = 0, samples.shape[0] * draws * len(perturbations)
    others: list[Tensor] = []
    deltas: dict[int, list[Tensor]] = {}  # those of one chunk; of all windows where everything is one chunk
    for window, make in enumerate(operators):
        operator = make()
        signs = sign_blocks(hoods, draws, generator)
        order = block_order(operator, weights)
        if beside is not None and not others:
            others = [beside(t) for t in order]
        pairs = [(index, draw) for index in range(len(perturbations)) for draw in range(draws)]
        together = max(1, _TOGETHER // operator.space.size)
        for start in range(0, len(pairs), together):
            chunk = pairs[start : start + together]
            needed = dict.fromkeys(index for index, _ in chunk)
            deltas = {i: deltas.get(i) or [perturbations[i](t) for t in order] for i in needed}
            forms = _chunk(operator, [(deltas[i], signs[draw, order]) for i, draw in chunk], others)
            for (index, draw), form in zip(chunk, forms, strict=True):
                samples[window, draw, index][:, order] = form
            done += len(chunk)
            if progress is not None:
                progress(done, total, f"window {window + 1} of {len(operators)}")
        operator.release()
    return _forms(samples[..., 0, :], samples[..., -1, :] if others else 2 * samples[..., 0, :], total)


def _forms(samples: npt.NDArray[np.float64], cross: npt.NDArray[np.float64], products: int) -> Forms:
    # Draws on one window share its text, so that windows are the independent samples where there are several.
    independent = samples.mean(axis=1) if len(samples) > 1 else samples[0]
    stderr = independent.std(axis=0, ddof=1) / math.sqrt(len(independent))
    return Forms(samples.mean(axis=(0, 1)), stderr, products, samples, cross.mean(axis=(0, 1)))


def neighbourhoods(weights: Sequence[WeightMatrix]) -> list[list[int]]:
    """Weights by transformer layer, those outside layers alone; their mutual cross terms are the largest."""
    layers: dict[object, list[int]] = {}
    for index, weight in enumerate(weights):
        layer = layer_of(weight.name)
        layers.setdefault(weight.name if layer is None else layer, []).append(index)
    return list(layers.values())


def sign_blocks(hoods: Sequence[Sequence[int]], draws: int, generator: np.random.Generator) -> npt.NDArray[np.float64]:
    """Signs [draws, weights], each vector uniform on its own.

    Draws come in blocks whose length is a power of two: columns of a Hadamard matrix in random order, with a random
    sign per draw and neighbourhood and per weight. Members of a neighbourhood have orthogonal signs over a block that
    is at least as long as the neighbourhood is large; a shorter block reaches as many members as it can.
    """
    weights = sum(map(len, hoods))
    signs = np.empty((draws, weights))
    start = 0
    while start < draws:
        length = 1 << ((draws - start).bit_length() - 1)
        matrix = np.ones((1, 1))
        while len(matrix) < length:
            matrix = np.block([[matrix, matrix], [matrix, -matrix]])
        for hood in hoods:
            # Per neighbourhood: its own choice of rows, order of columns, and a sign for each draw.
            rows = np.concatenate([generator.permutation(length) for _ in range(-(-len(hood) // length))])[: len(hood)]
            common = generator.choice([-1.0, 1.0], size=(length, 1))
            own = generator.choice([-1.0, 1.0], size=(1, len(hood)))
            block = matrix[rows][:, generator.permutation(length)].T
            signs[start : start + length, list(hood)] = block * common * own
        start += length
    return signs


def block_order(operator: HessianOperator, weights: Sequence[WeightMatrix]) -> list[int]:
    """For each block of the operator, the weight that it is."""
    by_name = {weight.name: index for index, weight in enumerate(weights)}
    if set(operator.space.names) != set(by_name):
        raise ValueError("operators: each must be restricted to exactly the parameters of the weights")
    return [by_name[name] for name in operator.space.names]


def _chunk(
    operator: HessianOperator,
    chunk: Sequence[tuple[Sequence[Tensor], npt.NDArray[np.float64]]],
    others: Sequence[Tensor],
) -> npt.NDArray[np.float64]:
    """s_t/2 D_t.(H z)_t for each direction z = sum_t s_t D_t, and s_t B_t.(H z)_t where there are others B.

    Returns:
        float64 [directions, 1 or 2, blocks of the operator].
    """
    columns = [operator.space.flatten([d * float(s) for d, s in zip(ds, ss, strict=True)]) for ds, ss in chunk]
    products = (operator @ torch.stack(columns, dim=1)).T.contiguous()
    del columns
    forms = []
    for (ds, _), product in zip(chunk, products, strict=True):
        pieces = operator.space.split(product)
        lefts = [ds, others] if others else [ds]
        forms += [inner(d.to(p.dtype), p) for left in lefts for d, p in zip(left, pieces, strict=True)]
    found = torch.stack(forms).cpu().numpy().reshape(len(chunk), -1, len(others) or len(chunk[0][0]))
    found[:, 0] *= 0.5
    return found * np.stack([ss for _, ss in chunk])[:, None]
