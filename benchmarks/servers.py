"""Parameter servers: training the MLP, writes and reads of one variable, and staleness.

With a chief, two workers run the steps that it schedules; without one, they run their own loops.
Each process has one thread for arithmetic. The staleness of an update is the number of updates of
other workers between the pull of its variables and the update. ``--limits`` measures the memory,
threads and connections of servers in jobs of several sizes instead.
"""

from __future__ import annotations

import atexit
import collections
import functools
import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks import peer, report
from benchmarks.harness import OURS, TF, Benchmark, Contender, Group, contenders, main
from benchmarks.machine import facts
from benchmarks.training import CHECKED_STEPS, GRADIENT_BYTES, batch_of, step_of, tf_step_of
from benchmarks.worker import Prepared, serve, serves, task
from tests.processes import Ranks

__all__ = ["BENCHMARK", "limits"]

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
# Variables of a limit: how often each is changed, how many, of how many elements.
Held = tuple[int, int, int]


@functools.cache
def _strategy(**options: Any) -> Any:
    import ndistribute as nd

    strategy = nd.ParameterServerStrategy(**options)
    atexit.register(strategy.close)
    return strategy


@functools.cache
def _coordinator() -> Any:
    import ndistribute as nd

    coordinator = nd.ClusterCoordinator(_strategy())
    atexit.register(coordinator.close)
    return coordinator


@contextmanager
def coordinated(batch: int) -> Iterator[Prepared]:
    """Set up steps that a chief schedules, on ndistribute."""
    strategy = _strategy()
    train, arrays = step_of(strategy, batch), batch_of(batch)
    yield _scheduled(_coordinator(), lambda: strategy.run(train, args=arrays))


@contextmanager
def tensorflow(batch: int) -> Iterator[Prepared]:
    """Set up the same on TensorFlow."""
    tf, (strategy, coordinator) = peer.tensorflow(), peer.parameter_server()
    step = tf_step_of(tf, strategy, batch)
    images, labels = batch_of(batch)

    @tf.function
    def train() -> Any:
        # Constants of the graph: they are on the worker, and travel with no step.
        return strategy.run(step, args=(tf.constant(images), tf.constant(labels)))

    yield _scheduled(coordinator, train)


def _scheduled(coordinator: Any, train: Callable[[], Any]) -> Prepared:
    """Return steps that are scheduled many at a time, after some one by one to compare."""
    for _ in range(CHECKED_STEPS):
        loss = coordinator.schedule(train)
        coordinator.join()

    def step() -> None:
        for _ in range(SCHEDULED):
            coordinator.schedule(train)
        coordinator.join()

    return Prepared(step, float(coordinator.fetch(loss)))


@contextmanager
def looping(batch: int, mode: str) -> Iterator[Prepared]:
    """Set up the same step in a worker that runs its own loop, on ndistribute."""
    strategy = _strategy(**MODES[mode])
    train = step_of(strategy, batch)
    arrays = batch_of(batch)
    yield Prepared(lambda: strategy.run(train, args=arrays), tell=strategy.staleness)


@contextmanager
def updates(elements: int) -> Iterator[Prepared]:
    """Set up updates of a variable of each client's own."""
    import ndistribute as nd

    with _strategy().scope():
        zeros = np.zeros(elements, np.float32)
        variables = [nd.Variable(zeros) for _ in range(4)]
    mine, ones = variables[task()[1]], np.ones(elements, np.float32)
    yield Prepared(lambda: mine.assign_add(ones))


