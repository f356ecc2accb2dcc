"""What a strategy costs where there is nothing to compute.

Microseconds for `run` of an empty step, `run` of a step that sums one number over the replicas, and
`reduce` of one number, with two replicas. With ``--calls`` it counts instead: which calls of Python
functions of the package, and files, an update of 4 KB on a server of this host costs, and an empty
function that a chief schedules; and threads of processes that have nothing to do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np

from benchmarks import peer
from benchmarks.case import OURS, PEER, Benchmark, Contender, Group, Prepared
from benchmarks.cluster import Cluster, commanded
from benchmarks.harness import main
from benchmarks.report import markdown
from benchmarks.task import Calls, facts

__all__ = ["BENCHMARK", "calls", "ours", "tensorflow"]

REPLICAS = 2
COUNTED = 100


@contextmanager
def ours(work: str) -> Iterator[Prepared]:
    """Set up one of the three kinds of work on ndistribute."""
    import ndistribute as nd

    with closing(nd.MirroredStrategy([f"cpu:{i}" for i in range(REPLICAS)])) as strategy:
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
        "run of an empty step": ("empty", 100.0),
        "run of a scalar all-reduce": ("all_reduce", 200.0),
        "reduce of a scalar": ("reduce", 30.0),
    }
    return [Group(title, tuple(_contenders(*work))) for title, work in works.items()]


def _contenders(work: str, bound: float) -> Iterator[Contender]:
    facts = {"beside": ["eager", "tf.function"], "bound": bound}
    yield Contender("2 replicas", OURS, "ours", {"work": work}, facts=facts)
    yield Contender("eager", PEER, "tensorflow", {"work": work, "graph": False})
    yield Contender("tf.function", PEER, "tensorflow", {"work": work, "graph": True})


def calls() -> str:
    """Return a table of the calls that an update and a scheduled function make, and of threads."""
    import ndistribute as nd

    before = facts()["threads"]
    own = Calls()  # From here on also on the threads of the strategy and the coordinator.
    cluster = Cluster(1, 1, {"BENCHMARK_CALLS": "1"})
    with commanded(cluster) as (strategy, coordinator):
        with strategy.scope():
            variable = nd.Variable(np.zeros(1024, np.float32))
        ones = np.ones(1024, np.float32)

        def empty() -> None:
            return None

        def scheduled() -> None:
            coordinator.schedule(empty)
            coordinator.join()

        def everybody() -> dict[str, dict[str, Any]]:
            served = {job: cluster.facts(job, 0) for job in ("ps", "worker")}
            return {"chief": facts(own), **served}

        rows = []
        works = {"assign_add of 4 KB": lambda: variable.assign_add(ones), "schedule": scheduled}
        for name, work in works.items():
            for _ in range(COUNTED):
                work()
            everybody()
            for _ in range(COUNTED):
                work()
            found = everybody()
            each = [str(round(one["calls"] / COUNTED)) for one in found.values()]
            files = {file for one in found.values() for file in one["files"]}
            rows.append([name, *each, str(len(files))])
    # Tasks have one more, which listens to this process.
    found["chief"]["threads"] -= before
    threads = [one["threads"] + (1 if one is found["chief"] else -1) for one in found.values()]
    rows.append(["threads when idle", *map(str, threads), "-"])
    return markdown(["calls", "chief", "server", "worker", "files"], rows)


BENCHMARK = Benchmark(
    name="overhead",
    title="Cost of a call, 2 replicas",
    unit="us",
    groups=_groups,
    rate=False,
    same_check=1e-6,
)

if __name__ == "__main__":
    if sys.argv[1:] == ["--calls"]:
        print(calls())
    else:
        main(BENCHMARK)
