"""All-reduce between the replicas of one process, by size, in the columns of nccl-tests.

A step makes several calls one after another, so that starting the step is not what is measured.
algbw is bytes over time; busbw is algbw times 2(n-1)/n, which does not depend on the number of
replicas where the bus is the limit. A replica count above the number of cores is marked: it shows
that the sums are right, not how fast they could be.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import peer
from benchmarks.case import OURS, PEER, Benchmark, Contender, Group, Prepared, Result
from benchmarks.harness import main

__all__ = ["BENCHMARK", "ours_all_reduce", "ours_apply", "tensorflow"]

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB, 256 * KIB, 1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)
QUICK_SIZES = (4 * KIB, 1 * MIB)

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

    with nd.MirroredStrategy([f"cpu:{i}" for i in range(replicas)]) as strategy:
        error = worst(strategy.run(summed, args=(mine,)).values, expected)
        yield Prepared(lambda: strategy.run(summed, args=(mine,)), error)


@contextmanager
def ours_apply(size: int, replicas: int, calls: int) -> Iterator[Prepared]:
    """Sum and update with `optimizer.apply_gradients`: each replica updates the part it owns."""
    import ndistribute as nd

    parts = parts_of(size, replicas)
    expected = -np.sum(parts, axis=0, dtype=np.float64).astype(np.float32)
    mine = nd.PerReplica(parts)
    with nd.MirroredStrategy([f"cpu:{i}" for i in range(replicas)]) as strategy:
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

    run = tf.function(lambda part: strategy.run(summed, args=(part,)))
    totals, _ = run(mine)
    error = worst(strategy.experimental_local_results(totals), expected)
    yield Prepared(lambda: run(mine), error)


def _groups(quick: bool, cores: int) -> list[Group]:
    counts = (1, 2) if quick else (1, 2, 4)
    sizes = QUICK_SIZES if quick else SIZES
    return [
        Group(f"{n} replica{'s' * (n > 1)}, {_size(size)}", tuple(_contenders(size, n, cores)))
        for n in counts
        for size in sizes
    ]


def _contenders(size: int, replicas: int, cores: int) -> Iterator[Contender]:
    params = {"size": size, "replicas": replicas, "calls": 16 if size <= MIB else 4}
    facts = {"oversubscribed": replicas > cores}
    ways = [
        ("ctx.all_reduce", OURS, "ours_all_reduce"),
        ("SGD.apply_gradients", OURS, "ours_apply"),
        ("ctx.all_reduce", PEER, "tensorflow"),
    ]
    for name, side, maker in ways:
        process = f"{replicas} replicas" if side == PEER else ""
        yield Contender(
            name, side, maker, params, process=process, units=params["calls"], facts=facts
        )


def _columns(result: Result) -> dict[str, Any]:
    """Return the columns of nccl-tests."""
    size, replicas = result.contender.params["size"], result.contender.params["replicas"]
    seconds = statistics.median(result.seconds)
    algbw = size / seconds / 1e9
    return {
        "bytes": size,
        "count": size // 4,
        "type": "float",
        "redop": "sum",
        "algbw GB/s": algbw,
        "busbw GB/s": algbw * 2 * (replicas - 1) / replicas,
        "error": f"{result.check:.0e}",
    }


def _size(size: int) -> str:
    return f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"


BENCHMARK = Benchmark(
    name="all_reduce",
    title="All-reduce between replicas of one process",
    unit="us",
    groups=_groups,
    rate=False,
    columns=_columns,
    max_cores=4,
)

if __name__ == "__main__":
    main(BENCHMARK)