@contextmanager
def round_trip(size: int) -> Iterator[Prepared]:
    """Set up a write to a variable of one server, and a read of it after, on ndistribute."""
    import ndistribute as nd

    value = np.arange(size // 4, dtype=np.float32)
    with _strategy().scope():
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
    trained = [
        Group(f"batch {batch}, {count} server(s)", _trainers(batch, count))
        for batch in batches
        for count in counts
    ]
    sizes = dict(list(SIZES.items())[:1]) if quick else SIZES
    trips = [Group(f"write and read, {name}", _trips(sizes[name]), "trips/s") for name in sizes]
    stale = [_looping(name, 32, name, 1) for name in MODES]
    logged = [
        Group(
            f"{4 * elements:,} bytes, {clients} client(s)", _updates(elements, clients), "updates/s"
        )
        for elements in (1 << 10, 1 << 18)
        for clients in (1, 4)
    ]
    return [*trained, *trips, Group("staleness, batch 32", stale), *logged]


def _trips(size: int) -> list[Contender]:
    jobs, made = ("chief", "ps"), []
    for name, unix in (("Unix socket", "1"), ("TCP", "0")):
        way = (name, OURS, "round_trip", {"size": size})
        made += contenders("servers", [way], jobs=jobs, environ={"NDISTRIBUTE_UNIX_SOCKETS": unix})
    theirs = ("gRPC", TF, "tensorflow_trip", {"size": size})
    return made + contenders("servers", [theirs], jobs=(*jobs, "worker"))


def _updates(elements: int, clients: int) -> list[Contender]:
    """Return updates with snapshots alone and with a log, which is on the disk before an answer."""
    jobs, made = ("ps", *("worker",) * clients), []
    for durability in ("snapshot", "log"):
        way = (durability, OURS, "updates", {"elements": elements})
        environ = {"NDISTRIBUTE_DURABILITY": durability}
        made += contenders("servers", [way], jobs=jobs, environ=environ, units=clients)
    return made


def _trainers(batch: int, servers: int) -> list[Contender]:
    jobs, units = ("chief", *("ps",) * servers, *WORKERS), batch * SCHEDULED
    ways = [
        ("chief", side, maker, {"batch": batch})
        for side, maker in ((OURS, "coordinated"), (TF, "tensorflow"))
    ]
    ours, theirs = contenders("servers", ways, jobs=jobs, units=units)
    return [ours, _looping("own loops", batch, "asynchronous", servers), theirs]


def _looping(name: str, batch: int, mode: str, servers: int) -> Contender:
    jobs, params = (*WORKERS, *("ps",) * servers), {"batch": batch, "mode": mode}
    return Contender(name, OURS, "servers:looping", params, jobs, units=batch * len(WORKERS))


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


def hold(rank: int, size: int, asked: Held) -> int:
    """Serve, or change each variable so many times and hold what was read; return its bytes."""
    if serves():
        serve()
        return 0
    import ndistribute as nd

    times, count, elements = asked
    with _strategy().scope():
        zeros = np.broadcast_to(np.float32(0), (elements,))
        variables = [nd.Variable(zeros) for _ in range(count)]
    gradient = np.ones(elements, np.float32)
    for _ in range(times):
        for variable in variables:
            variable.assign_add(gradient)
    _held.extend(variable.numpy() for variable in variables)
    return sum(array.nbytes for array in _held)


_held: list[Any] = []


def schedule(rank: int, size: int, count: int) -> None:
    """Serve, or schedule so many functions and wait for them."""
    if serves():
        serve()
        return
    for number in range(count):
        _coordinator().schedule(abs, args=(number,))
    _coordinator().join()


def beat(rank: int, size: int, count: int) -> None:
    """Let this process's failure detector beat so many times, one each millisecond."""
    from ndistribute.transport import failure_detector

    class Beats:
        beat_within = failure_detector.SILENCE_SECONDS
        count = 0

        def tick(self, now: float, excused: bool) -> None:
            self.count += 1

    beats = Beats()
    failure_detector._BEATS = 60_000  # In the time of silence that is allowed, 60 s.
    failure_detector.detector.watch(beats)
    while beats.count < count:
        threading.Event().wait(0.1)
    failure_detector.detector.forget(beats)


def limits(quick: bool) -> str:
    """Return a table of the memory, threads and sockets of jobs of several sizes."""
    environ = {"OPENBLAS_NUM_THREADS": "1", "NDISTRIBUTE_UNIX_SOCKETS": "1"}
    wire = "tcp" if quick else "python"  # Forks start at once, but share memory.
    rows = []

    def note(what: str, team: Ranks, jobs: Sequence[str]) -> None:
        for job in dict.fromkeys(jobs):
            found = facts(team.pids[list(jobs).index(job)])
            rows.append([f"{what}: a {job}", *map(report.shown, found.values())])

    large: Held = (2, 1, 1 << 18) if quick else (2, 16, 1 << 24)
    few, many = ((1, 2), 2) if quick else ((16, 32, 64), 4)
    held = [(4, 1, large)] + [(workers, many, (20, 4, 1000)) for workers in few]
    for workers, servers, asked in held:
        jobs = ("ps",) * servers + ("worker",) * workers
        began = time.monotonic()
        with Ranks(len(jobs), wire, environ, jobs=jobs) as team:
            total = sum(one.result() for one in team.run(hold, asked, timeout=300.0))
            took = time.monotonic() - began
            what = f"{workers} workers, {servers} servers, {total / 1e6 / workers:.0f} MB"
            note(f"{what}, {took:.0f} s", team, jobs)
    jobs, count = ("chief", "ps", "worker"), 1000 if quick else 100_000
    with Ranks(len(jobs), wire, environ, jobs=jobs) as team:
        for part in (count // 10, count - count // 10):
            [one.result() for one in team.run(schedule, part, timeout=600.0)]
            note(f"{part} functions", team, jobs)
        beats = 200 if quick else 7 * 24 * 3600 // 5  # Those of a week.
        [one.result() for one in team.run(beat, beats, timeout=600.0)]
        note(f"{beats:,} heartbeats more", team, jobs)
    head = ["", "resident MB", "shared MB", "peak MB", "threads", "sockets"]
    return report.markdown(head, rows)


BENCHMARK = Benchmark(
    "servers",
    "Parameter servers, MLP 784-512-512-10, SGD",
    "examples/s",
    _groups,
    conclude=conclude,
)

if __name__ == "__main__":
    # Under this name processes find what they are to run.
    module = importlib.import_module("benchmarks.servers")
    if "--limits" in sys.argv:
        print(module.limits("--quick" in sys.argv))
    else:
        main(BENCHMARK)
