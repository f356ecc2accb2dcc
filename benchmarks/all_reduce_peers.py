"""Other libraries' all-reduces between processes: what a worker of a team sets up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from benchmarks import peer
from benchmarks.all_reduce_threads import sums_in_graph
from benchmarks.case import Prepared
from benchmarks.operands import contribution, error_of

__all__ = ["gloo", "mpi", "tensorflow"]


@contextmanager
def mpi(size: int) -> Iterator[Prepared]:
    """Sum with `Allreduce` of whichever MPI started this process."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    mine = contribution(world.Get_rank(), size // 4)
    total = np.zeros_like(mine)

    def step() -> None:
        world.Allreduce(mine, total, MPI.SUM)

    step()
    yield Prepared(step, error_of(total, world.Get_size()))


@contextmanager
def gloo(size: int) -> Iterator[Prepared]:
    """Sum in place with torch.distributed."""
    torch, ranks = peer.torch_group()
    mine = torch.from_numpy(contribution(torch.distributed.get_rank(), size // 4))
    torch.distributed.all_reduce(mine)
    error = error_of(mine.numpy(), ranks)
    # In place, sums would grow from call to call; zeros do not, and take as long.
    mine.zero_()
    yield Prepared(lambda: torch.distributed.all_reduce(mine), error)


@contextmanager
def tensorflow(size: int, calls: int) -> Iterator[Prepared]:
    """Sum with `ctx.all_reduce` under MultiWorkerMirroredStrategy, one call after another."""
    tf, strategy = peer.multi_worker()
    index = strategy.cluster_resolver.task_id
    mine = tf.constant(contribution(index, size // 4))

    run = sums_in_graph(tf, strategy, calls)
    total, _ = run(mine)
    (own,) = strategy.experimental_local_results(total)
    yield Prepared(lambda: run(mine), error_of(own.numpy(), strategy.num_replicas_in_sync))
