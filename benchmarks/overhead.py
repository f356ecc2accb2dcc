"""What a strategy costs where there is nothing to compute.

Microseconds for `run` of an empty step, `run` of a step that sums one number over the replicas, and
`reduce` of one number, with two replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks import peer
from benchmarks.case import OURS, PEER, Benchmark, Contender, Group, Prepared
from benchmarks.harness import main

__all__ = ["BENCHMARK", "ours", "tensorflow"]

REPLICAS = 2


@contextmanager
def ours(work: str) -> Iterator[Prepared]:
    """Set up one of the three kinds of work on ndistribute."""
    import ndistribute as nd

    with nd.MirroredStrategy([f"cpu:{i}" for i in range(REPLICAS)]) as strategy:
        one = np.float32(1)
        values = nd.PerReplica([one] * REPLICAS)

        def empty() -> None:
            return None

        def summed() -> Any:
            return nd.get_replica_context().all_reduce("sum", one)

        works: dict[str, Callable[[], Any]] = {
            "empty": lambda: strategy.run(empty),
            "all_reduce": lambda: strategy.run(summed),
            "reduce": lambda: strategy.reduce("sum", values),
        }
        yield Prepared(works[work], _number(works[work](), strategy.local_results))


@contextmanager
def tensorflow(work: str, graph: bool) -> Iterator[Prepared]:
    """Set up the same on TensorFlow, op by op or as one graph."""
    tf = peer.tensorflow()
    strategy = peer.mirrored(REPLICAS)
    one = tf.constant(1.0)  # Captured by a graph, so it can not be folded into one.
    values = strategy.experimental_distribute_values_from_function(lambda _: one)
    add = tf.distribute.ReduceOp.SUM

    def empty() -> None:
        return None

    def summed() -> Any:
        # Passed as it is, one object would count as mirrored, and would not be summed at all.
        return tf.distribute.get_replica_context().all_reduce(add, tf.identity(one))

    works: dict[str, Callable[[], Any]] = {
        "empty": lambda: strategy.run(empty),
        "all_reduce": lambda: strategy.run(summed),
        "reduce": lambda: strategy.reduce(add, values, axis=None),
    }
    step = tf.function(works[work]) if graph else works[work]
    yield Prepared(step, _number(step(), strategy.experimental_local_results))


def _number(value: Any, local_results: Callable[[Any], tuple[Any, ...]]) -> float:
    """Return what replica 0 got, 0 for nothing."""
    first = local_results(value)[0]
    return 0.0 if first is None else float(first)


def _groups(quick: bool, cores: int) -> list[Group]:
    works = {
        "run of an empty step": "empty",
        "run of a scalar all-reduce": "all_reduce",
        "reduce of a scalar": "reduce",
    }
    return [Group(title, tuple(_contenders(work))) for title, work in works.items()]


def _contenders(work: str) -> Iterator[Contender]:
    yield Contender("2 replicas", OURS, "ours", {"work": work})
    yield Contender("eager", PEER, "tensorflow", {"work": work, "graph": False})
    yield Contender("tf.function", PEER, "tensorflow", {"work": work, "graph": True})


BENCHMARK = Benchmark(
    name="overhead",
    title="Cost of a call, 2 replicas",
    unit="us",
    groups=_groups,
    rate=False,
    same_check=1e-6,
)

if __name__ == "__main__":
    main(BENCHMARK)
