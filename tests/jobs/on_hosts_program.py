"""A program of each kind whose result one process computes as well: the tests run it on hosts.

The first argument is the kind; each process that trains prints the result, in full digits.
"""

import json
import os
import sys
from collections.abc import Callable

import numpy as np

import ndistribute as nd
from ndistribute import graph as g

ROWS, COLUMNS, STEPS = 48, 5, 4
_DATA = np.random.default_rng(7)
X, Y = _DATA.normal(size=(ROWS, COLUMNS)), _DATA.normal(size=ROWS)
# What the tests look for on the wires.
MARKER = np.frombuffer(b"plaintxt" * 8192)


def part(weights: np.ndarray, index: int, count: int) -> np.ndarray:
    """Return one part's share of the gradient of a linear model; all shares add up to it."""
    rows = slice(index * ROWS // count, (index + 1) * ROWS // count)
    return X[rows].T @ (X[rows] @ weights - Y[rows]) / ROWS


def train() -> list[float]:
    """Train by steps in which all workers add up their gradients."""
    with nd.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            weights = nd.Variable(np.zeros(COLUMNS))
            optimizer = nd.optimizers.SGD(0.1, momentum=0.9)

        def step() -> None:
            context = nd.get_replica_context()
            index, count = context.replica_id_in_sync_group, context.num_replicas_in_sync
            optimizer.apply_gradients([(part(weights.numpy(), index, count), weights)])

        for _ in range(STEPS):
            strategy.run(step)
        strategy.reduce("SUM", strategy.run(lambda: MARKER))
        return weights.numpy().tolist()


def coordinate() -> list[float] | None:
    """Be a server, a worker, or the chief that schedules one share after the other."""
    resolver = nd.TFConfigClusterResolver()
    if resolver.task_type != "chief":
        nd.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()
        return None
    with nd.ParameterServerStrategy() as strategy, nd.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            weights, total = nd.Variable(np.zeros(COLUMNS)), nd.Variable(np.zeros(COLUMNS))

        def add(index: int) -> None:
            total.assign_add(part(weights.numpy(), index, 8))

        for _ in range(STEPS):
            total.assign(np.zeros(COLUMNS))
            for index in range(8):
                coordinator.schedule(add, args=(index,))
            coordinator.join()
            weights.assign_sub(0.1 * total.numpy())
        return weights.numpy().tolist()


def be_in_graph() -> list[float] | None:
    """Be a server, or a worker with a graph whose variables are on the servers."""
    config = json.loads(os.environ["TF_CONFIG"])
    cluster, (job, index) = config["cluster"], config["task"].values()
    server = nd.Server(cluster, job, index)
    if job == "ps":
        server.join()
        return None
    count = len(cluster["worker"])
    here = f"/job:worker/task:{index}"
    with g.device(g.replica_device_setter(worker_device=here, cluster=cluster)):
        weights = g.Variable(np.full(COLUMNS, 0.5), name="weights")
        total = g.Variable(np.zeros(COLUMNS), name="total")
        done = g.Variable(np.zeros(2), name="done")
        share = g.placeholder(np.float64, [COLUMNS], "share")
        which = g.placeholder(np.float64, [2], "which")
        add = total.assign_add(share, use_locking=True)
        finish = done.assign_add(which, use_locking=True)
    with g.MonitoredTrainingSession(server.target, is_chief=index == 0) as session:
        session.run(add, {share: part(session.run(weights), index, count)})
        _await(session, done, finish, which, 0, count)
        result = session.run(total).tolist()
        # Nobody ends before all have read, as a worker's server ends with it.
        _await(session, done, finish, which, 1, count)
    return result


def _await(session: object, done: object, finish: object, which: object, at: int, n: int) -> None:
    session.run(finish, {which: np.eye(2)[at]})
    while session.run(done)[at] < n:
        pass


def alone(kind: str) -> list[float]:
    """Return what one process computes."""
    weights, velocity = np.zeros(COLUMNS), np.zeros(COLUMNS)
    if kind == "graph":
        return part(np.full(COLUMNS, 0.5), 0, 1).tolist()
    for _ in range(STEPS):
        velocity = (0.9 if kind == "train" else 0.0) * velocity - 0.1 * part(weights, 0, 1)
        weights = weights + velocity
    return weights.tolist()


KINDS: dict[str, Callable[[], list[float] | None]] = {
    "train": train,
    "servers": coordinate,
    "graph": be_in_graph,
}

if __name__ == "__main__":
    if (result := KINDS[sys.argv[1]]()) is not None:
        # By one write, which others do not break in two.
        sys.stdout.write(f"RESULT {json.dumps(result)}\n")
