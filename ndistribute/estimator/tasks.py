"""`train_and_evaluate`: one program for all tasks of a cluster, or for a single process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from ndistribute import tensor_files
from ndistribute.errors import CheckpointCorruptError, NotFoundError, UnavailableError
from ndistribute.estimator.estimator import Estimator
from ndistribute.estimator.specs import EvalSpec, TrainSpec
from ndistribute.graph.hooks import CheckpointSaverListener
from ndistribute.graph.monitored import retried
from ndistribute.graph.service import service_at
from ndistribute.task.server import Server
from ndistribute.timers import Timer
from ndistribute.transport.address import split_address

_log = logging.getLogger("ndistribute")

_POLL_SECONDS = 0.5
_CONNECT_SECONDS = 5.0
_GREET_SECONDS = 10.0


def train_and_evaluate(estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec) -> Any:
    """Train, evaluate or serve variables, as the task of this process requires.

    Every task of the cluster in `TF_CONFIG` runs the same program. The chief and the workers train,
    and the chief saves checkpoints. Parameter servers serve until training has ended. The evaluator
    evaluates the newest checkpoint as often as `throttle_secs` allows, until a checkpoint has
    `max_steps`. A process without a cluster trains, and evaluates after its checkpoints.

    Args:
        estimator: the estimator, the same in all tasks.
        train_spec: the settings of training.
        eval_spec: the settings of the evaluations.

    Returns:
        In a single process and in the evaluator, the metrics of the last evaluation and an empty
        list, as in TensorFlow; None in other tasks.

    >>> import numpy as np, ndistribute as nd
    >>> x = np.arange(8, dtype=np.float32)
    >>> column = nd.estimator.feature_column.numeric_column("x")
    >>> model = nd.estimator.LinearRegressor([column])
    >>> def input_fn():
    ...     return {"x": x}, 3 * x
    >>> metrics, _ = train_and_evaluate(
    ...     model, TrainSpec(input_fn, max_steps=20), EvalSpec(input_fn)
    ... )
    >>> metrics["global_step"]
    20
    """
    for spec, kind in ((train_spec, TrainSpec), (eval_spec, EvalSpec)):
        if not isinstance(spec, kind):
            raise TypeError(f"train_and_evaluate needs a {kind.__name__}, got {spec!r}.")
    config = estimator.config
    cluster, task = config.cluster_spec, config.task_type
    if task == "evaluator":
        return Evaluations(estimator, eval_spec).follow(train_spec.max_steps), []
    if task == "ps":
        Server(cluster, task, config.task_id).join()
        return None
    if len(cluster.addresses()) <= 1:  # It evaluates between two steps, after each checkpoint.
        evaluations = Evaluations(estimator, eval_spec)
        listeners = [*train_spec.saving_listeners, evaluations]
        listening = dataclasses.replace(train_spec, saving_listeners=listeners)
        estimator.loops.train(listening, after_step=evaluations.evaluate_if_due)
        return evaluations.evaluate(), []
    on_servers = config.num_ps_replicas > 0
    serving = Server(cluster, task, config.task_id) if on_servers else contextlib.nullcontext()
    with serving as server:
        if server is not None:
            _greet(server, [cluster.task_address("ps", k) for k in cluster.task_indices("ps")])
        estimator.loops.train(train_spec)
        if on_servers and config.is_chief:
            _await_workers(config.resolver.worker_addresses[1:])
    return None


def _greet(server: Server, addresses: Sequence[str]) -> None:
    """Connect to the servers of variables; they wait for this even if there is nothing to train."""
    service, until = service_at(server.target), time.monotonic() + _GREET_SECONDS
    if service is None:
        return
    for address in addresses:
        with contextlib.suppress(UnavailableError):
            greet = functools.partial(service.pool.client(address).send_one_way, until=until)
            retried(greet, until - time.monotonic())


def _await_workers(addresses: Sequence[str]) -> None:
    """Wait until the other workers' servers end; without a chief, parameter servers then end."""
    for address in addresses:
        with contextlib.suppress(OSError):
            while True:
                socket.create_connection(split_address(address), _CONNECT_SECONDS).close()
                threading.Event().wait(_POLL_SECONDS)


class Evaluations(CheckpointSaverListener):
    """The evaluations of an estimator's checkpoints, at most one for each."""

    def __init__(self, estimator: Estimator, spec: EvalSpec) -> None:
        self._estimator, self._spec = estimator, spec
        self._timer = Timer(seconds=spec.throttle_secs)
        self._has_new = False
        self._evaluated: str | None = None
        self._metrics: Any = None

    def after_save(self, session: Any, global_step_value: int) -> None:
        """Remember that there is a checkpoint to evaluate."""
        self._has_new = True

    def evaluate_if_due(self) -> None:
        """Evaluate a new checkpoint, unless `throttle_secs` have not passed yet."""
        if self._has_new and self._timer.is_due():
            self._has_new = False
            self.evaluate()

    def evaluate(self) -> Any:
        """Return the metrics of the newest checkpoint."""
        path, spec = self._estimator.latest_checkpoint(), self._spec
        if path != self._evaluated:
            self._evaluated = path
            self._timer.mark()
            options = spec.input_fn, spec.steps, spec.hooks, path, spec.name
            self._metrics = self._estimator.evaluate(*options)
        return self._metrics

    def follow(self, max_steps: int | None) -> Any:
        """Evaluate each newest checkpoint until one has `max_steps` steps; None: without end."""
        waiting = threading.Event()
        waiting.wait(self._spec.start_delay_secs)
        folder = self._estimator.model_dir
        for _ in tensor_files.appearing(folder, set(), _POLL_SECONDS, newest=True):
            try:
                metrics = self.evaluate()
            except (CheckpointCorruptError, FileNotFoundError, NotFoundError) as error:
                _log.warning(
                    "a checkpoint is damaged or deleted, so it is not evaluated: %s", error
                )
            else:
                if max_steps is not None and metrics["global_step"] >= max_steps:
                    return metrics
            waiting.wait(max(self._timer.seconds_left, 0.0))
        return self._metrics
