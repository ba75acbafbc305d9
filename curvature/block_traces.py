"""Traces of many diagonal blocks: slices of full products, or probes of single blocks, whichever gets there first."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from curvature.distributed import ALONE, Processes
from curvature.estimate import Progress, mean_and_stderr
from curvature.groups import Group, block_operator, check_disjoint, group_inner
from curvature.linear_operator import LinearOperator
from curvature.probes import rademacher
from curvature.state import Part, RunState, Saved
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
    state: RunState | None = None,
    processes: Processes = ALONE,
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
        state: Where samples and times are saved as they come, and continued from: to the bit, but for what "measured"
            makes of further times; see `curvature.state`.
        processes: Who shares the probes. Every process gets the estimates; with "slices" and "restricted" they are the
            same for any number of processes.

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
    rule = {"tol": tol, "of_total": of_total, "most": max_products, "least": min_probes, "probing": probing}
    part = None
    if state is not None:
        part = state.part("block-traces", op, {**rule, "seed": seed, "groups": [asdict(g) for g in groups]})
    run = _Run(op, groups, tol, of_total, max_products, min_probes, seed, probing, progress, part)
    with nullcontext() if part is None or not processes.leads else part.saving():
        while (action := run.action()) is not None:
            own = partial(run.sample, action, processes.rank)
            for found in processes.gather(own):
                # What the probe before it has settled otherwise is left out, as if there were one process.
                if found is not None and run.action() == action:
                    run.add(action, *found)
            if part is not None and processes.leads:
                part.offer(run.snapshot)
    return run.result()


_FULL = -1
"""In place of a group's number: a probe of the whole operator."""


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
        probing: Probing,
        progress: Progress | None,
        part: Part | None,
    ) -> None:
        self._op, self._groups, self._tol, self._of_total = op, list(groups), tol, of_total
        self._most, self._least, self._seed, self._probing = most, least, seed, probing
        self._operators: dict[int, LinearOperator] = {}
        self._log: list[tuple[int, float, list[float]]] = []  # of each product: what it probed, seconds, samples
        self._slices: list[list[float]] = []
        self._own: list[list[float]] = [[] for _ in groups]
        self._full_seconds: list[float] = []
        self._own_seconds: list[list[float]] = [[] for _ in groups]
        self._known: tuple[int, list[GroupTrace]] = -1, []
        self._progress: Progress | None = None
        for piece in () if part is None else part.pieces:
            rows = zip(piece["probed"].tolist(), piece["seconds"].tolist(), piece["samples"].tolist(), strict=True)
            for probed, seconds, samples in rows:
                self.add(probed, seconds, samples if probed == _FULL else samples[:1])
        self._progress = progress

    @property
    def products(self) -> int:
        return len(self._log)

    def action(self) -> int | None:
        """What to probe next: the whole operator, one group, or nothing any more."""
        if self.products >= self._most:
            return None
        if self._probing == "restricted":
            lacking = [g for g, samples in enumerate(self._own) if len(samples) < self._least]
        elif len(self._slices) < self._least:
            return _FULL
        else:  # a group's first probes are made in a row
            lacking = [g for g, samples in enumerate(self._own) if 0 < len(samples) < _PILOT]
        if lacking:
            return lacking[0]
        open_groups = self.open()
        if not open_groups:
            return None
        g = max(open_groups, key=self.needed)
        by_slices = self._probing == "slices" or (
            self._probing == "measured" and not self.own_probes_pay(g, open_groups)
        )
        return _FULL if by_slices else g

    def sample(self, action: int, ahead: int) -> tuple[float, list[float]] | None:
        """Seconds and samples of the probe that is `ahead` of the next one; None beyond the last product."""
        if self.products + ahead >= self._most:
            return None
        if action == _FULL:
            z = rademacher(self._op.space, seed=self._seed, index=len(self._slices) + ahead)
            seconds, product = _timed(self._op, z)
            return seconds, group_inner(self._op.space, self._groups, z, product).tolist()
        if action not in self._operators:
            self._operators[action] = block_operator(self._op, self._groups[action])
        op = self._operators[action]
        z = rademacher(op.space, seed=self._seed, index=len(self._own[action]) + ahead)
        seconds, product = _timed(op, z)
        return seconds, [float(inner(z, product))]

    def add(self, action: int, seconds: float, samples: list[float]) -> None:
        if action == _FULL:
            self._slices.append(samples)
            self._full_seconds.append(seconds)
        else:
            self._own[action] += samples
            self._own_seconds[action].append(seconds)
        self._log.append((action, seconds, samples))
        if self._progress is not None:
            left = len(self.open()) if self.products >= self._least else len(self._groups)
            self._progress(self.products, self._most, f"{left} of {len(self._groups)} groups left")

    def snapshot(self) -> Saved:
        probed, seconds, samples = zip(*self._log, strict=True)
        table = torch.zeros(len(samples), len(self._groups), dtype=torch.float64)
        for row, values in zip(table, samples, strict=True):
            row[: len(values)] = torch.tensor(values, dtype=torch.float64)
        times = torch.tensor(seconds, dtype=torch.float64)
        return Saved({"products": len(samples)}, {"probed": torch.tensor(probed), "seconds": times, "samples": table})

    def open(self) -> list[int]:
        """Groups that are not done."""
        pairs = enumerate(zip(self.estimates(), self._targets(), strict=True))
        return [g for g, (estimate, target) in pairs if not self._done(estimate, target)]

    def needed(self, g: int) -> float:
        """How many more probes a group would need by the method that its estimate comes from now."""
        estimate, target = self.estimates()[g], self._target(g)
        return estimate.probes * ((estimate.stderr / target) ** 2 - 1) if target else math.inf

    def own_probes_pay(self, g: int, open_groups: Sequence[int]) -> bool:
        """Whether to leave the worst open group to probes of its own."""
        own, target = self._own[g], self._target(g)
        if len(own) >= self._least and self.estimates()[g].method == "restricted":
            return True  # it is by its own probes already, and not done
        others = max((self.needed(h) for h in open_groups if h != g), default=0.0)
        saved = float(np.mean(self._full_seconds)) * (self.needed(g) - max(others, 0.0))
        if len(own) < _PILOT:
            guess = float(np.mean(self._full_seconds))  # a product in one group costs no more than that
            return _PILOT * guess < saved
        spread = float(np.var(own, ddof=1))
        probes = max(spread / target**2, float(self._least)) - len(own) if target else math.inf
        return float(np.mean(self._own_seconds[g])) * probes < saved

    def estimates(self) -> list[GroupTrace]:
        """The better founded of the two estimates of each group."""
        if self._known[0] != self.products:
            self._known = self.products, [self._estimate(g) for g in range(len(self._groups))]
        return self._known[1]

    def _estimate(self, g: int) -> GroupTrace:
        choices: list[GroupTrace] = []
        if len(self._slices) >= 2:
            value, stderr = mean_and_stderr(np.array([row[g] for row in self._slices]))
            choices.append(GroupTrace(value, stderr, "slices", len(self._slices)))
        if len(self._own[g]) >= (self._least if choices else 2):
            value, stderr = mean_and_stderr(np.array(self._own[g]))
            choices.append(GroupTrace(value, stderr, "restricted", len(self._own[g])))
        return min(choices, key=lambda c: c.stderr, default=GroupTrace(math.nan, math.inf, "slices", 0))

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

    def _target(self, g: int) -> float:
        if self._of_total:
            return self._targets()[g]
        return self._tol * abs(self.estimates()[g].value)

    def _done(self, estimate: GroupTrace, target: float) -> bool:
        return estimate.probes >= self._least and estimate.stderr <= target


def _timed(op: LinearOperator, z: Tensor) -> tuple[float, Tensor]:
    """Seconds of a product, and the product; its check for finite numbers waits for the device."""
    started = time.perf_counter()
    product: Tensor = op @ z
    return time.perf_counter() - started, product
