"""Several processes that share one run: each works on its part, and all see the same results in the same order.

Nothing is ever added up on the way. What a process computes is gathered whole and put together in the order of the
work, not of the processes, so that a sum has the same rounding however many processes there are.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from curvature.estimate import Progress
from curvature.operators import LinearOperator
from curvature.probes import normal
from curvature.vectors import inner, norm

__all__ = ["ALONE", "PeerError", "Processes", "join", "launched", "leave", "symmetry_error"]

_T = TypeVar("_T")

_FAILURE = "flashbob/failure"

_PATIENCE = timedelta(days=7)
"""How long a process waits for the others: a product may take long, and a lost process is noticed without a clock."""


class PeerError(RuntimeError):
    """Another process of this run has failed; the message is its own."""


@dataclass(frozen=True)
class Processes:
    """The processes of one run, seen from one of them.

    Attributes:
        rank: Number of this process.
        count: How many there are.
        store: Where a process leaves word of its failure; None for a single process.
    """

    rank: int = 0
    count: int = 1
    store: Store | None = field(default=None, repr=False)

    @property
    def leads(self) -> bool:
        """Whether this is the process that prints and writes results."""
        return self.rank == 0

    def gather(self, work: Callable[[], _T]) -> list[_T]:
        """Do this process's part of the work, and get every process's result, in the order of ranks.

        Args:
            work: This process's part. Its result travels pickled, so it should be small.

        Raises:
            PeerError: If the part of a process failed, with its message; in the leading process its own failure is
                raised as it is. The others notice at once where they call `listen` in their work.
        """
        if self.count == 1:
            return [work()]
        failure: Exception | None = None
        mine: tuple[str | None, _T | None] = (None, None)
        try:
            mine = (None, work())
        except Exception as error:
            if _known(error):
                raise
            failure = error
            mine = (_told(error), None)
            self._announce(error)
        everyone = self._exchange(mine)
        told = [f"process {rank} of {self.count}: {text}" for rank, (text, _) in enumerate(everyone) if text]
        if failure is not None and (self.leads or not told) and not isinstance(failure, PeerError):
            _everyone_knows.append(failure)
            raise failure
        if told or failure is not None:
            _everyone_knows.append(PeerError(told[0] if told else "another process of this run has ended"))
            raise _everyone_knows[-1] from failure
        return [result for _, result in everyone]  # type: ignore[misc]

    def together(self, work: Callable[[], _T]) -> _T:
        """Do the same work in every process, and go on only when all have succeeded; see `gather` for failures."""
        kept: list[_T] = []
        self.gather(lambda: kept.append(work()))
        return kept[0]

    def share(self, tasks: Sequence[Callable[[], _T]]) -> list[_T]:
        """Results of all tasks in their order; task i is done by process `i % count`. See `gather` for failures."""
        parts = self.gather(lambda: [task() for task in tasks[self.rank :: self.count]])
        return [parts[i % self.count][i // self.count] for i in range(len(tasks))]

    def listen(self) -> None:
        """Ask whether another process has failed. Cost: one message to the store.

        Raises:
            PeerError: If one has, or if the processes' launcher is gone.
        """
        if self.store is None:
            return
        try:
            failed = self.store.check([_FAILURE])
        except RuntimeError as error:
            raise PeerError("the launcher of the processes is gone") from error
        if failed:
            raise PeerError("")

    def listening(self, progress: Progress | None) -> Progress | None:
        """A progress function that also listens, after each product, for the failure of another process."""
        if self.count == 1:
            return progress

        def report(done: int, total: int, status: str) -> None:
            self.listen()
            if progress is not None:
                progress(done, total, status)

        return report

    def _announce(self, error: Exception) -> None:
        if self.store is not None and not isinstance(error, PeerError):
            try:
                self.store.set(_FAILURE, str(self.rank))
            except RuntimeError as lost:
                raise error from lost

    def _exchange(self, mine: _T) -> list[_T]:
        everyone: list[_T] = [mine] * self.count
        try:
            dist.all_gather_object(everyone, mine)
        except RuntimeError as error:
            gone = PeerError("another process of this run has ended")
            _everyone_knows.append(gone)
            raise gone from error
        return everyone


ALONE = Processes()
"""A single process."""


def launched() -> tuple[int, int, int]:
    """(rank, number of processes, rank on this machine) as a launcher such as torchrun states them; (0, 1, 0) alone.

    Raises:
        ValueError: If the launcher's environment variables are not numbers that fit together.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if not all(name in os.environ for name in names[:2]):
        return 0, 1, 0
    given = {name: os.environ.get(name, "0") for name in names}
    try:
        rank, count, local = (int(given[name]) for name in names)
    except ValueError:
        rank, count, local = -1, 0, 0
    if not 0 <= rank < count:
        raise ValueError(f"the launcher's environment does not fit together: {given}; start with torchrun")
    return rank, count, local


def join() -> Processes:
    """Join the processes that a launcher such as torchrun has started; a single process is on its own.

    Small results travel through gloo, on machines with GPUs too; tensors on a GPU would travel through NCCL.

    Raises:
        ValueError: If the launcher's environment is not complete.
    """
    rank, count, _ = launched()
    if count == 1:
        return ALONE
    if not dist.is_initialized():
        if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
            raise ValueError(
                f"{count} processes are announced but {', '.join(missing)} is not set; start with torchrun"
            )
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        store, rank, count = next(rendezvous("env://", timeout=timedelta(minutes=5)))
        # Two stores under two prefixes: word of a failure must not end up among the group's own keys.
        group = PrefixStore("group", store)
        dist.init_process_group(backend, store=group, rank=rank, world_size=count, timeout=_PATIENCE)
        _joined.append(Processes(rank, count, PrefixStore("run", store)))
    return _joined[-1]


_joined: list[Processes] = []

_everyone_knows: list[Exception] = []
"""Failures that have been exchanged, on their way up: work that is part of other work must not exchange them again."""


def _known(error: Exception) -> bool:
    return any(error is known for known in _everyone_knows)


def leave() -> None:
    """Leave the processes that `join` has joined, if it has; some of them may be gone already."""
    if _joined:
        _joined.clear()
        _everyone_knows.clear()
        with suppress(RuntimeError):
            dist.destroy_process_group()


def symmetry_error(op: LinearOperator, seed: int = 0, processes: Processes = ALONE) -> float:
    """`LinearOperator.symmetry_error` from two single products, which two processes do at the same time.

        sqrt(P) |u.Hv - v.Hu| / (|u| |Hv|)   for normal vectors u, v

    The same figure for any number of processes.

    Args:
        op: The operator.
        seed: Seed of the pair of vectors.
        processes: Who shares the work.

    Returns:
        The error, or 0 where Hv is zero.
    """
    u, v = (normal(op.space, seed=seed, index=index) for index in range(2))

    def product(of: torch.Tensor, other: torch.Tensor) -> tuple[float, float]:
        result = op @ of
        return float(inner(other, result)), norm(result)

    (u_hv, length), (v_hu, _) = processes.share([lambda: product(v, u), lambda: product(u, v)])
    scale = norm(u) * length / op.space.size**0.5
    return abs(u_hv - v_hu) / scale if scale else 0.0


def _told(error: Exception) -> str:
    """One line about an error, for the other processes; empty where it only repeats theirs."""
    if isinstance(error, PeerError):
        return str(error)
    return " ".join(str(error).split()) or type(error).__name__
