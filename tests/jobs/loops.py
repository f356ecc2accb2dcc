"""What the tasks of these tests do that are more than servers: they train, or command others."""

import json
import os

import numpy as np

import ndistribute as nd

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
