"""A task of `server_faults.py` that is no server: a chief, or a worker with a loop of its own.

Started as ``python -m benchmarks.faulty_task command`` or ``loop``, with `TF_CONFIG` saying which
task it is. It writes a line once it is at work; the worker one more when it lost another.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np

from benchmarks.task import end_with_starter

__all__ = ["main"]

_AT_WORK = 20


def main() -> None:
    """Be what the command line says."""
    end_with_starter()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")

    {"command": _command, "loop": _loop}[sys.argv[1]](answer)


def _command(answer: Any) -> None:
    """Schedule work on all workers until somebody ends this process."""
    import ndistribute as nd

    with nd.ParameterServerStrategy() as strategy, nd.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            count = nd.Variable(np.int64(0))

        def step() -> None:
            count.assign_add(1)

        def schedule(times: int) -> None:
            for _ in range(times):
                coordinator.schedule(step)

        schedule(_AT_WORK)
        coordinator.join()
        answer(working=True)
        while True:
            schedule(1000)


def _loop(answer: Any) -> None:
    """Train in step with the others until one of them is lost."""
    import ndistribute as nd

    strategy = nd.ParameterServerStrategy()
    workers = len(strategy.cluster_resolver.cluster_spec().task_indices("worker"))
    strategy.close()
    with nd.ParameterServerStrategy(replicas_to_aggregate=workers) as strategy:
        with strategy.scope():
            weights = nd.Variable(np.zeros(1000))
        optimizer = nd.optimizers.SGD(1.0)
        step = 0
        try:
            while True:
                optimizer.apply_gradients([(np.ones(1000), weights)])
                step += 1
                if step == _AT_WORK:
                    answer(working=True)
        except nd.DistributeError as error:
            answer(when=time.monotonic(), error=type(error).__name__)


if __name__ == "__main__":
    main()
