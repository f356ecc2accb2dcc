"""What the tasks of these tests do that are more than servers: they train, or command others."""

import itertools
import json
import os
import time
from pathlib import Path

import numpy as np

import ndistribute as nd
from ndistribute.parameter_server.copies import ShardCopy
from ndistribute.parameter_server.messages import Transaction

MANY = 100_000


class Shared:
    """The variables of a job, which whoever comes first makes.

    Args:
        strategy: of the process.
    """

    def __init__(self, strategy):
        with strategy.scope():
            self.weights = nd.Variable(np.zeros(3))
            self.stop = nd.Variable(np.int64(0))
            self.steps = nd.Variable(np.zeros(8, np.int64))
        self.optimizer = nd.optimizers.SGD(1.0, name="descent")

    def descend(self):
        """Let the weights fall by 1."""
        self.optimizer.apply_gradients([(np.ones(3), self.weights)])


def train():
    """Be a worker with a loop of its own, until somebody says that it is enough."""
    options = json.loads(os.environ.get("TASK_OPTIONS", "{}"))
    with nd.ParameterServerStrategy(**options) as strategy:
        shared = Shared(strategy)
        index = strategy.cluster_resolver.task_id
        while not int(shared.stop):
            shared.descend()
            shared.steps.scatter_add([index], [1])


def watch():
    """Be an evaluator that only reads, and never ends."""
    with nd.ParameterServerStrategy() as strategy:
        shared = Shared(strategy)
        while not int(shared.stop):
            assert np.ptp(shared.weights.numpy()) == 0


def command():
    """Be a chief that schedules work for ever."""
    with nd.ParameterServerStrategy() as strategy, nd.ClusterCoordinator(strategy) as coordinator:
        shared = Shared(strategy)

        def step():
            shared.steps.scatter_add([nd.cluster.worker_index()], [1])

        for _ in range(MANY):
            for _ in range(100):
                coordinator.schedule(step)
            coordinator.join()


class Counters:
    """Variables on all servers, to which each worker adds ones at its place."""

    def __init__(self, strategy):
        with strategy.scope():
            self.counts = [nd.Variable(np.zeros(8, np.int64)) for _ in strategy.servers._clients]
            self.stop = nd.Variable(np.int64(0))


def count_up():
    """Add ones until somebody says stop, and write how many were acknowledged, and what took long.

    That is a list of ends, by the monotonic clock, and durations.
    """
    options = json.loads(os.environ.get("TASK_OPTIONS", "{}"))
    with nd.ParameterServerStrategy(**options) as strategy:
        counters, added, waits = Counters(strategy), 0, []
        index, one = [strategy.cluster_resolver.task_id], np.ones(1, np.int64)
        while not int(counters.stop):
            for _, counter in itertools.product(range(20), counters.counts):
                begun = time.monotonic()
                counter.scatter_add(index, one)
                now = time.monotonic()
                waits += [(now, now - begun)] * (now - begun > 0.005)
            added += 20
        result = {"added": added, "waits": waits, "lost": strategy.lost_updates}
    Path(os.environ["TASK_RESULT"]).write_text(json.dumps(result))


def serve_and_drop():
    """Be a server whose second copy leaves one change out, as a broken one would."""
    make, left = ShardCopy._make, itertools.count()

    def drops(copy, change):
        dropped = isinstance(change, Transaction) and next(left) == 1
        return None if dropped else make(copy, change)

    ShardCopy._make = drops
    config = json.loads(os.environ["TF_CONFIG"])
    nd.Server(config["cluster"], config["task"]["type"], config["task"]["index"]).join()
