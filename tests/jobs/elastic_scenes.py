"""Scenes of elastic jobs, in which a worker ends itself, or comes, at one point of the program.

Each function is what the process of a rank does.
"""

import logging
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np

import ndistribute as nd
from ndistribute.collective import meeting, membership
from ndistribute.collective.workers import Workers
from ndistribute.strategies.elastic import ElasticSession
from tests.processes import wait_until


class _Lines(logging.Handler):
    """Keeps the lines that are logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("ndistribute").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def end() -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def joined(**limits: Any) -> Any:
    """Return an elastic strategy."""
    options = nd.CommunicationOptions(timeout_seconds=30.0)
    return nd.MultiWorkerMirroredStrategy(
        communication_options=options, elastic=nd.Elastic(**limits)
    )


def use_results_later(rank: int, size: int, how: str) -> Any:
    """Use the results of a step when a worker has been lost since."""
    logged = _Lines()
    with joined() as strategy:
        seen = nd.metrics.Sum()
        rows = nd.Dataset.range(24).batch(12)
        sums = []
        for number, batch in enumerate(strategy.elastic(rows)):
            result = strategy.run(lambda part: np.sum(part, keepdims=True) + 0.0, args=(batch,))
            if number == 0:
                if rank == 2:
                    end()
                assert strategy.reduce("sum", 1.0) == 2.0  # The others go on in this unit.
                if how == "run":
                    strategy.run(lambda value: value, args=(result,))
                elif how == "gather":
                    strategy.gather(result, axis=0)
            sums += [float(strategy.reduce("sum", result)[0]) for _ in range(2)]
    seen.reset_state()  # Of a closed strategy, this concerns no other worker.
    return sums, sum("before the workers changed" in line for line in logged.lines)


def make_in_a_step(rank: int, size: int, name: str) -> Any:
    """Make variables in a step: rank 2 ends when all have agreed, and rank 1 learns of that."""
    agree, agreed = Workers.agree, list[str]()

    def agreeing(self: Workers, value: Any, what: str) -> Any:
        result = agree(self, value, what)
        if name in what and not agreed:
            agreed.append(what)
            if rank == 2:
                end()
            if rank == 1:
                wait_until(lambda: self.peers.has_changed)
                return agree(self, value, what)
        return result

    Workers.agree = agreeing  # type: ignore[method-assign]
    with joined() as strategy, strategy.scope():
        weights = nd.Variable(np.zeros(3), name="weights")
        optimizer = nd.optimizers.GradientAccumulation(nd.optimizers.SGD(1.0), 2)
        made = []

        def step() -> Any:
            replica = nd.get_replica_context()
            if not made:
                made.append(nd.Variable(rank + 1.0, name="late"))
            gradient = np.ones(3) / replica.num_replicas_in_sync
            optimizer.apply_gradients([(gradient, weights)])
            return made[0].numpy() + replica.all_reduce("sum", 1.0)

        for _ in range(2):
            (value,) = strategy.run(step).values
        sums = len(strategy.session.state.parts_of_sums(rank))
        return float(value), weights.numpy().tolist(), agreed, sums


def lose_at_the_end(rank: int, size: int, how: str) -> Any:
    """Count in a step that cannot be taken back; rank 3 ends after it, rank 2 in the change."""
    armed = list[None]()

    def ending(name: str, who: int) -> None:
        method = getattr(ElasticSession, name)

        def call(self: Any, *args: Any) -> Any:
            if armed and rank == who:
                end()
            return method(self, *args)

        setattr(ElasticSession, name, call)

    ending("_commit", 3)
    ending("_synchronise", 2)
    with joined() as strategy, strategy.scope():
        weights = nd.Variable(np.zeros(1 << 18))
        optimizer, seen = nd.optimizers.SGD(1.0), nd.metrics.Sum()
        gradient = np.ones(1 << 18)

        def step() -> None:
            replica = nd.get_replica_context()
            if how == "merge_call":
                replica.merge_call(lambda _: weights.assign_sub(gradient))
            else:
                optimizer.apply_gradients([(gradient / replica.num_replicas_in_sync, weights)])
            seen.update_state(1.0)

        for number in range(3):
            armed += [None] * (number == 1)
            strategy.run(step)
        return float(seen.result()), float(weights[0])


def come_late(rank: int, size: int, folder: str, how: str = "") -> Any:
    """Train; rank 2 comes in the last of three epochs, and learns how the others ended."""
    membership.FIRST_WAIT_SECONDS = 0.0
    meeting._OVER_SECONDS = 2.0
    with joined(max_workers=2 if how == "waits" else None) as strategy, strategy.scope():
        weights, seen = nd.Variable(0.0, aggregation="sum"), nd.metrics.Sum()
        meetings = strategy.session._meetings

        def step(part: Any) -> Any:
            seen.update_state(part)
            weights.assign_add(float(np.sum(part)))
            return np.sum(part)

        reads = []
        for epoch in range(3):
            result, total = None, 0.0
            for batch in strategy.elastic(nd.Dataset.range(12 * epoch + 12).batch(6)):
                if epoch == 2 and rank == 0:
                    Path(folder, "waits").touch()
                    if how == "breaks":
                        wait_until(Path(folder, "broke").exists)
                    else:
                        wait_until(lambda: meetings._peers or strategy.session.size == 3)
                result = strategy.run(step, args=(batch,))
                total += float(strategy.reduce("sum", result))
            if how == "breaks" and total == 0.0:
                Path(folder, "broke").touch()
                break
            read = float(seen.result()), float(strategy.reduce("sum", float(seen.result())))
            reads.append(read)
            seen.reset_state()
        return reads, float(weights)
