"""Parameter servers: what a write and a read cost, and the MLP of `benchmarks.mlp` trained by them.

With a chief, two workers run the steps that it schedules; without one, two workers run loops of
their own. Both are asynchronous: each worker takes a batch, pulls, computes and pushes. Every
process has one thread for arithmetic. TensorFlow's ParameterServerStrategy takes part where it is
installed, with the same steps under its ClusterCoordinator.
"""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks import mlp, peer
from benchmarks.case import OURS, PEER, Benchmark, Contender, Group, Prepared
from benchmarks.cluster import Cluster
from benchmarks.harness import main

__all__ = ["BENCHMARK", "coordinated", "looping", "round_trip", "tensorflow", "tensorflow_trip"]

WORKERS = 2
# So many steps are scheduled before the chief waits for all of them.
SCHEDULED = 32
# How many times TensorFlow's speed is to be reached, by batch and by wire.
REACH = {32: 2.5, 256: 2.0, "TCP": 1.0, "Unix socket": 3.0}
KIB, MIB = 1 << 10, 1 << 20
MLP_BYTES = sum(array.nbytes for array in mlp.initial_weights())
SIZES = {"64 KiB": 64 * KIB, "2.7 MB": MLP_BYTES, "64 MiB": 64 * MIB}


@contextmanager
def coordinated(batch: int, servers: int) -> Iterator[Prepared]:
    """Set up steps that a chief schedules, on ndistribute."""
    import ndistribute as nd

    strategy, coordinator = _ours(servers)
    with strategy.scope():
        variables = [nd.Variable(array) for array in mlp.initial_weights()]
        optimizer = nd.optimizers.SGD(mlp.RATE)
    train = _training(strategy, variables, optimizer, batch)
    yield _scheduled(coordinator, train)


@contextmanager
def looping(batch: int) -> Iterator[Prepared]:
    """Set up the same step in a worker that runs its own loop, on ndistribute."""
    import ndistribute as nd

    strategy = _own_loop()
    with strategy.scope():
        variables = [nd.Variable(array) for array in mlp.initial_weights()]
        optimizer = nd.optimizers.SGD(mlp.RATE)
    train = _training(strategy, variables, optimizer, batch)
    for _ in range(mlp.CHECKED_STEPS):
        train()
    yield Prepared(train)


@contextmanager
def tensorflow(batch: int, servers: int) -> Iterator[Prepared]:
    """Set up steps that a chief schedules, on TensorFlow."""
    tf, strategy, coordinator = _theirs(servers)
    with strategy.scope():
        variables = [tf.Variable(array) for array in mlp.initial_weights()]
        optimizer = tf.keras.optimizers.SGD(mlp.RATE)
        optimizer.build(variables)
    step = mlp.tensorflow_step(tf, variables, optimizer, batch)
    images, labels = mlp.batch_of(batch)

    @tf.function
    def train() -> Any:
        # Constants of the graph: they are on the worker, and travel with no step.
        return strategy.run(step, args=(tf.constant(images), tf.constant(labels)))

    yield _scheduled(coordinator, train)


