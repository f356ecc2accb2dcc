"""Parameter servers: training the MLP, writes and reads of one variable, and staleness.

With a chief, two workers run the steps that it schedules; without one, they run their own loops.
Each process has one thread for arithmetic. The staleness of an update is the number of updates of
other workers between the pull of its variables and the update.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np

from benchmarks import peer, report
from benchmarks.harness import OURS, TF, Benchmark, Contender, Group, main
from benchmarks.training import CHECKED_STEPS, GRADIENT_BYTES, batch_of, step_of, tf_step_of
from benchmarks.worker import Prepared, coordinator, strategy_of, task

WORKERS = ("worker", "worker")
# So many steps are scheduled before the chief waits for all of them.
SCHEDULED = 32
SIZES = {"64 KiB": 1 << 16, "2.7 MB": GRADIENT_BYTES, "64 MiB": 1 << 26}
MODES: dict[str, dict[str, int]] = {
    "asynchronous": {},
    "max_staleness=4": {"max_staleness": 4},
    "max_staleness=0": {"max_staleness": 0},
    "synchronous": {"replicas_to_aggregate": len(WORKERS)},
}


@contextmanager
def coordinated(batch: int) -> Iterator[Prepared]:
    """Set up steps that a chief schedules, on ndistribute."""
    strategy = strategy_of("ParameterServerStrategy")
    train, arrays = step_of(strategy, batch), batch_of(batch)
    yield _scheduled(coordinator(), lambda: strategy.run(train, args=arrays))


@contextmanager
def tensorflow(batch: int) -> Iterator[Prepared]:
    """Set up the same on TensorFlow."""
    tf, (strategy, chief) = peer.tensorflow(), peer.parameter_server()
    step = tf_step_of(tf, strategy, batch)
    images, labels = batch_of(batch)

    @tf.function
    def train() -> Any:
        # Constants of the graph: they are on the worker, and travel with no step.
        return strategy.run(step, args=(tf.constant(images), tf.constant(labels)))

    yield _scheduled(chief, train)


def _scheduled(chief: Any, train: Callable[[], Any]) -> Prepared:
    """Return steps that are scheduled many at a time, after some one by one to compare."""
    for _ in range(CHECKED_STEPS):
        loss = chief.schedule(train)
        chief.join()

    def step() -> None:
        for _ in range(SCHEDULED):
            chief.schedule(train)
        chief.join()

    return Prepared(step, float(chief.fetch(loss)))


@contextmanager
def looping(batch: int, mode: str) -> Iterator[Prepared]:
    """Set up the same step in a worker that runs its own loop, on ndistribute."""
    strategy = strategy_of("ParameterServerStrategy", **MODES[mode])
    train = step_of(strategy, batch)
    arrays = batch_of(batch)
    yield Prepared(lambda: strategy.run(train, args=arrays), tell=strategy.staleness)


@contextmanager
def updates(elements: int, **options: Any) -> Iterator[Prepared]:
    """Set up updates of a variable of each client's own."""
    import ndistribute as nd

    with strategy_of("ParameterServerStrategy", **options).scope():
        zeros = np.zeros(elements, np.float32)
        variables = [nd.Variable(zeros) for _ in range(4)]
    mine, ones = variables[task()[1]], np.ones(elements, np.float32)
    yield Prepared(lambda: mine.assign_add(ones))


