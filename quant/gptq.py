"""GPTQ: columns rounded one after another, each error spread over the columns that are still to come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quant.inputs import InputGrams
from quant.rounding import QuantizedWeight, round_each, round_to_nearest
from quant.scheme import Scheme
from quant.weights import WeightMatrix

__all__ = ["Gptq", "GptqQuantizer", "gptq", "gptq_batch"]

_DAMPING = 0.01
_LARGEST_DAMPING = 10.0
_STRETCH = 128

_TOGETHER = 1 << 27
"""Entries of the weights and Gram matrices that are worked on at once."""


@dataclass(frozen=True, eq=False)
class Gptq:
    """Result of `gptq`.

    Attributes:
        weight: The quantized weight.
        damping: The damping that made the Gram matrix positive definite, relative to its mean diagonal entry, or None
            where none did and the weight was rounded to nearest.
    """

    weight: QuantizedWeight
    damping: float | None


def gptq(
    weight: Tensor, gram: Tensor, scheme: Scheme, *, damping: float = _DAMPING, scale_dtype: torch.dtype | None = None
) -> Gptq:
    """Round a weight so that its outputs change least over given inputs.

        minimize |(W - Q) X|^2 = tr (W - Q) G (W - Q)^T,   G = X X^T

    column by column: with U the upper Cholesky factor of (G + lambda I)^-1, the rounding error of column j, divided by
    U_jj, is subtracted from all later columns in proportion to U_j,:. Columns are taken in order of falling G_jj, the
    most active first; every group's scale comes from the search of `quant.rounding` on the original weight, so that the
    order of the columns does not touch the format. Inputs that were always zero (G_jj = 0) are rounded to nearest.

    Cost: O(columns^2 rows) after one Cholesky factorization; float32 at least.

    Args:
        weight: [rows, columns].
        gram: G, [columns, columns], symmetric positive semidefinite, of any scale.
        scheme: The format.
        damping: lambda relative to the mean of G's diagonal; raised tenfold as long as the factorization fails.
        scale_dtype: Dtype of stored scales; None: that of the weight.

    Returns:
        See `Gptq`.

    Raises:
        ValueError: If the Gram matrix has another shape or is not finite, or the weight is not finite.

    Source: Frantar et al., GPTQ (2023), Algorithm 1; the order of columns is their "act-order".
    """
    return gptq_batch([weight], [gram], [scheme], damping=damping, scale_dtype=scale_dtype)[0]


def gptq_batch(
    weights: Sequence[Tensor],
    grams: Sequence[Tensor],
    schemes: Sequence[Scheme],
    *,
    damping: float = _DAMPING,
    scale_dtype: torch.dtype | None = None,
) -> list[Gptq]:
    """`gptq` for several weights of one shape at once, which a GPU works off in little more time than one.

    Args:
        weights: Each [rows, columns].
        grams: Each [columns, columns].
        schemes: Their formats.
        damping: See `gptq`.
        scale_dtype: Dtype of stored scales; None: that of the weights.

    Returns:
        One result per weight.
    """
    columns = weights[0].shape[-1]
    for gram in grams:
        if gram.shape != (columns, columns):
            raise ValueError(
                f"gram must be [{columns}, {columns}] for a weight of {columns} columns, got {list(gram.shape)}"
            )
        if not bool(torch.isfinite(gram).all()):
            raise ValueError("gram holds NaN or infinity; check the calibration inputs")
    wide = torch.float64 if weights[0].dtype == torch.float64 else torch.float32
    nearest = round_each(weights, schemes, scale_dtype=scale_dtype)
    factors = _Factors(damping, wide)
    found = [factors.of(gram) for gram in grams]
    results = [Gptq(q, None) for q in nearest]
    solved = [i for i, f in enumerate(found) if f.upper is not None]
    if not solved:
        return results
    order = torch.stack([found[i].order for i in solved])
    upper = torch.stack([f.upper for f in found if f.upper is not None])
    w = torch.stack([weights[i].to(wide) for i in solved])
    scale, zero = _per_column([nearest[i] for i in solved], columns, wide)
    codes = _compensated(_permuted(w, order), upper, _permuted(scale, order), _permuted(zero, order), schemes, solved)
    back = torch.empty_like(codes, dtype=torch.int8)
    back.scatter_(-1, order[:, None].expand_as(codes), codes.to(torch.int8))
    for place, i in enumerate(solved):
        quantized = QuantizedWeight(back[place], nearest[i].scale, nearest[i].zero, schemes[i])
        results[i] = Gptq(quantized, found[i].damping)
    return results


@dataclass(frozen=True, eq=False)
class _Factor:
    """Upper Cholesky factor of the inverse of a damped Gram matrix, its columns in `order`; None if there is none."""

    upper: Tensor | None
    order: Tensor
    damping: float


class _Factors:
    """Factors by Gram matrix, so that several options of one weight share one factorization."""

    def __init__(self, damping: float, dtype: torch.dtype) -> None:
        self._damping, self._dtype = damping, dtype
        self._known: dict[tuple[int, int], _Factor] = {}

    def of(self, gram: Tensor) -> _Factor:
        key = (gram.data_ptr(), gram.numel())  # the caller keeps the matrices alive meanwhile
        if key not in self._known:
            self._known[key] = self._compute(gram.to(self._dtype))
        return self._known[key]

    def _compute(self, gram: Tensor) -> _Factor:
        order = torch.argsort(gram.diagonal(), descending=True, stable=True)
        mean = gram.diagonal().mean()
        used = self._damping
        if not bool(mean > 0):
            return _Factor(None, order, used)
        ordered = gram[order][:, order]
        identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        while used <= _LARGEST_DAMPING:
            lower, failed = torch.linalg.cholesky_ex(ordered + used * mean * identity)
            if not bool(failed):
                upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
                if not bool(failed) and bool(torch.isfinite(upper).all()):
                    return _Factor(upper, order, used)
            used *= 10
        return _Factor(None, order, used)


def _permuted(table: Tensor, order: Tensor) -> Tensor:
    return table.gather(-1, order[:, None].expand_as(table))


def _per_column(quantized: Sequence[QuantizedWeight], columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scales and zero points of every entry: [weights, rows, columns]."""
    scales, zeros = [], []
    for q in quantized:
        repeats = columns // q.scale.shape[-1]
        scales.append(q.scale.to(dtype).repeat_interleave(repeats, -1))
        zero = torch.zeros_like(q.scale, dtype=dtype) if q.zero is None else q.zero.to(dtype)
        zeros.append(zero.repeat_interleave(repeats, -1))
    return torch.stack(scales), torch.stack(zeros)