@contextmanager
def round_trip(size: int, unix: bool) -> Iterator[Prepared]:
    """Set up a write to a variable of one server, and a read of it after, on ndistribute."""
    import ndistribute as nd

    os.environ["NDISTRIBUTE_UNIX_SOCKETS"] = str(int(unix))
    strategy = _one_server()
    value = np.arange(size // 4, dtype=np.float32)
    with strategy.scope():
        variable = nd.Variable(np.zeros_like(value))

    def write_and_read() -> Any:
        variable.assign(value)
        return variable.read_value()

    write_and_read()
    yield Prepared(write_and_read, float(variable.numpy()[-1]))


@contextmanager
def tensorflow_trip(size: int) -> Iterator[Prepared]:
    """Set up a write and a read after it on TensorFlow."""
    tf, strategy, _ = _theirs(1)
    value = tf.constant(np.arange(size // 4, dtype=np.float32))
    with strategy.scope():
        variable = tf.Variable(tf.zeros_like(value))

    def write_and_read() -> Any:
        variable.assign(value)
        return variable.numpy()

    write_and_read()
    yield Prepared(write_and_read, float(variable.numpy()[-1]))


def _training(strategy: Any, variables: Sequence[Any], optimizer: Any, batch: int) -> Any:
    import ndistribute as nd

    images, labels = mlp.batch_of(batch)

    def step() -> Any:
        with nd.GradientTape() as tape:
            loss = mlp.loss_of(list(variables), images, labels, batch)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return lambda: strategy.run(step)


def _scheduled(coordinator: Any, train: Callable[[], Any]) -> Prepared:
    """Return steps that are scheduled many at a time, after some one by one to compare."""
    for _ in range(mlp.CHECKED_STEPS):
        loss = coordinator.schedule(train)
        coordinator.join()

    def step() -> None:
        for _ in range(SCHEDULED):
            coordinator.schedule(train)
        coordinator.join()

    return Prepared(step, float(coordinator.fetch(loss)))


@functools.cache
def _ours(servers: int) -> tuple[Any, Any]:
    """Return this process's strategy and coordinator; it is the chief of one cluster alone."""
    import ndistribute as nd

    _begin(OURS, WORKERS, servers)
    strategy = nd.ParameterServerStrategy()
    atexit.register(strategy.close)
    coordinator = nd.ClusterCoordinator(strategy)
    atexit.register(coordinator.close)
    return strategy, coordinator


@functools.cache
def _one_server() -> Any:
    """Return the strategy of a cluster without workers."""
    _begin(OURS, 0, 1)
    return _own_loop()


@functools.cache
def _own_loop() -> Any:
    """Return the strategy of a process that `TF_CONFIG` describes already."""
    import ndistribute as nd

    strategy = nd.ParameterServerStrategy()
    atexit.register(strategy.close)
    return strategy


@functools.cache
def _theirs(servers: int) -> tuple[Any, Any, Any]:
    _begin(PEER, WORKERS, servers)
    return peer.parameter_server()


def _begin(side: str, workers: int, servers: int) -> None:
    """Run a cluster whose chief is this process, up to its end."""
    cluster = Cluster(workers, servers, {}, side=side)
    atexit.register(cluster.__exit__, None, None, None)
    os.environ |= cluster.environ | {"TF_CONFIG": cluster.config("chief", 0)}
    for job in ("ps", "worker"):
        cluster.start_all(job)


def _groups(quick: bool, cores: int) -> list[Group]:
    batches, counts = ((32,), (1,)) if quick else ((32, 256), (1, 2))
    sizes = dict(list(SIZES.items())[:1]) if quick else SIZES
    return [
        *(
            Group(f"batch {batch}, {servers} server(s)", tuple(_trainers(batch, servers)))
            for batch in batches
            for servers in counts
        ),
        *(Group(f"write and read, {name}", tuple(_trips(size))) for name, size in sizes.items()),
    ]


def _trainers(batch: int, servers: int) -> Iterator[Contender]:
    facts = {"batch": batch, "servers": servers, "workers": WORKERS}
    params = {"batch": batch, "servers": servers}
    name = f"coordinator, {WORKERS} workers"
    chief = f"chief of {servers} server(s)"
    beside = facts | {"beside": [name]}
    for side, maker, own in (
        (OURS, "coordinated", beside | {"reach": REACH[batch]}),
        (PEER, "tensorflow", facts),
    ):
        yield Contender(name, side, maker, params, 1, chief, units=batch * SCHEDULED, facts=own)
    yield Contender(
        f"own loops, {WORKERS} workers",
        OURS,
        "looping",
        {"batch": batch},
        1,
        f"loops with {servers} server(s)",
        team=WORKERS,
        wire=f"servers-{servers}",
        units=batch * WORKERS,
        facts=beside,
    )


def _trips(size: int) -> Iterator[Contender]:
    facts = {"bytes": 2 * size}
    for name, unix in (("Unix socket", True), ("TCP", False)):
        params, own = {"size": size, "unix": unix}, {"beside": ["gRPC"], "reach": REACH[name]}
        yield Contender(name, OURS, "round_trip", params, 1, f"trips, {name}", facts=facts | own)
    yield Contender("gRPC", PEER, "tensorflow_trip", {"size": size}, 1, "trips", facts=facts)


BENCHMARK = Benchmark(
    name="parameter_server",
    title="Parameter servers: MLP 784-512-512-10, float32, SGD; trips of one variable",
    unit="examples/s, or trips/s",
    groups=_groups,
    rate=True,
    same_check=1e-3,
)

if __name__ == "__main__":
    main(BENCHMARK)
