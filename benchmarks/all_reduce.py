"""The time of an all-reduce of float32 by size, between processes and between replicas of one.

The speed is bytes over time. Between processes, our backends are called as strategies call them;
`ctx.all_reduce` is what users call. The peers are MPI's Allreduce, gloo and TensorFlow.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from statistics import geometric_mean
from typing import Any

import numpy as np

from benchmarks import peer, report
from benchmarks.harness import (
    MPICH,
    OURS,
    TF,
    TORCH,
    Benchmark,
    Contender,
    Group,
    Way,
    contenders,
    main,
)
from benchmarks.worker import Prepared, strategy_of

KIB, MIB = 1 << 10, 1 << 20
SIZES = tuple(size * KIB for size in (4, 64, 1024, 4096, 16384, 65536, 262144))
TIMEOUT = 60.0
# The numbers repeat with this period, so that nobody needs the whole exact sum.
PERIOD = 1 << 16
# How far a sum may be off: a few roundings of numbers up to 4, of what travels between processes.
_WITHIN = {None: 1e-5, "float16": 1e-2, "bfloat16": 8e-2}


def contribution(rank: int, count: int) -> Any:
    """Return what a rank brings; ranks bring different numbers."""
    return np.resize(np.random.default_rng(rank).random(PERIOD, np.float32), count)


def check(total: Any, ranks: int, within: float = 1e-5) -> float:
    """Return 1 if each element is near the exact sum over the ranks, else how far one is off."""
    exact = np.sum([contribution(rank, PERIOD).astype(float) for rank in range(ranks)], axis=0)
    flat, worst = np.asarray(total).reshape(-1), 0.0
    for start in range(0, flat.size, PERIOD):
        part = flat[start : start + PERIOD]
        worst = max(worst, float(np.max(np.abs(part - exact[: part.size]))))
    return 1.0 if worst < within else 1.0 + worst


def _compare_nothing() -> None:
    """Put a constant in the place of what is told of a call, and nothing in that of comparing."""
    from ndistribute.collective import headers, ring, segment

    constant = bytes(headers.HEADER_BYTES)
    for module in (segment, ring):
        module.encode_header = lambda *told: constant  # type: ignore[assignment]
    ring.compare_headers = lambda *told: None  # type: ignore[assignment]


@functools.cache
def _backend(way: str, wire_dtype: str | None = None) -> Any:
    """Return a backend among our processes: ``shared``, ``tcp`` or ``mpi``."""
    from ndistribute.collective import bootstrap
    from ndistribute.collective.communicator import CommunicationOptions
    from ndistribute.collective.control_plane import ControlPlane
    from ndistribute.collective.ring import RingBackend
    from ndistribute.collective.shared_memory import SharedMemoryBackend

    if way == "mpi":
        from ndistribute.cluster import MPIClusterResolver
        from ndistribute.collective.mpi import MpiTransport, exchange_over_mpi

        own = bootstrap.info_from_exchange(exchange_over_mpi, MPIClusterResolver().task_id)
        plane = ControlPlane(own, timeout=TIMEOUT)
        ring = RingBackend(plane, lambda: MpiTransport(plane))
        atexit.register(plane.close)
        atexit.register(ring.close)
        return ring
    from ndistribute.collective.tcp import TcpTransport

    config = json.loads(os.environ["TF_CONFIG"])
    addresses, rank = config["cluster"]["worker"], config["task"]["index"]
    plane = ControlPlane(bootstrap.info_from_addresses(addresses, rank), timeout=TIMEOUT)
    if way == "shared":
        return SharedMemoryBackend(plane)
    options = CommunicationOptions(wire_dtype=wire_dtype)
    return RingBackend(plane, lambda: TcpTransport(plane), options=options)


@contextmanager
def between_processes(
    size: int, way: str, call: str, compared: bool = True, wire_dtype: str | None = None
) -> Iterator[Prepared]:
    """Sum by a backend of ours; an update is that of an optimizer, which leaves the total alone."""
    from ndistribute.collective.backend import Call, Update
    from ndistribute.collective.reduce_op import ReduceOp

    if not compared:
        _compare_nothing()
    chosen = _backend(way, wire_dtype)
    mine = contribution(chosen.rank, size // 4)
    signature = ((mine.dtype, mine.shape),)
    made = Call(1, call.split(",", maxsplit=1)[0], "SUM", signature, timeout=TIMEOUT)
    total = np.zeros_like(mine)
    if call == "reduce_update":
        # Gradients lie where the tape writes those of weights.
        memory = chosen.gradient_memory(mine.dtype, mine.shape)
        gradient = mine if memory is None else memory
        gradient[...] = mine

        def update(keep: bool, leaf: int, start: int, stop: int, part: Any) -> None:
            if keep:
                total[start:stop] = part

        def step(keep: bool = False) -> None:
            chosen.reduce_update(made, [gradient], ReduceOp.SUM, Update(lambda: keep, update))

        step(keep=True)
        yield Prepared(step, check(total, chosen.size))
        return
    arrays = [mine], [total]
    if call == "all_reduce, in place":  # Where the processes see each other's arrays.
        total = chosen.allocate(mine.dtype, mine.shape)
        total[...] = mine
        arrays = [total], [total]

    def reduce() -> None:
        chosen.all_reduce(made, *arrays, ReduceOp.SUM)

    reduce()
    found = check(total, chosen.size, _WITHIN[wire_dtype])
    arrays[0][0][...] = 0.0  # What is not filled again would grow with each sum in place.
    yield Prepared(reduce, found)


@contextmanager
def in_steps(size: int, calls: int, replicas: int = 0) -> Iterator[Prepared]:
    """Sum with `ctx.all_reduce`, several times in a step: over workers, or over replicas."""
    import ndistribute as nd

    if replicas:
        strategy = nd.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    else:
        options = nd.CommunicationOptions(timeout_seconds=TIMEOUT)
        strategy = strategy_of("MultiWorkerMirroredStrategy", communication_options=options)
    first = 0 if replicas else strategy.cluster_resolver.worker_index or 0
    own = nd.PerReplica([contribution(first + i, size // 4) for i in range(replicas or 1)])

    def summed(part: Any) -> Any:
        context = nd.get_replica_context()
        for _ in range(calls):
            total = context.all_reduce("sum", part)
        return total

    total = strategy.local_results(strategy.run(summed, args=(own,)))[-1]
    yield Prepared(
        lambda: strategy.run(summed, args=(own,)), check(total, strategy.num_replicas_in_sync)
    )
    if replicas:
        strategy.close()


@contextmanager
def applied(size: int, calls: int, replicas: int) -> Iterator[Prepared]:
    """Sum and update with `optimizer.apply_gradients`: each replica updates the part it owns."""
    import ndistribute as nd

    own = nd.PerReplica([contribution(i, size // 4) for i in range(replicas)])
    with nd.MirroredStrategy([f"cpu:{i}" for i in range(replicas)]) as strategy:
        with strategy.scope():
            variable = nd.Variable(np.zeros(size // 4, np.float32))
            optimizer = nd.optimizers.SGD(1.0)

        def step(part: Any, count: int) -> None:
            for _ in range(count):
                optimizer.apply_gradients([(part, variable)])

        strategy.run(step, args=(own, 1))
        found = check(-variable.numpy(), replicas)
        yield Prepared(lambda: strategy.run(step, args=(own, calls)), found)


@contextmanager
def mpi(size: int) -> Iterator[Prepared]:
    """Sum with `Allreduce` of whichever MPI started this process."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    mine = contribution(world.Get_rank(), size // 4)
    total = np.zeros_like(mine)
    world.Allreduce(mine, total, MPI.SUM)
    yield Prepared(lambda: world.Allreduce(mine, total, MPI.SUM), check(total, world.Get_size()))


