"""Our all-reduces between processes, by backend: what a worker of a team sets up.

Backends are called as the strategies call them, with arrays that are there beforehand, as MPI's
buffers are. The last one is what a user calls, and allocates its result.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.case import Prepared
from benchmarks.operands import contribution, error_of
from benchmarks.ours import TIMEOUT, backend, multi_worker

__all__ = ["all_reduce", "context_all_reduce", "in_place", "local", "reduce_update"]


def _call(kind: str, mine: Any) -> Any:
    from ndistribute.collective.backend import Call

    return Call(1, kind, "SUM", ((mine.dtype, mine.shape),))


@contextmanager
def all_reduce(size: int, way: str) -> Iterator[Prepared]:
    """Sum into an array of the caller's."""
    from ndistribute.collective.reduce_op import ReduceOp

    chosen = backend(way)
    mine = contribution(chosen.rank, size // 4)
    total = np.zeros_like(mine)
    call = _call("all_reduce", mine)

    def step() -> None:
        chosen.all_reduce(call, [mine], [total], ReduceOp.SUM, TIMEOUT)

    step()
    yield Prepared(step, error_of(total, chosen.size))


@contextmanager
def in_place(size: int) -> Iterator[Prepared]:
    """Sum where the processes see each other's arrays, as several replicas in a process do."""
    from ndistribute.collective.reduce_op import ReduceOp

    chosen = backend("shared")
    mine = contribution(chosen.rank, size // 4)
    call = _call("all_reduce", mine)
    arrays = [chosen.allocate(mine.dtype, mine.shape)]

    def step() -> None:
        chosen.all_reduce(call, arrays, arrays, ReduceOp.SUM, TIMEOUT)

    arrays[0][...] = mine
    step()
    error = error_of(arrays[0], chosen.size)
    arrays[0][...] = 0.0  # What is not filled again would grow with each sum, without end.
    yield Prepared(step, error)


@contextmanager
def reduce_update(size: int) -> Iterator[Prepared]:
    """Sum as an optimizer does: gradients lie where the tape writes those of weights.

    The total is handed over block by block, in the processor's cache.
    """
    from ndistribute.collective.reduce_op import ReduceOp

    chosen = backend("shared")
    mine = contribution(chosen.rank, size // 4)
    memory = chosen.gradient_memory(mine.dtype, mine.shape)
    if memory is not None:
        memory[...] = mine
        mine = memory
    call = _call("reduce_update", mine)

    def total_of_one_call() -> Any:
        seen = np.zeros_like(mine)

        def keep(prepared: Any, leaf: int, start: int, stop: int, total: Any) -> None:
            seen[start:stop] = total

        chosen.reduce_update(call, [mine], ReduceOp.SUM, _nothing, keep, TIMEOUT)
        return seen

    def step() -> None:
        chosen.reduce_update(call, [mine], ReduceOp.SUM, _nothing, _leave, TIMEOUT)

    yield Prepared(step, error_of(total_of_one_call(), chosen.size))


def _nothing() -> None:
    pass


def _leave(prepared: Any, leaf: int, start: int, stop: int, total: Any) -> None:
    pass


@contextmanager
def context_all_reduce(size: int, calls: int) -> Iterator[Prepared]:
    """Sum with `ctx.all_reduce` under MultiWorkerMirroredStrategy, several times in a step."""
    import ndistribute as nd

    strategy, index = multi_worker()
    mine = contribution(index, size // 4)

    def summed() -> Any:
        context = nd.get_replica_context()
        for _ in range(calls):
            total = context.all_reduce("sum", mine)
        return total

    (total,) = strategy.local_results(strategy.run(summed))
    error = error_of(total, strategy.num_replicas_in_sync)
    yield Prepared(lambda: strategy.run(summed), error)


@contextmanager
def local(size: int) -> Iterator[Prepared]:
    """Add two arrays on one core."""
    first, second = contribution(0, size // 4), contribution(1, size // 4)
    total = np.add(first, second)

    def step() -> None:
        np.add(first, second, out=total)

    yield Prepared(step, error_of(total, 2))
