"""Training by a chief, which schedules the steps of an epoch on the workers of a cluster.

The workers do not wait for each other. Each repeats its share of the batches. An epoch has as many
steps as the dataset has batches, but a fast worker makes more of these steps. Callbacks see the
steps in the order in which they end.
"""

from __future__ import annotations

import functools
import queue
from collections.abc import Callable, Sequence
from typing import Any

from ndistribute.coordinator.coordinator import ClusterCoordinator
from ndistribute.data import UNKNOWN_CARDINALITY
from ndistribute.models.batches import DatasetCreator
from ndistribute.models.callbacks.callback import Callbacks
from ndistribute.optimizers import GradientAccumulation

# Enough that a worker always has its next steps. Few, because these steps are still made after
# training was told to stop.
_STEPS_AHEAD = 32  # For each worker.


def schedules_steps(strategy: Any) -> bool:
    """Return True on the chief of a cluster of parameter servers and workers."""
    resolver = strategy.cluster_resolver
    is_chief = resolver is not None and resolver.task_type == "chief"
    return is_chief and hasattr(type(strategy), "servers")


class Chief:
    """Schedules the steps of a model.

    Args:
        model: the compiled model, which is built.
        source: the data that was passed to `fit`, which may be a `DatasetCreator`.
        data: the dataset of batches that `source` gives.
        steps: the number of steps of an epoch; None means the number of batches.

    Raises:
        ValueError: the number of steps is unknown, or the optimizer is a `GradientAccumulation`.
    """

    def __init__(self, model: Any, source: Any, data: Any, steps: int | None) -> None:
        if isinstance(source, DatasetCreator):
            known = UNKNOWN_CARDINALITY
            distribute = functools.partial(source.distributed, model.strategy)
        elif hasattr(data, "repeat"):
            known = data.cardinality()
            distribute = functools.partial(model.strategy.distribute_dataset, data.repeat())
        else:
            raise ValueError(
                "fit distributes the dataset itself on a chief: pass a dataset that is not "
                "distributed yet."
            )
        self._steps = known if steps is None else steps
        if self._steps < 0:
            raise ValueError(
                "the number of steps of an epoch is unknown: pass steps_per_epoch, so that the "
                "chief knows how many steps to schedule."
            )
        wrapper = model.optimizer
        while wrapper is not None:
            if isinstance(wrapper, GradientAccumulation):
                raise ValueError(
                    "GradientAccumulation: workers of a chief would mix their sums. Pass a larger "
                    "batch_size instead, or let each worker run its own loop."
                )
            wrapper = getattr(wrapper, "inner", None)
        strategy = model.strategy
        # Otherwise only the workers would know the slots, and the chief would not save them.
        model.optimizer.build(model.position.trained)
        self._model = model
        self._coordinator = ClusterCoordinator(strategy)
        self._batches = iter(self._coordinator.create_per_worker_dataset(distribute))

        def step(batches: Any, rate: float | None) -> Any:
            if rate is not None:  # The worker has the model as it was at the first step.
                model.optimizer.learning_rate = rate
            return model.run_step(next(batches))

        self._step = step
        workers = strategy.cluster_resolver.cluster_spec().num_tasks("worker")
        self._most_ahead = _STEPS_AHEAD * workers

    def run_epoch(self, called: Callbacks) -> None:
        """Make the remaining steps of an epoch; callbacks see the n-th step that ends as step n."""
        model, position, ended = self._model, self._model.position, queue.SimpleQueue[Any]()
        begin = called.overriding("on_train_batch_begin")
        end = called.overriding("on_train_batch_end")
        savers = called.overriding("saves_after")
        position.ahead = 0
        while True:
            while not model.stop_training and self._may_schedule(savers):
                for call in begin:
                    call(position.step + position.ahead, {})
                rate = model.optimizer.learning_rate
                args = (self._batches, None if callable(rate) else rate)
                self._coordinator.schedule(self._step, args).add_done_callback(ended.put)
                position.ahead += 1
            if not position.ahead:
                return
            result = ended.get()
            if result.error is not None:
                self._coordinator.join()  # Raises the first error.
            model.take_logs(result.fetch())
            position.ahead -= 1
            model.finish_step(end)

    def _may_schedule(self, savers: Sequence[Callable[[int], bool]]) -> bool:
        """Return True unless enough steps are scheduled, or a callback saves before the next."""
        position = self._model.position
        if position.step + position.ahead >= self._steps or position.ahead >= self._most_ahead:
            return False
        scheduled = position.steps_made + position.ahead
        return not position.ahead or not any(saves(scheduled) for saves in savers)

    def close(self) -> None:
        """Close the connections to the workers."""
        self._coordinator.close()
