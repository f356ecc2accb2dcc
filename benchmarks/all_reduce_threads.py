"""All-reduce between the replicas of one process: ours and TensorFlow's MirroredStrategy.

A step makes several calls one after another, so that starting the step is not what is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import peer
from benchmarks.case import Prepared

__all__ = ["ours_all_reduce", "ours_apply", "sums_in_graph", "tensorflow"]

Floats = npt.NDArray[np.float32]


def parts_of(size: int, replicas: int) -> list[Floats]:
    """Return what each replica brings."""
    rng = np.random.default_rng(2)
    return [rng.random(size // 4, np.float32) for _ in range(replicas)]


def worst(results: Any, expected: Floats) -> float:
    """Return the largest difference of any replica's result from what it should be."""
    return max(float(np.max(np.abs(np.asarray(result) - expected))) for result in results)


@contextmanager
def ours_all_reduce(size: int, replicas: int, calls: int) -> Iterator[Prepared]:
    """Sum with `ctx.all_reduce`: every replica gets the whole sum in an array of its own."""
    import ndistribute as nd

    parts = parts_of(size, replicas)
    expected = np.sum(parts, axis=0, dtype=np.float64).astype(np.float32)
    mine = nd.PerReplica(parts)

    def summed(part: Floats) -> Any:
        context = nd.get_replica_context()
        for _ in range(calls):
            total = context.all_reduce("sum", part)
        return total

    with closing(nd.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])) as strategy:
        error = worst(strategy.run(summed, args=(mine,)).values, expected)
        yield Prepared(lambda: strategy.run(summed, args=(mine,)), error)


@contextmanager
def ours_apply(size: int, replicas: int, calls: int) -> Iterator[Prepared]:
    """Sum and update with `optimizer.apply_gradients`: each replica updates the part it owns."""
    import ndistribute as nd

    parts = parts_of(size, replicas)
    expected = -np.sum(parts, axis=0, dtype=np.float64).astype(np.float32)
    mine = nd.PerReplica(parts)
    with closing(nd.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])) as strategy:
        with strategy.scope():
            variable = nd.Variable(np.zeros(size // 4, np.float32))
            optimizer = nd.optimizers.SGD(1.0)

        def applied(part: Floats, count: int) -> None:
            for _ in range(count):
                optimizer.apply_gradients([(part, variable)])

        strategy.run(applied, args=(mine, 1))
        error = worst([variable.numpy()], expected)
        yield Prepared(lambda: strategy.run(applied, args=(mine, calls)), error)


@contextmanager
def tensorflow(size: int, replicas: int, calls: int) -> Iterator[Prepared]:
    """Sum with TensorFlow's `ctx.all_reduce` in a graph, one call after another."""
    tf = peer.tensorflow()
    strategy = peer.mirrored(replicas)
    parts = parts_of(size, replicas)
    expected = np.sum(parts, axis=0, dtype=np.float64).astype(np.float32)
    mine = strategy.experimental_distribute_values_from_function(
        lambda c: tf.constant(parts[c.replica_id_in_sync_group])
    )

    run = sums_in_graph(tf, strategy, calls)
    totals, _ = run(mine)
    error = worst(strategy.experimental_local_results(totals), expected)
    yield Prepared(lambda: run(mine), error)


def sums_in_graph(tf: Any, strategy: Any, calls: int) -> Callable[[Any], Any]:
    """Return a graph that makes so many all-reduces; it returns the first sum, and some of each."""

    def summed(part: Any) -> Any:
        context = tf.distribute.get_replica_context()
        # Placed on the replica's device by an operation: a lone replica's argument is on none.
        total = context.all_reduce("sum", tf.identity(part))
        firsts = [total[0]]
        for _ in range(1, calls):
            # A call waits for the one before it, and something of each sum is returned, or the
            # graph would do fewer of them.
            with tf.control_dependencies([firsts[-1]]):
                firsts.append(context.all_reduce("sum", tf.identity(part))[0])
        return total, firsts

    return tf.function(lambda part: strategy.run(summed, args=(part,)))
