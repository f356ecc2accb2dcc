"""The overhead of a strategy, measured with steps that compute nothing.

It measures the microseconds of `run` of an empty step, of `run` of a step that sums a number over
replicas, and of `reduce` of a number, with two replicas. With ``--calls`` it counts the package's
Python functions that are called, and their files, for an update of 4 KB on a server of this host
and for an empty function that a chief schedules; and the threads of idle processes.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np

from benchmarks import peer
from benchmarks.harness import OURS, TF, Benchmark, Group, contenders, main
from benchmarks.machine import facts
from benchmarks.report import markdown
from benchmarks.worker import Prepared, coordinator, serve, serves, strategy_of
from tests.processes import ROOT, Ranks

REPLICAS, COUNTED = 2, 100
_PACKAGE = str(ROOT / "ndistribute")
_seen: list[str] = []  # The file of each call.


@contextmanager
def ours(work: str) -> Iterator[Prepared]:
    """Set up one of the three kinds of work on ndistribute."""
    import ndistribute as nd

    with nd.MirroredStrategy([f"cpu:{i}" for i in range(REPLICAS)]) as strategy:
        one = np.float32(1)
        values = nd.PerReplica([one] * REPLICAS)

        def summed() -> Any:
            return nd.get_replica_context().all_reduce("sum", one)

        works: dict[str, Callable[[], Any]] = {
            "empty": lambda: strategy.run(_nothing),
            "all_reduce": lambda: strategy.run(summed),
            "reduce": lambda: strategy.reduce("sum", values),
        }
        yield Prepared(works[work], _number(works[work](), strategy.local_results))


@contextmanager
def tensorflow(work: str, graph: bool) -> Iterator[Prepared]:
    """Set up the same on TensorFlow, op by op or as one graph."""
    strategy, tf = peer.mirrored(REPLICAS), peer.tensorflow()
    one = tf.constant(1.0)  # Captured by a graph, so it cannot be folded into one.
    values = strategy.experimental_distribute_values_from_function(lambda _: one)
    add = tf.distribute.ReduceOp.SUM

    def summed() -> Any:
        # Passed as it is, one object would count as mirrored, and would not be summed at all.
        return tf.distribute.get_replica_context().all_reduce(add, tf.identity(one))

    works: dict[str, Callable[[], Any]] = {
        "empty": lambda: strategy.run(_nothing),
        "all_reduce": lambda: strategy.run(summed),
        "reduce": lambda: strategy.reduce(add, values, axis=None),
    }
    step = tf.function(works[work]) if graph else works[work]
    yield Prepared(step, _number(step(), strategy.experimental_local_results))


def _nothing() -> None:
    return None


def _number(value: Any, local_results: Callable[[Any], tuple[Any, ...]]) -> float:
    """Return what replica 0 got, 0 for nothing."""
    first = local_results(value)[0]
    return 0.0 if first is None else float(first)


def _groups(quick: bool) -> list[Group]:
    works = {
        "run of an empty step": "empty",
        "run of a scalar all-reduce": "all_reduce",
        "reduce of a scalar": "reduce",
    }
    ways = {
        work: [
            ("2 replicas", OURS, "ours", {"work": work}),
            ("eager", TF, "tensorflow", {"work": work, "graph": False}),
            ("tf.function", TF, "tensorflow", {"work": work, "graph": True}),
        ]
        for work in works.values()
    }
    return [
        Group(title, contenders("overhead", ways[work], threads=2)) for title, work in works.items()
    ]


def calls() -> str:
    """Return a table of the calls that an update and a scheduled function make, and of threads."""
    jobs, rows = ("chief", "ps", "worker"), []
    with Ranks(3, "python", {"OPENBLAS_NUM_THREADS": "1"}, jobs=jobs) as ranks:
        for work in ("assign_add of 4 KB", "schedule of an empty function"):
            for _ in range(2):  # The first time, to warm up.
                ranks.run(taken)
                [one.result() for one in ranks.run(count, work)]
            found = [one.result() for one in ranks.run(taken)]
            each = [str(round(len(files) / COUNTED)) for files in found]
            rows.append([work, *each, str(len({file for files in found for file in files}))])
        threads = [str(round(facts(pid)["threads"])) for pid in ranks.pids]
    rows.append(["threads when idle", *threads, "-"])
    return markdown(["calls", "chief", "server", "worker", "files"], rows)


def count(rank: int, size: int, work: str) -> None:
    """Do the work so many times; the servers' part of it comes by itself."""
    _watched()
    if serves():
        serve()
        return
    variable, chief = _variable(), coordinator()
    ones = np.ones(1024, np.float32)
    for _ in range(COUNTED):
        if work.startswith("assign_add"):
            variable.assign_add(ones)
        else:
            chief.schedule(_nothing)
            chief.join()


def taken(rank: int, size: int) -> list[str]:
    """Return the files of the calls since the last time, one for each call."""
    files = [name for name in _seen if name.startswith(_PACKAGE)]
    _seen.clear()
    return files


@functools.cache
def _watched() -> None:
    """See the calls of this thread, and of those that begin later."""
    threading.setprofile(_see)
    sys.setprofile(_see)


def _see(frame: FrameType, event: str, argument: Any) -> None:
    if event == "call":
        _seen.append(frame.f_code.co_filename)


@functools.cache
def _variable() -> Any:
    import ndistribute as nd

    with strategy_of("ParameterServerStrategy").scope():
        return nd.Variable(np.zeros(1024, np.float32))


BENCHMARK = Benchmark("overhead", "Cost of a call, 2 replicas", "us", _groups, rate=False)

if __name__ == "__main__":
    # Under this name processes find what they are to run.
    module = importlib.import_module("benchmarks.overhead")
    if sys.argv[1:] == ["--calls"]:
        print(module.calls())
    else:
        main(BENCHMARK)
