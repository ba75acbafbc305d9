"""Traces of many diagonal blocks: slices of full products, or probes of single blocks, whichever gets there first."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import numpy as np
from torch import Tensor

from curvature.estimate import Progress, mean_and_stderr
from curvature.groups import Group, GroupOperator, check_disjoint, group_inner
from curvature.linear_operator import LinearOperator
from curvature.model_operator import ModelOperator
from curvature.probes import rademacher
from curvature.vectors import inner

__all__ = ["BlockTraces", "GroupTrace", "Probing", "block_traces"]

Probing: TypeAlias = Literal["measured", "slices", "restricted"]

_PILOT = 4


@dataclass(frozen=True)
class GroupTrace:
    """Estimated trace of one group's diagonal block.

    Attributes:
        value: Estimate of tr(H_gg).
        stderr: Its standard error.
        method: "slices" of full products, or "restricted" probes of this block.
        probes: Number of probes behind it.
    """

    value: float
    stderr: float
    method: Literal["slices", "restricted"]
    probes: int


@dataclass(frozen=True)
class BlockTraces:
    """Traces of groups.

    Attributes:
        groups: {group name: estimate}.
        full_products: Products of the whole operator.
        restricted_products: Products with a direction in one group.
        products: The sum of both.
        seconds: Mean time of a product of either kind.
        converged: Whether every group met the tolerance.
        seed: Seed of the probes.
    """

    groups: dict[str, GroupTrace]
    full_products: int
    restricted_products: int
    products: int
    seconds: dict[str, float] = field(repr=False)
    converged: bool
    seed: int


def block_traces(
    op: LinearOperator,
    groups: Sequence[Group],
    *,
    tol: float = 0.05,
    of_total: bool = False,
    max_products: int = 200,
    min_probes: int = 10,
    seed: int = 0,
    probing: Probing = "measured",
    progress: Progress | None = None,
) -> BlockTraces:
    """Traces of the diagonal blocks of disjoint groups, each to a tolerance.

    One full product gives a sample for every group at once (z_g . (Hz)_g), but with the noise of all columns outside
    the block. A probe that is zero outside the group lacks that noise, is often cheaper, and serves one group only.

    With "measured", full products are made until the group that needs most of them would cost less by its own probes:
    from the measured variances and times, how long all open groups would take by slices is compared with how long they
    would take without the worst one, plus its own probes. Times vary, and with them the choice; "slices" and
    "restricted" fix it.

    Each estimate is made of the probes of one method, independent of each other, and stops on its own standard error,
    never before `min_probes`.

    Args:
        op: The operator.
        groups: Disjoint groups of its entries; see `curvature.groups` and `curvature.attention_heads`.
        tol: A group is done when its stderr is at most `tol` times its absolute value,
        of_total: or, with this, times the absolute value of the sum over all groups.
        max_products: Stop there in any case.
        min_probes: Probes of a group at least.
        seed: Seed of the probes.
        probing: "measured", "slices" or "restricted".
        progress: Called after each product.

    Returns:
        The estimates, each with the method that was used; see `BlockTraces`.

    Raises:
        ValueError: If a number is out of range, `probing` is unknown, or the groups overlap or are empty.
    """
    if probing not in get_args(Probing):
        raise ValueError(f"probing must be one of {', '.join(get_args(Probing))}, got {probing!r}")
    if not (tol > 0 and math.isfinite(tol)):
        raise ValueError(f"tol must be positive and finite, got {tol}")
    least = min_probes * (len(groups) if probing == "restricted" else 1)
    if min_probes < 2 or max_products < least:
        raise ValueError(
            f"min_probes must be at least 2, and max_products at least {least} for {len(groups)} groups by {probing!r} "
            f"probes; got {min_probes} and {max_products}"
        )
    if not groups:
        raise ValueError("groups: there is none")
    check_disjoint(op.space, groups)
    run = _Run(op, groups, tol, of_total, max_products, min_probes, seed, progress)
    if probing != "restricted":
        run.full(min_probes)
    else:
        for g in range(len(groups)):
            run.restricted(g, min_probes)
    while run.products < max_products and (open_groups := run.open()):
        g = max(open_groups, key=run.needed)
        if probing == "slices" or (probing == "measured" and not run.own_probes_pay(g, open_groups)):
            run.full(1)
        else:
            run.restricted(g, max(1, _PILOT - len(run.own[g])))
    return run.result()


class _Run:
    """Samples so far, and what they say about what is still needed."""

    def __init__(
        self,
        op: LinearOperator,
        groups: Sequence[Group],
        tol: float,
        of_total: bool,
        most: int,
        least: int,
        seed: int,
        progress: Progress | None,
    ) -> None:
        self._op, self._groups, self._tol, self._of_total = op, list(groups), tol, of_total
        self._most, self._least, self._seed, self._progress = most, least, seed, progress
        self._slices: list[np.ndarray[tuple[int], np.dtype[np.float64]]] = []
        self.own: list[list[float]] = [[] for _ in groups]
        self._operators: dict[int, LinearOperator] = {}
        self._full_seconds: list[float] = []
        self._own_seconds: list[list[float]] = [[] for _ in groups]

    @property
    def products(self) -> int:
        return len(self._slices) + sum(map(len, self.own))

    def full(self, count: int) -> None:
        """Probes of the whole operator."""
        for _ in range(min(count, self._most - self.products)):
            z = rademacher(self._op.space, seed=self._seed, index=len(self._slices))
            product = _timed(self._full_seconds, self._op, z)
            self._slices.append(group_inner(self._op.space, self._groups, z, product).cpu().numpy())
            self._tell()

    def restricted(self, g: int, count: int) -> None:
        """Probes of one group."""
        if g not in self._operators:
            self._operators[g] = _block(self._op, self._groups[g])
        op = self._operators[g]
        for _ in range(min(count, self._most - self.products)):
            z = rademacher(op.space, seed=self._seed, index=len(self.own[g]))
            self.own[g].append(float(inner(z, _timed(self._own_seconds[g], op, z))))
            self._tell()

    def open(self) -> list[int]:
        """Groups that are not done."""
        target = self._targets()
        return [g for g, estimate in enumerate(self.estimates()) if not self._done(estimate, target[g])]

    def needed(self, g: int) -> float:
        """How many more probes a group would need by the method that its estimate comes from now."""
        estimate, target = self.estimates()[g], self._targets()[g]
        return estimate.probes * ((estimate.stderr / target) ** 2 - 1) if target else math.inf

    def own_probes_pay(self, g: int, open_groups: Sequence[int]) -> bool:
        """Whether to leave the worst open group to probes of its own."""
        if len(self.own[g]) >= self._least and self.estimates()[g].method == "restricted":
            return True  # it is by its own probes already, and not done
        others = max((self.needed(h) for h in open_groups if h != g), default=0.0)
        saved = float(np.mean(self._full_seconds)) * (self.needed(g) - max(others, 0.0))
        target = self._targets()[g]
        if len(self.own[g]) < _PILOT:
            guess = float(np.mean(self._full_seconds))  # a product in one group costs no more than that
            return _PILOT * guess < saved
        spread = float(np.var(self.own[g], ddof=1))
        probes = max(spread / target**2, float(self._least)) - len(self.own[g]) if target else math.inf
        return float(np.mean(self._own_seconds[g])) * probes < saved

    def estimates(self) -> list[GroupTrace]:
        """The better founded of the two estimates of each group."""
        found = []
        for g in range(len(self._groups)):
            choices: list[GroupTrace] = []
            if len(self._slices) >= 2:
                value, stderr = mean_and_stderr(np.array([row[g] for row in self._slices]))
                choices.append(GroupTrace(value, stderr, "slices", len(self._slices)))
            if len(self.own[g]) >= (self._least if choices else 2):
                value, stderr = mean_and_stderr(np.array(self.own[g]))
                choices.append(GroupTrace(value, stderr, "restricted", len(self.own[g])))
            best = GroupTrace(math.nan, math.inf, "slices", 0)
            found.append(min(choices, key=lambda c: c.stderr, default=best))
        return found

    def result(self) -> BlockTraces:
        own = [s for seconds in self._own_seconds for s in seconds]
        seconds = {"full": self._full_seconds, "restricted": own}
        return BlockTraces(
            groups={group.name: e for group, e in zip(self._groups, self.estimates(), strict=True)},
            full_products=len(self._slices),
            restricted_products=len(own),
            products=self.products,
            seconds={name: float(np.mean(values)) for name, values in seconds.items() if values},
            converged=not self.open(),
            seed=self._seed,
        )

    def _targets(self) -> list[float]:
        values = [abs(e.value) for e in self.estimates()]
        if self._of_total:
            values = [abs(sum(e.value for e in self.estimates()))] * len(values)
        return [self._tol * value for value in values]

    def _done(self, estimate: GroupTrace, target: float) -> bool:
        return estimate.probes >= self._least and estimate.stderr <= target

    def _tell(self) -> None:
        if self._progress is not None:
            left = len(self.open()) if self.products >= self._least else len(self._groups)
            self._progress(self.products, self._most, f"{left} of {len(self._groups)} groups left")


def _timed(seconds: list[float], op: LinearOperator, z: Tensor) -> Tensor:
    """A product; its check for finite numbers waits for the device."""
    started = time.perf_counter()
    product: Tensor = op @ z
    seconds.append(time.perf_counter() - started)
    return product


def _block(op: LinearOperator, group: Group) -> LinearOperator:
    if isinstance(op, ModelOperator) and group.whole:
        return op.restricted(part.parameter for part in group.parts)
    return GroupOperator(op, group)
