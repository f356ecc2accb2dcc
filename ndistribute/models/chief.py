"""Training by a chief, which schedules the steps of an epoch on the workers of a cluster.

The workers do not wait for each other. Each takes its share of the batches, again and again, so an
epoch has as many steps as the dataset has batches, but a fast worker makes more of them.
"""

from __future__ import annotations

from typing import Any

from ndistribute.coordinator.coordinator import ClusterCoordinator
from ndistribute.optimizers import GradientAccumulation

__all__ = ["Chief", "schedules_steps"]


def schedules_steps(strategy: Any) -> bool:
    """Return True on the chief of a cluster of parameter servers and workers."""
    resolver = strategy.cluster_resolver
    return (
        hasattr(type(strategy), "servers")
        and resolver is not None
        and (resolver.task_type == "chief")
    )


class Chief:
    """Schedules the steps of a model.

    Args:
        model: the compiled model, which is built.
        data: the dataset of batches.
        steps: the number of steps of an epoch; None means the number of batches.

    Raises:
        ValueError: the number of steps is unknown, or the optimizer is a `GradientAccumulation`.
    """

    def __init__(self, model: Any, data: Any, steps: int | None) -> None:
        self._steps = data.cardinality() if steps is None else steps
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
                    "batch_size instead, or let workers run loops of their own."
                )
            wrapper = getattr(wrapper, "inner", None)
        strategy = model.strategy
        # Else only the workers would know the slots, and the chief would save none.
        model.optimizer.build(model.position.trained)
        self._model = model
        self._coordinator = ClusterCoordinator(strategy)
        repeated = data.repeat()
        self._batches = iter(
            self._coordinator.create_per_worker_dataset(
                lambda: strategy.distribute_dataset(repeated)
            )
        )

        def step(batches: Any, rate: float | None) -> None:
            if rate is not None:  # The worker has the model as it was at the first step.
                model.optimizer.learning_rate = rate
            model.run_step(next(batches))

        self._step = step

    def run_epoch(self, called: Any) -> None:
        """Make the steps of an epoch, and wait for them; the callbacks see no single step."""
        rate = self._model.optimizer.learning_rate
        args = (self._batches, None if callable(rate) else rate)
        for _ in range(self._steps):
            self._coordinator.schedule(self._step, args)
        self._coordinator.join()

    def close(self) -> None:
        """End the connections to the workers."""
        self._coordinator.close()