def _compensated(
    w: Tensor, factor: Tensor, scales: Tensor, zeros: Tensor, schemes: Sequence[Scheme], solved: Sequence[int]
) -> Tensor:
    """Codes [weights, rows, columns]. Errors reach the columns of one stretch at once, later ones in one product."""
    count, rows, columns = w.shape
    low = torch.tensor([[float(schemes[i].lowest)] for i in solved], dtype=w.dtype, device=w.device)
    high = torch.tensor([[float(schemes[i].highest)] for i in solved], dtype=w.dtype, device=w.device)
    codes = torch.empty_like(w)
    diagonal = factor.diagonal(dim1=-2, dim2=-1)
    for start in range(0, columns, _STRETCH):
        end = min(start + _STRETCH, columns)
        errors = torch.empty(count, rows, end - start, dtype=w.dtype, device=w.device)
        for j in range(start, end):
            column, scale, zero = w[..., j], scales[..., j], zeros[..., j]
            q = torch.minimum(torch.maximum((column / scale + zero).round_(), low), high)
            codes[..., j] = q
            error = (column - (q - zero) * scale) / diagonal[:, j, None]
            errors[..., j - start] = error
            w[..., j + 1 : end] -= error[..., None] * factor[:, j, None, j + 1 : end]
        w[..., end:] -= errors @ factor[:, start:end, end:]
    return codes


