"""Graph programs: a session's overhead, values that go from task to task, and a classic trainer.

TensorFlow runs the same graphs through `tf.compat.v1`. In the trainer each worker has a session of
its own, and updates variables that are spread over the servers without waiting for the others.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from benchmarks import peer
from benchmarks.harness import OURS, TF, Benchmark, Group, contenders, main
from benchmarks.training import RATE, batch_of, initial_weights
from benchmarks.worker import Prepared, serve, task
from tests.processes import LISTEN

SIZES = {"4 KiB": 1 << 12, "1 MiB": 1 << 20, "64 MiB": 1 << 26}
BATCHES = (32, 256)


class Library(NamedTuple):
    """What the programs use of ndistribute or TensorFlow; the names in the modules are the same."""

    graph: Any
    train: Any
    server: Callable[[], Any]  # Returns that of this process.
    local_server: Callable[[], Any]
    names: Any  # With TensorFlow's names for functions.


def library(side: str) -> Library:
    """Return the library of a side."""
    if side == OURS:
        import ndistribute as nd
        import ndistribute.compat.tf1 as names

        # The socket that this process got is for the server of its task.
        environ = {key: value for key, value in os.environ.items() if key != LISTEN}
        local = functools.partial(nd.Server.create_local_server, environ=environ)
        return Library(nd.graph, nd.graph, serve, local, names)
    tf = peer.tensorflow()
    v1 = tf.compat.v1
    v1.disable_eager_execution()
    return Library(v1, v1.train, peer.server, v1.train.Server.create_local_server, tf)


@contextmanager
def addition(side: str, local_server: bool) -> Iterator[Prepared]:
    """Set up the addition of a fed number and a constant."""
    used = library(side)
    g = used.graph
    server = used.local_server() if local_server else None
    with g.Graph().as_default(), g.Session("" if server is None else server.target) as session:
        x = g.placeholder(np.float32, [])
        total = x + g.constant(3.0)
        yield Prepared(lambda: session.run(total, {x: 2.0}), float(session.run(total, {x: 2.0})))
    if side == OURS and server is not None:
        server.stop()


@contextmanager
def transfer(side: str, size: int) -> Iterator[Prepared]:
    """Set up a step whose value goes from a server to a worker, which uses one element."""
    used = library(side)
    g, server = used.graph, used.server()
    with g.Graph().as_default(), g.Session(server.target) as session:
        with g.device("/job:ps/task:0"):
            variable = g.Variable(np.zeros(size // 4, np.float32), name=f"v{size}")
            more = variable.assign_add(np.ones(size // 4, np.float32), use_locking=True)
        with g.device(f"/job:worker/task:{task()[1]}"):
            last = g.identity(variable)[-1]
        session.run(g.global_variables_initializer())
        session.run(more.op)
        yield Prepared(lambda: session.run(last.op), float(session.run(last)))


@contextmanager
def trainer(side: str, batch: int) -> Iterator[Prepared]:
    """Set up the training step of a worker."""
    used = library(side)
    g, nn, server, (_, index) = used.graph, used.names.nn, used.server(), task()
    cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]
    setter = used.train.replica_device_setter(
        cluster=used.train.ClusterSpec(cluster) if side == TF else cluster,
        worker_device=f"/job:worker/task:{index}",
    )
    with g.Graph().as_default(), g.Session(server.target) as session:
        with g.device(setter):
            w1, b1, w2, b2, w3, b3 = (
                g.Variable(array, name=f"v{batch}_{k}") for k, array in enumerate(initial_weights())
            )
            x, y = g.placeholder(np.float32), g.placeholder(np.float32)
            x.set_shape([None, 784])
            y.set_shape([None, 10])
            hidden = nn.relu(x @ w1 + b1)
            hidden = nn.relu(hidden @ w2 + b2)
            losses = nn.softmax_cross_entropy_with_logits(labels=y, logits=hidden @ w3 + b3)
            loss = used.names.reduce_sum(losses) / batch
            step = used.train.GradientDescentOptimizer(RATE).minimize(loss)
        images, labels = batch_of(batch)
        feeds = {x: images, y: labels}
        session.run(g.global_variables_initializer())
        yield Prepared(lambda: session.run([step, loss], feeds), float(session.run(loss, feeds)))


def _groups(quick: bool) -> list[Group]:
    groups = []
    for name, local in (("in process", False), ("local server", True)):
        ways = [
            ("addition", side, "addition", _of(side, local_server=local)) for side in (OURS, TF)
        ]
        groups.append(Group(f"addition, {name}", contenders("graph", ways)))
    for name in list(SIZES)[: 1 if quick else None]:
        ways = [("step", side, "transfer", _of(side, size=SIZES[name])) for side in (OURS, TF)]
        groups.append(Group(f"two tasks, {name}", contenders("graph", ways, jobs=("worker", "ps"))))
    for batch in BATCHES[: 1 if quick else None]:
        ways = [("trainer", side, "trainer", _of(side, batch=batch)) for side in (OURS, TF)]
        jobs = ("worker", "worker", "ps", "ps")
        team = contenders("graph", ways, jobs=jobs, units=2 * batch)
        groups.append(Group(f"2 workers, 2 servers, batch {batch}", team, "examples/s"))
    return groups


def _of(side: str, **params: Any) -> dict[str, Any]:
    return {"side": side, **params}


BENCHMARK = Benchmark("graph", "Graph programs", "steps/s", _groups)

if __name__ == "__main__":
    # Under this name processes find what they are to run.
    main(importlib.import_module("benchmarks.graph").BENCHMARK)
