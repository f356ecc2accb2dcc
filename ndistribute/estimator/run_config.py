"""`RunConfig`: where and how an `Estimator` runs, with its task from `TF_CONFIG`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from ndistribute.cluster import ClusterResolver, ClusterSpec, TFConfigClusterResolver
from ndistribute.timers import UNSET, steps_or_seconds

_SAVE_SECONDS = 600


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """The settings of an `Estimator`, with the cluster and the task from `TF_CONFIG`.

    Args:
        model_dir: the directory of checkpoints and summaries.
        tf_random_seed: the seed of the graphs.
        save_summary_steps: write summaries every this many steps; None: never.
        save_checkpoints_steps: save every this many steps.
        save_checkpoints_secs: save every this many seconds. If you pass neither, it is 600; if you
            pass None for both, nothing is saved.
        session_config: the configuration of sessions.
        keep_checkpoint_max: the number of checkpoints to keep; 0: all.
        log_step_count_steps: log the loss and the steps per second every this many steps; None:
            never.
        train_distribute: the strategy of training; None: that of the current scope. In a cluster
            with ``ps`` tasks, these keep the variables, and each worker has one replica.
        eval_distribute: the strategy of evaluations; None: that of the current scope.

    Raises:
        ValueError: both `save_checkpoints_steps` and `save_checkpoints_secs` are passed, a number
            is negative, or `TF_CONFIG` is malformed.

    >>> config = RunConfig(save_checkpoints_steps=100)
    >>> config.is_chief, config.task_type, config.save_checkpoints_secs
    (True, 'worker', None)
    >>> config.replace(tf_random_seed=1).save_checkpoints_steps
    100
    """

    model_dir: str | None = None
    tf_random_seed: int | None = None
    save_summary_steps: int | None = 100
    save_checkpoints_steps: int | None = UNSET
    save_checkpoints_secs: float | None = UNSET
    session_config: Any = None
    keep_checkpoint_max: int = 5
    log_step_count_steps: int | None = 100
    train_distribute: Any = None
    eval_distribute: Any = None

    def __post_init__(self) -> None:
        steps, seconds = self.save_checkpoints_steps, self.save_checkpoints_secs
        if not {None, UNSET} & {steps, seconds}:
            why = "pass save_checkpoints_steps or save_checkpoints_secs, not both."
            raise ValueError(f"RunConfig: {why}")
        for name, every in (("steps", steps), ("secs", seconds)):
            if every not in (None, UNSET) and every <= 0:
                why = f"save_checkpoints_{name} must be above 0, got {every}."
                raise ValueError(f"RunConfig: {why}")
        steps, seconds = steps_or_seconds(steps, seconds, (None, _SAVE_SECONDS))
        object.__setattr__(self, "save_checkpoints_steps", steps)
        object.__setattr__(self, "save_checkpoints_secs", seconds)
        keep = self.keep_checkpoint_max
        if keep is not None and keep < 0:
            raise ValueError(f"RunConfig: keep_checkpoint_max must be 0 or more, got {keep}.")
        self.resolver  # noqa: B018 - A wrong TF_CONFIG is an error now.

    @functools.cached_property
    def resolver(self) -> ClusterResolver:
        """The cluster, and the task of this process in it."""
        return TFConfigClusterResolver()

    @property
    def cluster_spec(self) -> ClusterSpec:
        """The cluster; empty if there is none."""
        return self.resolver.cluster_spec()

    @property
    def task_type(self) -> str:
        """The job of this process; ``"worker"`` without a cluster."""
        return self.resolver.task_type or "worker"

    @property
    def task_id(self) -> int:
        """The index of this process in its job."""
        return self.resolver.task_id or 0

    @property
    def is_chief(self) -> bool:
        """Whether this process initialises the variables and saves checkpoints."""
        return self.resolver.is_chief

    @property
    def master(self) -> str:
        """The address of the server of this process; empty without a cluster, and for evaluators.

        Only a cluster with ``ps`` tasks needs sessions on a server.
        """
        needs_one = self.num_ps_replicas and self.task_type != "evaluator"
        return self.resolver.master() if needs_one else ""

    @property
    def num_ps_replicas(self) -> int:
        """The number of parameter servers."""
        return len(self.cluster_spec.as_dict().get("ps", ()))

    @property
    def num_worker_replicas(self) -> int:
        """The number of workers, including the chief."""
        return self.resolver.num_workers

    def replace(self, **changes: Any) -> RunConfig:
        """Return a copy with other values."""
        frequencies = ("save_checkpoints_steps", "save_checkpoints_secs")
        if any(changes.get(name) is not None for name in frequencies):
            changes = dict.fromkeys(frequencies) | changes
        return dataclasses.replace(self, **changes)