class GptqQuantizer:
    """Rounds weights by GPTQ, for `quant.candidates.round_all`.

    Args:
        grams: From `input_grams`.
        damping: See `gptq`.
        scale_dtype: Dtype of stored scales; None: the weights' own.

    Attributes:
        notices: Weights that needed more damping or were rounded to nearest, and experts that saw no token.
    """

    def __init__(self, grams: InputGrams, *, damping: float = _DAMPING, scale_dtype: torch.dtype | None = None) -> None:
        self._grams, self._damping, self._scale_dtype = grams, damping, scale_dtype
        self._told: dict[str, str] = {}

    @property
    def notices(self) -> list[str]:
        """One remark per weight that there is something to say about."""
        return list(self._told.values())

    def __call__(self, jobs: Sequence[tuple[WeightMatrix, Scheme]]) -> list[QuantizedWeight]:
        """Round each (weight, format), equal shapes together.

        Raises:
            ValueError: If the moments of a stack are not of as many experts as it has.
        """
        parts: list[list[QuantizedWeight | None]] = []
        queues: dict[tuple[int, ...], list[tuple[int, int, str, Tensor, Tensor, Scheme]]] = {}
        for number, (weight, scheme) in enumerate(jobs):
            gram = self._grams.grams[weight.name]
            counts = self._grams.tokens[weight.name]
            stacked = weight.layout == "experts"
            self._tell_missing(weight.name, counts)
            experts = len(weight.parameter) if stacked else 1
            if len(counts) != experts:
                raise ValueError(f"{weight.name}: the moments are of {len(counts)} experts, the weight has {experts}")
            matrices = weight.matrix().chunk(experts)
            parts.append([None] * len(matrices))
            for place, matrix in enumerate(matrices):
                name = f"{weight.name}[{place}]" if stacked else weight.name
                if counts[place] == 0:
                    parts[number][place] = round_to_nearest(matrix, scheme, scale_dtype=self._scale_dtype)
                else:
                    entry = (number, place, name, matrix, gram[place] if stacked else gram, scheme)
                    queues.setdefault(tuple(matrix.shape), []).append(entry)
        for shape, queue in queues.items():
            together = max(1, _TOGETHER // (shape[0] * shape[1] + shape[1] ** 2))
            for start in range(0, len(queue), together):
                self._work_off(queue[start : start + together], parts)
        return [_joined([p for p in pieces if p is not None]) for pieces in parts]

    def _work_off(
        self, queue: Sequence[tuple[int, int, str, Tensor, Tensor, Scheme]], parts: list[list[QuantizedWeight | None]]
    ) -> None:
        _, _, _, matrices, grams, schemes = zip(*queue, strict=True)
        found = gptq_batch(matrices, grams, schemes, damping=self._damping, scale_dtype=self._scale_dtype)
        for (number, place, name, *_), result in zip(queue, found, strict=True):
            parts[number][place] = result.weight
            if result.damping is None:
                text = f"{name}: no damping made its inputs' Gram matrix positive definite; rounded to nearest"
                self._told.setdefault(name, text)
            elif result.damping > self._damping * 1.01:
                text = f"{name}: its inputs' Gram matrix needed damping {result.damping:g} instead of {self._damping:g}"
                self._told.setdefault(name, text)

    def _tell_missing(self, name: str, counts: Sequence[int]) -> None:
        if 0 in counts:
            without = ", ".join(str(place) for place, count in enumerate(counts) if count == 0)
            what = f"experts {without} saw" if len(counts) > 1 else "it saw"
            self._told.setdefault(name, f"{name}: {what} no calibration token; rounded to nearest")


def _joined(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """The rows of several matrices below one another."""
    zeros = [p.zero for p in parts if p.zero is not None]
    codes, scale = torch.cat([p.codes for p in parts]), torch.cat([p.scale for p in parts])
    return QuantizedWeight(codes, scale, torch.cat(zeros) if zeros else None, parts[0].scheme)
