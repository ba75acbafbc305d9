"""Stochastic estimation of the trace and of the traces of all diagonal blocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from curvature.distributed import ALONE, Processes
from curvature.estimate import Progress, confidence_interval, mean_and_stderr
from curvature.groups import Group, check_disjoint, group_inner
from curvature.operators import LinearOperator
from curvature.probes import rademacher
from curvature.sampling import check_rule, collect
from curvature.state import RunState
from curvature.vectors import inner

__all__ = ["TraceEstimate", "trace"]

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, eq=False)
class TraceEstimate:
    """Estimated trace with its standard error, in loss units per squared parameter unit.

    Attributes:
        value: Estimate of tr(H).
        stderr: Its standard error, from the spread of the probes.
        per_block: {parameter name: (estimate of tr(H_tt), standard error)}. The blocks' errors are correlated: sums of
            blocks get theirs from `grouped`, not from adding these up.
        products: Number of operator products that the estimate is made of.
        converged: Whether stderr <= tol * |value|.
        seed: Seed of the probes.
        samples: The probes' contributions, float64 [products, blocks], blocks in the order of `per_block`.
        group_samples: {group name: the probes' contributions to it, float64 [products]}, for the groups asked for.
    """

    value: float
    stderr: float
    per_block: dict[str, tuple[float, float]]
    products: int
    converged: bool
    seed: int
    samples: npt.NDArray[np.float64] = field(repr=False)
    group_samples: dict[str, npt.NDArray[np.float64]] = field(default_factory=dict, repr=False)

    @property
    def per_group(self) -> dict[str, tuple[float, float]]:
        """{group name: (estimate of the trace of its diagonal block, standard error)}, for the groups asked for."""
        return {name: mean_and_stderr(samples) for name, samples in self.group_samples.items()}

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Confidence interval of the total that allows for skewed samples; see `curvature.estimate`."""
        return confidence_interval(self.samples.sum(axis=1), level)

    def grouped(self, key: Callable[[str], _Key]) -> dict[_Key, tuple[float, float]]:
        """Traces of sums of blocks, with the standard error of each sum.

        Args:
            key: Maps a parameter's name to its group (a layer, a kind).

        Returns:
            {group: (value, stderr)}, groups in order of their first parameter.
        """
        groups: dict[_Key, list[int]] = {}
        for column, name in enumerate(self.per_block):
            groups.setdefault(key(name), []).append(column)
        return {g: mean_and_stderr(self.samples[:, columns].sum(axis=1)) for g, columns in groups.items()}


def trace(
    op: LinearOperator,
    *,
    probes: int | None = None,
    tol: float = 0.05,
    max_products: int = 100,
    min_products: int = 10,
    seed: int = 0,
    groups: Sequence[Group] = (),
    progress: Progress | None = None,
    state: RunState | None = None,
    processes: Processes = ALONE,
) -> TraceEstimate:
    """Hutchinson's estimator of the trace, for the whole matrix and every diagonal block at once.

        tr(H) = E[z . Hz],   tr(H_tt) = E[z_t . (Hz)_t]   for independent signs z

    Unbiased. It stops when the standard error of the total falls to `tol * |value|`; the rule looks at the spread of
    all probes and never at how the running mean moves, and not before `min_products`, because the spread of a few
    probes says little. A total near zero against the size of its parts cannot reach a relative tolerance, and runs to
    `max_products`.

    The rule looks at the probes one by one in their order, also where several processes have computed them at the same
    time: what came after the probe that it stops at is left out.

    Cost: one product per probe.

    Args:
        op: The operator.
        probes: Use exactly this many probes (at least 2) and no stopping rule.
        tol: Relative standard error at which to stop.
        max_products: Stop there in any case.
        min_products: Do not stop before.
        seed: Seed of the probes; see `curvature.probes`.
        groups: Further groups of entries, disjoint or not, such as attention heads: the traces of their diagonal blocks
            come from the same products (`curvature.groups.group_inner`), and the stopping rule does not look at them.
        progress: Called after each product.
        state: Where the samples are saved as they come, and continued from, to the bit; see `curvature.state`.
        processes: Who shares the probes. Every process gets the estimate, the same for any number of them.

    Returns:
        The estimate; see `TraceEstimate`.

    Raises:
        ValueError: If a count or the tolerance is out of range, a group reaches outside the parameters, or two groups
            have one name.

    Source: Hutchinson, A stochastic estimator of the trace of the influence matrix (1990).
    """
    if probes is not None:
        if probes < 2:
            raise ValueError(f"probes must be at least 2 (one probe has no standard error), got {probes}")
        min_products = max_products = probes
    check_rule(tol, min_products, max_products)
    if len({group.name for group in groups}) < len(groups):
        raise ValueError("groups: two of them have the same name")
    for group in groups:
        check_disjoint(op.space, [group])
    part = None
    if state is not None:
        arguments: dict[str, Any] = {"seed": seed, "tol": tol, "least": min_products, "most": max_products}
        if groups:
            arguments["groups"] = [asdict(group) for group in groups]
        part = state.part("trace", op, arguments)
    blocks = len(op.space.blocks)
    found = collect(
        partial(_sample, op, groups, seed),
        tol=tol,
        least=min_products,
        most=max_products,
        columns=blocks,
        progress=progress,
        part=part,
        processes=processes,
    )
    table, by_group = np.split(found.rows, [blocks], axis=1)
    return TraceEstimate(
        value=found.value,
        stderr=found.stderr,
        per_block={name: mean_and_stderr(column) for name, column in zip(op.space.names, table.T, strict=True)},
        products=len(table),
        converged=found.converged,
        seed=seed,
        samples=table,
        group_samples={group.name: column for group, column in zip(groups, by_group.T, strict=True)},
    )


def _sample(op: LinearOperator, groups: Sequence[Group], seed: int, index: int) -> npt.NDArray[np.float64]:
    """One probe's contribution to the trace of each block, then of each group."""
    z = rademacher(op.space, seed=seed, index=index)
    product = op @ z
    pairs = zip(op.space.split(z), op.space.split(product), strict=True)
    found = [torch.stack([inner(a, b) for a, b in pairs])]
    if groups:
        found.append(group_inner(op.space, groups, z, product))
    return torch.cat(found).cpu().numpy()