@contextmanager
def round_trip(size: int) -> Iterator[Prepared]:
    """Set up a write to a variable of one server, and a read of it after, on ndistribute."""
    import ndistribute as nd

    value = np.arange(size // 4, dtype=np.float32)
    with strategy_of("ParameterServerStrategy").scope():
        variable = nd.Variable(np.zeros_like(value))
    yield _trip(lambda: variable.assign(value), variable.read_value)


@contextmanager
def tensorflow_trip(size: int) -> Iterator[Prepared]:
    """Set up a write and a read after it on TensorFlow."""
    tf, (strategy, _) = peer.tensorflow(), peer.parameter_server()
    value = tf.constant(np.arange(size // 4, dtype=np.float32))
    with strategy.scope():
        variable = tf.Variable(tf.zeros_like(value))
    yield _trip(lambda: variable.assign(value), variable.numpy)


def _trip(write: Callable[[], Any], read: Callable[[], Any]) -> Prepared:
    def step() -> Any:
        write()
        return read()

    return Prepared(step, float(np.asarray(step())[-1]))


def _groups(quick: bool) -> list[Group]:
    batches, counts = ((32,), (1,)) if quick else ((32, 256), (1, 2))
    groups = [
        Group(f"batch {batch}, {count} server(s)", _trainers(batch, count))
        for batch in batches
        for count in counts
    ]
    for name in list(SIZES)[: 1 if quick else None]:
        params, jobs, trips = {"size": SIZES[name]}, ("chief", "ps"), []
        for title, unix in (("Unix socket", "1"), ("TCP", "0")):
            environ = {"NDISTRIBUTE_UNIX_SOCKETS": unix}
            trips.append(_one(title, OURS, "round_trip", params, jobs, environ=environ))
        trips.append(_one("gRPC", TF, "tensorflow_trip", params, (*jobs, "worker")))
        groups.append(Group(f"write and read, {name}", trips, "trips/s"))
    stale = [_looping(name, 32, name, 1) for name in MODES]
    groups.append(Group("staleness, batch 32", stale))
    for elements, clients in product((1 << 10, 1 << 18), (1, 4)):
        # With a log, updates are on the disk before an answer; else there are snapshots alone.
        jobs, params = ("ps", *("worker",) * clients), {"elements": elements}
        logged = [
            _one(
                durability,
                OURS,
                "updates",
                params,
                jobs,
                clients,
                environ={"NDISTRIBUTE_DURABILITY": durability},
            )
            for durability in ("snapshot", "log")
        ]
        title = f"{4 * elements:,} bytes, {clients} client(s)"
        groups.append(Group(title, logged, "updates/s"))
        copies = [
            _one(
                f"replicas={replicas}",
                OURS,
                "updates",
                {**params, "replicas": replicas},
                ("ps", *jobs),
                clients,
            )
            for replicas in (1, 2)
        ]
        groups.append(Group(f"copies, {title}", copies, "updates/s"))
    return groups


def _one(
    name: str,
    side: str,
    maker: str,
    params: Any,
    jobs: tuple[str, ...],
    units: int = 1,
    **other: Any,
) -> Contender:
    return Contender(name, side, f"servers:{maker}", params, jobs, units=units, **other)


def _trainers(batch: int, servers: int) -> list[Contender]:
    jobs, units = ("chief", *("ps",) * servers, *WORKERS), batch * SCHEDULED
    return [
        _one("chief", OURS, "coordinated", {"batch": batch}, jobs, units),
        _looping("own loops", batch, "asynchronous", servers),
        _one("chief", TF, "tensorflow", {"batch": batch}, jobs, units),
    ]


def _looping(name: str, batch: int, mode: str, servers: int) -> Contender:
    jobs, params = (*WORKERS, *("ps",) * servers), {"batch": batch, "mode": mode}
    return _one(name, OURS, "looping", params, jobs, batch * len(WORKERS))


def conclude(entries: list[dict[str, Any]]) -> str:
    """Return how many updates were how stale."""
    rows = []
    for one in (one for one in entries if one["group"].startswith("staleness")):
        counts: collections.Counter[int] = collections.Counter()
        for told in one["told"]:
            counts.update({int(staleness): count for staleness, count in told.items()})
        mean = sum(k * count for k, count in counts.items()) / max(1, counts.total())
        each = ", ".join(f"{k}: {count}" for k, count in sorted(counts.items()))
        rows.append([one["name"], report.shown(one["figure"]["median"]), report.shown(mean), each])
    return report.markdown(["", "examples/s", "mean", "staleness: updates"], rows)


BENCHMARK = Benchmark(
    "servers",
    "Parameter servers, MLP 784-512-512-10, SGD",
    "examples/s",
    _groups,
    conclude=conclude,
)

if __name__ == "__main__":
    main(BENCHMARK)
