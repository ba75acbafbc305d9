"""Every estimator that keeps a state, on a matrix whose products can be interrupted, and in a process of its own."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from curvature_oracles import MatrixOperator, with_spectrum
from torch import Tensor

from curvature import (
    LinearOperator,
    RunState,
    block_traces,
    condition_number,
    diagonal,
    eigenpairs,
    frobenius_norm,
    groups_by,
    hutchpp,
    lanczos,
    spectral_density,
    trace,
    xtrace,
)
from curvature.block_traces import Probing
from curvature.distributed import ALONE, join, leave
from curvature.groups import Group
from curvature.groups import Part as Entries

MATRIX, _ = with_spectrum([30.0, 20.0, 10.0, 5.0, *np.linspace(-1, 1, 30), -4.0, -8.0])


class Interrupted(BaseException):
    """Like Ctrl-C: not an Exception."""


class Interruptible(MatrixOperator):
    """A matrix whose product number `last` + 1 does not come back, and whose others take their time."""

    def __init__(self, last: int | None = None, seconds: float = 0.0) -> None:
        super().__init__(MATRIX, [6, 30])
        self._end, self._seconds = last, seconds

    def _apply(self, rows: torch.Tensor) -> torch.Tensor:
        if self.applied == self._end:
            raise Interrupted
        time.sleep(self._seconds)
        return super()._apply(rows)


def _lanczos(op: MatrixOperator, **options: Any) -> list[Any]:
    found = lanczos(op, steps=12, top=3, vectors=True, **options)
    return [found.eigenvalues, found.residuals, found.eigenvectors, found.asymmetry, found.products]


def _density(op: MatrixOperator, **options: Any) -> list[Any]:
    found = spectral_density(op, probes=3, steps=4, **options)
    return [found.values, found.grid, found.stderr, found.trace, *found.extremes(2)]


def _eigenpairs(op: MatrixOperator, **options: Any) -> list[Any]:
    found = eigenpairs(op, top=2, basis=7, tol=1e-9, vectors=True, **options)
    assert found.restarts > 2
    return [found.eigenvalues, found.residuals, found.eigenvectors, found.products, found.restarts, found.converged]


def _trace(op: MatrixOperator, **options: Any) -> list[Any]:
    found = trace(op, tol=0.2, **options)
    return [found.samples, found.value, found.stderr, found.per_block, found.products, found.interval()]


def _trace_with_groups(op: MatrixOperator, **options: Any) -> list[Any]:
    halves = [Group(f"half {i}", (Entries("block1", 0, 15 * i, 15 * i + 15),)) for i in range(2)]
    found = trace(op, tol=0.2, groups=halves, **options)
    return [found.samples, found.value, found.per_block, found.per_group, *found.group_samples.values()]


def _hutchpp(op: MatrixOperator, **options: Any) -> list[Any]:
    found = hutchpp(op, rank=4, tol=0.1, max_products=24, **options)
    assert len(found.samples) > 4
    return [found.samples, found.value, found.stderr, found.per_block, found.products, found.converged]


def _xtrace(op: MatrixOperator, **options: Any) -> list[Any]:
    found = xtrace(op, tol=0.1, max_products=24, min_products=8, **options)
    assert 8 < found.products < 24
    return [found.samples, found.value, found.stderr, found.per_block, found.products, found.converged]


def _frobenius(op: MatrixOperator, **options: Any) -> list[Any]:
    found = frobenius_norm(op, tol=0.1, **options)
    return [found.value, found.stderr, found.per_block, found.products, found.converged]


def _condition(op: MatrixOperator, **options: Any) -> list[Any]:
    found = condition_number(op, max_products=9, **options)
    return [found.largest, found.smallest, found.largest_residual, found.lower_bound, found.products]


def _xdiag(op: MatrixOperator, **options: Any) -> list[Any]:
    found = diagonal(op, method="xdiag", tol=0.4, max_products=24, min_products=6, **options)
    assert 6 < found.products < 24
    return [found.values, found.stderr, found.relative_error, found.per_block, found.products, found.converged]


def _to_the_last_product(op: MatrixOperator, **options: Any) -> list[Any]:
    """Both that take two products a vector, with a tolerance out of reach: the budget ends them."""
    traces = xtrace(op, tol=1e-9, max_products=10, **options)
    entries = diagonal(op, method="xdiag", tol=1e-9, max_products=10, **options)
    assert traces.products == entries.products == 10
    return [traces.samples, traces.value, entries.values, entries.stderr]


def _block_traces(op: MatrixOperator, probing: Probing, **options: Any) -> list[Any]:
    found = block_traces(
        op, groups_by(op.space, str), tol=0.4, min_probes=4, max_products=26, probing=probing, **options
    )
    return [found.groups, found.full_products, found.restricted_products, found.products, found.converged]


def _diagonal(op: MatrixOperator, **options: Any) -> list[Any]:
    found = diagonal(op, tol=0.2, max_products=14, **options)
    return [found.values, found.stderr, found.relative_error, found.per_block, found.products, found.converged]


ESTIMATES: dict[str, Callable[..., list[Any]]] = {
    "lanczos": _lanczos,
    "lanczos-in-host-memory": lambda op, **options: _lanczos(op, offload=True, **options),
    "density": _density,
    "eigenpairs": _eigenpairs,
    "trace": _trace,
    "trace-with-groups": _trace_with_groups,
    "diagonal": _diagonal,
    "xdiag": _xdiag,
    "hutchpp": _hutchpp,
    "xtrace": _xtrace,
    "xtrace-and-xdiag-to-the-last-product": _to_the_last_product,
    "frobenius": _frobenius,
    "condition": _condition,
    "block-traces-by-slices": partial(_block_traces, probing="slices"),
    "block-traces-by-own-probes": partial(_block_traces, probing="restricted"),
    "block-traces-as-measured": partial(_block_traces, probing="measured"),
}

SHARED = ("density", "trace", "diagonal", "frobenius", "block-traces-by-slices", "block-traces-by-own-probes")
"""Those whose probes several processes can share."""


def equal_times(op: LinearOperator, z: Tensor) -> tuple[float, Tensor]:
    """Products that take as long as their numbers say: what `block_traces` measures decides what it does."""
    return {36: 1.0, 6: 0.3, 30: 0.8}[op.space.size], op @ z


def estimate(name: str, folder: Path, processes: tuple[int, int, int] | None = None) -> None:
    """Go on with an estimate from the state in a folder, and leave what it comes to in a file there.

    Args:
        name: Which of `ESTIMATES`.
        folder: Where the state is, or will be.
        processes: (rank, number of processes, port) as a launcher tells them, or None.
    """
    torch.set_num_threads(1)
    block_traces.__globals__["_timed"] = equal_times
    ranks = ALONE
    if processes is not None:
        rank, count, port = map(str, processes)
        os.environ |= {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks = join()
    state = RunState.open(folder / "state", {"estimate": name}, resume=True, processes=ranks)
    shared = {} if processes is None else {"processes": ranks}
    found = ESTIMATES[name](Interruptible(seconds=0.003), state=state, **shared)
    (folder / f"found-{ranks.rank}.pickle").write_bytes(pickle.dumps(found))
    leave()


def found(folder: Path, rank: int = 0) -> list[Any]:
    """What `estimate` has left."""
    content: list[Any] = pickle.loads((folder / f"found-{rank}.pickle").read_bytes())
    return content


def same(a: list[Any], b: list[Any]) -> bool:
    def one(x: Any, y: Any) -> bool:
        if isinstance(x, torch.Tensor):
            return torch.equal(x, y)
        return bool(np.array_equal(x, y)) if isinstance(x, np.ndarray) else bool(x == y)

    return len(a) == len(b) and all(map(one, a, b))
