"""Hooks that stop the training of an estimator early, by time or by metrics of evaluations.

Only the chief decides. It reads the metrics from the directory of the evaluations, so another
process may evaluate.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from ndistribute.estimator.estimator import Estimator, check_graph
from ndistribute.event_files import read_scalars
from ndistribute.exports import export as _export
from ndistribute.graph.hooks import EarlyStoppingHook, SessionRunHook


def make_early_stopping_hook(
    estimator: Estimator,
    should_stop_fn: Callable[[], bool],
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> SessionRunHook:
    """Return a hook that stops training on all workers when the chief's function returns True.

    Args:
        estimator: the estimator that is trained.
        should_stop_fn: called without arguments.
        run_every_secs: the seconds between its calls.
        run_every_steps: the steps between its calls; if you pass it, `run_every_secs` must be None.

    Raises:
        ValueError: the cluster has parameter servers; with these, each worker trains for itself.
    """
    check_graph(estimator, "early stopping", "pass callbacks.EarlyStopping")
    if not callable(should_stop_fn):
        raise TypeError(f"should_stop_fn must be a function, got {should_stop_fn!r}.")
    config = estimator.config
    if config.num_ps_replicas:
        why = (
            "with parameter servers, no worker can stop the others. Each worker trains until "
            "max_steps: pass max_steps."
        )
        raise ValueError(f"early stopping is not available: {why}")
    decide = should_stop_fn if config.is_chief else lambda: False
    return EarlyStoppingHook(decide, run_every_secs, run_every_steps)


def stop_if_no_decrease_hook(
    estimator: Estimator, metric_name: str, max_steps_without_decrease: int, **when: Any
) -> SessionRunHook:
    """Return a hook that stops training when a metric has not decreased for many steps.

    Args:
        estimator: see `make_early_stopping_hook`.
        metric_name: the name of the metric, such as ``"loss"``.
        max_steps_without_decrease: the number of steps since the best evaluation at which to stop.
        when: ``eval_dir``, the directory of the evaluations, by default ``estimator.eval_dir()``;
            ``min_steps``, the step before which evaluations do not count; and ``run_every_secs``
            and ``run_every_steps`` of `make_early_stopping_hook`.
    """
    return _stop_by_metric(estimator, metric_name, _since(min, max_steps_without_decrease), **when)


def stop_if_no_increase_hook(
    estimator: Estimator, metric_name: str, max_steps_without_increase: int, **when: Any
) -> SessionRunHook:
    """Return a hook that stops training when a metric has not increased for many steps.

    The arguments are those of `stop_if_no_decrease_hook`.
    """
    return _stop_by_metric(estimator, metric_name, _since(max, max_steps_without_increase), **when)


def stop_if_higher_hook(
    estimator: Estimator, metric_name: str, threshold: float, **when: Any
) -> SessionRunHook:
    """Return a hook that stops training when a metric is above a threshold.

    The other arguments are those of `stop_if_no_decrease_hook`.
    """
    return _stop_by_metric(estimator, metric_name, lambda of: max(of.values()) > threshold, **when)


def stop_if_lower_hook(
    estimator: Estimator, metric_name: str, threshold: float, **when: Any
) -> SessionRunHook:
    """Return a hook that stops training when a metric is below a threshold.

    The other arguments are those of `stop_if_no_decrease_hook`.
    """
    return _stop_by_metric(estimator, metric_name, lambda of: min(of.values()) < threshold, **when)


def _since(best_of: Callable[..., int], most_steps: int) -> Callable[[dict[int, float]], bool]:
    """Return whether `most_steps` steps have passed since the best of the metrics by step."""
    return lambda of: max(of) - best_of(of, key=lambda step: of[step]) >= most_steps


def _stop_by_metric(
    estimator: Estimator,
    metric_name: str,
    ends: Callable[[dict[int, float]], bool],
    *,
    eval_dir: str | os.PathLike[str] | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> SessionRunHook:
    folder = estimator.eval_dir() if eval_dir is None else eval_dir

    def should_stop() -> bool:
        numbers = {k: of for k, of in read_scalars(folder).items() if k >= min_steps}
        if any(metric_name not in metrics for metrics in numbers.values()):
            raise ValueError(f"an evaluation in {folder} has no metric {metric_name!r}.")
        return bool(numbers) and ends({k: of[metric_name] for k, of in numbers.items()})

    return make_early_stopping_hook(estimator, should_stop, run_every_secs, run_every_steps)


_export(vars())