@contextmanager
def gloo(size: int) -> Iterator[Prepared]:
    """Sum in place with torch.distributed."""
    torch, rank = peer.torch_group()
    mine = torch.from_numpy(contribution(rank, size // 4))
    torch.distributed.all_reduce(mine)
    found = check(mine.numpy(), torch.distributed.get_world_size())
    mine.zero_()  # In place, sums would grow from call to call; zeros do not, and take as long.
    yield Prepared(lambda: torch.distributed.all_reduce(mine), found)


@contextmanager
def tensorflow(size: int, calls: int, replicas: int = 0) -> Iterator[Prepared]:
    """Sum with TensorFlow's `ctx.all_reduce` in a graph, one call after another."""
    strategy = peer.mirrored(replicas) if replicas else peer.multi_worker()
    tf = peer.tensorflow()
    worker = 0 if replicas else strategy.cluster_resolver.worker_index or 0
    mine = strategy.experimental_distribute_values_from_function(
        lambda c: tf.constant(
            contribution(c.replica_id_in_sync_group if replicas else worker, size // 4)
        )
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
    total = strategy.experimental_local_results(run(mine)[0])[-1]
    yield Prepared(lambda: run(mine), check(total.numpy(), strategy.num_replicas_in_sync))


def _groups(quick: bool) -> list[Group]:
    return [
        Group(f"{title}, {size // KIB:,} KiB", make(size))
        for title, make in {"2 processes": _processes, "2 replicas": _replicas}.items()
        for size in (SIZES[:2] if quick else SIZES)
    ]


# Name, way and call of each of our backends.
_BACKENDS = (
    ("shared memory, reduce_update", "shared", "reduce_update"),
    ("shared memory, all_reduce", "shared", "all_reduce"),
    ("shared memory, in place", "shared", "all_reduce, in place"),
    ("ring over tcp", "tcp", "all_reduce"),
    # What it costs to compare the calls of all processes before anything moves.
    ("shared memory, nothing compared", "shared", "all_reduce"),
    ("ring over tcp, nothing compared", "tcp", "all_reduce"),
)


def _processes(size: int) -> list[Contender]:
    calls = _calls(size)
    common: dict[str, Any] = {"jobs": ("worker", "worker"), "facts": {"bytes": size}}
    alone: list[Way] = [("gloo", TORCH, "gloo", {"size": size})]
    for name, way, call in _BACKENDS:
        params = {"size": size, "way": way, "call": call, "compared": "nothing" not in name}
        alone.append((name, OURS, "between_processes", params))
    ring = {"size": size, "way": "mpi", "call": "all_reduce"}
    over_mpi: list[Way] = [
        ("ring over mpi", OURS, "between_processes", ring),
        ("Allreduce", MPICH, "mpi", {"size": size}),
    ]
    in_steps: list[Way] = [
        ("ctx.all_reduce", OURS, "in_steps", {"size": size, "calls": calls}),
        ("RING", TF, "tensorflow", {"size": size, "calls": calls}),
    ]
    return [
        *contenders("all_reduce", alone, **common),
        *contenders("all_reduce", over_mpi, wire="mpi", **common),
        *contenders("all_reduce", in_steps, units=calls, **common),
    ]


def _replicas(size: int) -> list[Contender]:
    calls = _calls(size)
    params = {"size": size, "calls": calls, "replicas": 2}
    ways: list[Way] = [
        ("ctx.all_reduce", OURS, "in_steps", params),
        ("SGD.apply_gradients", OURS, "applied", params),
        ("ctx.all_reduce", TF, "tensorflow", params),
    ]
    return contenders("all_reduce", ways, threads=2, units=calls, facts={"bytes": size})


def _calls(size: int) -> int:
    """Return how many calls a step makes where starting a step costs something itself."""
    return 16 if size <= MIB else 4 if size <= 16 * MIB else 1


def conclude(entries: list[dict[str, Any]]) -> str:
    """Return the bandwidths, and how many times as fast ours are from 1 MiB on, in the mean."""
    times: dict[tuple[str, str], dict[int, float]] = {}
    for one in (one for one in entries if one["group"].startswith("2 processes")):
        named = times.setdefault((one["side"], one["name"]), {})
        named[one["bytes"]] = one["figure"]["median"]
    sizes = sorted({size for found in times.values() for size in found})
    bandwidths = [
        [f"{size // KIB:,} KiB"]
        + [report.shown(size / 1e3 / t[size] if size in t else 0) for t in times.values()]
        for size in sizes
    ]
    rows = []
    for own, other in product(times, times):
        ratios = {s: times[other][s] / t for s, t in times[own].items() if s in times[other]}
        large = [ratio for size, ratio in ratios.items() if size >= MIB]
        if own[0] == OURS != other[0] and large:
            found = geometric_mean(large), min(large), 1 / ratios[min(ratios)]
            rows.append([own[1], ": ".join(other), *map(report.shown, found)])
    head = ["ours", "peer", "times as fast from 1 MiB on", "least", "time at the smallest"]
    parts = [report.markdown(["GB/s", *(": ".join(name) for name in times)], bandwidths)]
    return "\n\n".join([*parts, *([report.markdown(head, rows)] if rows else [])])


BENCHMARK = Benchmark(
    "all_reduce", "All-reduce, float32", "us", _groups, rate=False, conclude=conclude
)

if __name__ == "__main__":
    if any(word.partition("=")[0] == "--hosts" for word in sys.argv):
        # Not before: it needs this file under the name by which processes find it.
        from benchmarks import hosts

        hosts.main(sys.argv[1:])
    else:
        main(BENCHMARK)
