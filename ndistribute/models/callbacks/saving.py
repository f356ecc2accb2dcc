"""Callbacks that save a training: its model, all of its state, its metrics."""

from __future__ import annotations

import contextlib
import csv
import logging
import os
from pathlib import Path
from typing import Any

from ndistribute import tensor_files
from ndistribute.models.callbacks.callback import Callback, Logs, steps_of
from ndistribute.models.callbacks.control import Monitor
from ndistribute.models.checkpoint import Checkpoint, CheckpointManager, by_chief

_log = logging.getLogger("ndistribute")


class _Saving(Callback):
    """The base class of callbacks that save after each epoch, or after so many steps."""

    _every: int  # The number of steps; 0: after each epoch.

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Save after each `save_freq` steps."""
        if self.saves_after(self.model.position.steps_made):
            self._save(logs)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Save after the epoch, unless after steps."""
        if not self._every:
            self._save(logs)

    def saves_after(self, steps_made: int) -> bool:
        """Return True after each `save_freq` steps."""
        return bool(self._every) and steps_made % self._every == 0

    def _save(self, logs: Logs) -> None:
        raise NotImplementedError


class ModelCheckpoint(_Saving, Monitor):
    """Saves the model, its optimizer and its metrics as an `nd.Checkpoint`.

    Restore it with ``nd.Checkpoint(model=model).restore(path)``.

    Args:
        filepath: the path, in which ``{epoch}`` (from 1) and names of metrics are replaced, such as
            ``"runs/{epoch:02d}-{val_loss:.2f}"``.
        monitor: the metric of `save_best_only`.
        save_best_only: whether to save only when the metric is better than ever before.
        save_weights_only: whether to save the variables of the layers only.
        mode: ``"min"``, ``"max"`` or ``"auto"``, by the metric's name.
        save_freq: ``"epoch"``, or a number of steps.
    """

    def __init__(
        self,
        filepath: str | os.PathLike[str],
        monitor: str = "val_loss",
        save_best_only: bool = False,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        super().__init__(monitor, mode)
        if save_best_only and save_freq != "epoch":
            raise ValueError(
                "ModelCheckpoint: save_best_only compares the metrics of epochs, so it needs "
                f"save_freq='epoch', got {save_freq!r}."
            )
        self.filepath = os.fspath(filepath)
        self._best_only = save_best_only
        self._weights_only = save_weights_only
        self._every = steps_of(save_freq)
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Remember the epoch, for the path."""
        self._epoch = epoch

    def _save(self, logs: Logs) -> None:
        if self._best_only and not self.improved(logs):
            return
        path = self.filepath.format(epoch=self._epoch + 1, **logs)
        if self._weights_only:
            self.model.save_weights(path)
        else:
            Checkpoint(model=self.model).save(path)


class BackupAndRestore(_Saving):
    """Saves the training, and continues a training that was interrupted at the same step.

    The state has the model, the optimizer, the metrics, the random generators, the position in the
    dataset, and the state of callbacks that have one. It can be continued with another number of
    replicas or workers. The state is deleted when the training ends.

    Args:
        backup_dir: the directory of the state. One training uses it at a time: for a second one,
            `fit` raises an `OSError`.
        save_freq: ``"epoch"``, or a number of steps.
        delete_checkpoint: whether to delete the state when the training ends.
    """

    restores = True

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: str | int = "epoch",
        delete_checkpoint: bool = True,
    ) -> None:
        self.directory = Path(backup_dir)
        self._every = steps_of(save_freq)
        self._deletes = delete_checkpoint
        self._manager: CheckpointManager | None = None
        self._held = contextlib.ExitStack()

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Continue from the saved state, if there is one."""
        lock = tensor_files.exclusive(self.directory, "backup", seconds=0)
        by_chief(self.model.strategy, lambda: self._held.enter_context(lock))
        manager = CheckpointManager(Checkpoint(model=self.model), self.directory, max_to_keep=2)
        self._manager = continued(manager, self.model)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Delete the state, if the training was not interrupted."""
        with self._held:
            if self._deletes and self._manager is not None and self.model.position.finished:
                self._manager.delete()

    def _save(self, logs: Logs) -> None:
        if self._manager is not None:
            self._manager.save(self.model.position.steps_made)


def continued(manager: CheckpointManager, model: Any) -> CheckpointManager:
    """Return a manager that saves the training of a model too; continue from its newest state."""
    position = model.position
    stateful = [callback for callback in position.callbacks if hasattr(callback, "state_dict")]
    named = {f"{type(each).__name__}_{number}": each for number, each in enumerate(stateful)}
    manager = manager.extended(_model=model, _position=position, _callbacks=named)
    if manager.restore_or_initialize() is not None:
        _log.info("continuing at epoch %d, step %d", position.epoch + 1, position.step)
    return manager


class CSVLogger(Callback):
    """Writes the metrics of each epoch as a line of a file, on the chief.

    Args:
        filename: the file.
        separator: what separates the columns.
        append: whether to append to an existing file.
    """

    def __init__(
        self, filename: str | os.PathLike[str], separator: str = ",", append: bool = False
    ) -> None:
        self._path = Path(filename)
        self._separator = separator
        self._append = append
        self._started = False

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Append a line; before the first one, the names."""
        if not self.model.strategy.is_chief:
            return
        keeps = self._started or (self._append and self._path.exists())
        with self._path.open("a" if keeps else "w", newline="") as file:
            writer = csv.writer(file, delimiter=self._separator)
            if not keeps:
                writer.writerow(["epoch", *logs])
            writer.writerow([epoch, *logs.values()])
        self._started = True
