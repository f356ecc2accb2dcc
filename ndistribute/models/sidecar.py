"""`SidecarEvaluator`: a task beside a training job that evaluates each new checkpoint."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ndistribute import tensor_files
from ndistribute.errors import CheckpointCorruptError
from ndistribute.models.batches import check_counts, unpacked
from ndistribute.models.callbacks.callback import Callback, Callbacks, History
from ndistribute.models.checkpoint import Weights
from ndistribute.models.position import TrainingPosition
from ndistribute.tensor_files import Saved

_log = logging.getLogger("ndistribute")


@dataclasses.dataclass(eq=False, repr=False)
class SidecarEvaluator:
    """A task that evaluates a model with the weights of each new checkpoint in a directory.

    It takes the checkpoints in order. They are those of `CheckpointManager`, `ModelCheckpoint`,
    `BackupAndRestore` or `save_weights`, with the model under the name ``model``. It reads only the
    weights, so the optimizer may differ from that of the training job. It skips a checkpoint that
    is damaged or already deleted.

    Args:
        model: the compiled model, of a strategy with one process.
        data: the data for `evaluate`: a dataset, or ``(x, y)``.
        checkpoint_dir: the directory.
        steps: the number of batches; None means all.
        max_evaluations: the number of checkpoints after which it ends; None: no limit.
        callbacks: during each evaluation, it calls the methods that `evaluate` calls. After it, it
            calls `on_epoch_end` with the number of steps made and the metrics, whose names begin
            with ``val_``. A callback that sets `stop_training` ends the task.
        timeout_seconds: how long it waits for the next checkpoint before it ends.
        poll_seconds: how often it looks at the directory, in seconds.

    Raises:
        ValueError: a number is negative, or the strategy of the model has several workers.
    """

    model: Any
    data: Any
    checkpoint_dir: str | os.PathLike[str]
    steps: int | None = None
    max_evaluations: int | None = None
    callbacks: Iterable[Callback] = ()
    _: dataclasses.KW_ONLY
    timeout_seconds: float = 600.0
    poll_seconds: float = 1.0

    def __post_init__(self) -> None:
        if self.timeout_seconds <= 0 or self.poll_seconds <= 0:
            raise ValueError("timeout_seconds and poll_seconds must be above 0.")
        check_counts(1, steps=self.steps, max_evaluations=self.max_evaluations)
        if self.model.strategy.input_topology.workers is not None:
            raise ValueError(
                "SidecarEvaluator runs in one process, beside the workers: create the model in the "
                "scope of a strategy of one process, such as MirroredStrategy."
            )
        unpacked(self.data)  # Raises if this is not data.
        self.callbacks = list(self.callbacks)
        self._seen: set[Path] = set()

    def start(self) -> History:
        """Evaluate checkpoints until there are no more, and return the metrics of each.

        Raises:
            TimeoutError: there was no checkpoint at all.
            ValueError: a checkpoint does not fit the model.
        """
        model, history = self.model, History()
        params = {"epochs": self.max_evaluations, "steps": None}
        called = Callbacks([*self.callbacks, history], model, params)
        model.stop_training = False
        model.position = TrainingPosition(0, called.members)
        called.call("on_train_begin", {})
        try:
            wait = self.poll_seconds, self.timeout_seconds
            for path in tensor_files.appearing(self.checkpoint_dir, self._seen, *wait):
                saved = self._read(path)
                if saved is not None:
                    self._evaluate(saved, called)
                if len(history.epoch) == self.max_evaluations or model.stop_training:
                    break
        finally:
            called.call("on_train_end", {})
        if not history.epoch:
            raise TimeoutError(
                f"SidecarEvaluator found no intact checkpoint in {self.checkpoint_dir} in "
                f"{self.timeout_seconds:g} s. Pass the directory in which the training saves."
            )
        return history

    def _evaluate(self, saved: Saved, called: Callbacks) -> None:
        model = self.model
        Weights(model=model).load(str(saved.path), saved.tensors, saved.data)
        x, y, weight = unpacked(self.data)
        options = {"sample_weight": weight, "steps": self.steps, "callbacks": called}
        metrics = model.evaluate(x, y, verbose=0, return_dict=True, **options)
        step = _step_of(saved)
        model.position.steps_made = step
        _log.info("step %d, %s: %s", step, saved.path.name, metrics)
        called.call("on_epoch_end", step, {f"val_{key}": value for key, value in metrics.items()})

    def _read(self, path: Path) -> Saved | None:
        """Return a checkpoint; None if it is damaged or was deleted."""
        try:
            return tensor_files.read(path)
        except (CheckpointCorruptError, FileNotFoundError) as error:
            if path.exists():
                _log.warning("%s is damaged, so it is not evaluated: %s", path, error)
            return None


def _step_of(saved: Saved) -> int:
    """Return the number of steps made, from the manager, or from the optimizer or the file."""
    if "step" in saved.data:
        return int(saved.data["step"])
    counts = [int(count) for name, count in saved.tensors.items() if name.endswith("/iterations")]
    return max(counts, default=int(saved.path.name.rpartition(".")[2]))
