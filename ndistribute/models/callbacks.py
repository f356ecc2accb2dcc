"""Callbacks: what a model calls while it is fitted."""

from __future__ import annotations

import csv
import functools
import inspect
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ndistribute.models.checkpoint import Checkpoint, CheckpointManager

__all__ = [
    "BackupAndRestore",
    "CSVLogger",
    "Callback",
    "EarlyStopping",
    "History",
    "LambdaCallback",
    "LearningRateScheduler",
    "ModelCheckpoint",
    "ReduceLROnPlateau",
    "TerminateOnNaN",
]

_log = logging.getLogger("ndistribute")

Logs = Mapping[str, float]


class Callback:
    """The base class of callbacks; a subclass overrides the methods that it needs.

    Every worker calls them at the same steps. Metrics in the logs of an epoch are those of all
    replicas; in the logs of a batch, those of the replicas of this process since the epoch began.
    Methods for a beginning, and `on_train_end`, get empty logs, as in Keras.

    Attributes:
        model: the model that is fitted.
        params: the arguments of `fit`: `epochs`, `steps` (None if unknown) and `verbose`.
    """

    model: Any = None
    params: Mapping[str, Any] = {}

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Called before the first epoch."""

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Called after the last epoch; also if an exception ends the training."""

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Called before each epoch, counted from 0."""

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Called after each epoch and its validation."""

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Called before each step, counted from 0 in each epoch."""

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Called after each step."""


class Callbacks(Callback):
    """Several callbacks, called in turn.

    Args:
        callbacks: the callbacks.
        model: the model that is fitted.
        params: see `Callback`.
    """

    def __init__(
        self, callbacks: Iterable[Callback], model: Any, params: Mapping[str, Any]
    ) -> None:
        self.members = list(callbacks)
        for one in self.members:
            if not isinstance(one, Callback):
                raise TypeError(f"callbacks must be a list of Callback objects, got {one!r}.")
            one.model, one.params = model, params

        for name in ("on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end"):
            setattr(self, name, functools.partial(self._call, name))

    def _call(self, name: str, *args: Any) -> None:
        logs: tuple[Any, ...] = () if name == "on_epoch_end" else ({},)
        for one in self.members:
            getattr(one, name)(*args, *logs)

    def overriding(self, name: str) -> list[Callable[..., None]]:
        """Return the methods of a name that a callback defines itself."""
        plain = getattr(Callback, name)
        methods = [getattr(one, name) for one in self.members]
        return [method for method in methods if getattr(method, "__func__", None) is not plain]


class History(Callback):
    """The logs of each epoch; `fit` returns it.

    Attributes:
        epoch: the numbers of the epochs.
        history: the values of each metric, one an epoch.
    """

    def __init__(self) -> None:
        self.epoch: list[int] = []
        self.history: dict[str, list[float]] = {}

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Append the epoch's metrics."""
        self.epoch.append(epoch)
        for name, value in logs.items():
            self.history.setdefault(name, []).append(value)


class LambdaCallback(Callback):
    """A callback made of functions.

    Args:
        functions: by keyword, such as ``on_epoch_end=lambda epoch, logs: print(logs)``.

    Raises:
        TypeError: a keyword is not the name of a method of `Callback`.
    """

    def __init__(self, **functions: Callable[..., None]) -> None:
        for name, function in functions.items():
            if not name.startswith("on_") or not hasattr(Callback, name):
                raise TypeError(f"LambdaCallback: there is no {name}.")
            setattr(self, name, function)


class LearningRateScheduler(Callback):
    """Sets the optimizer's learning rate before each epoch.

    Args:
        schedule: called with the epoch, from 0, and with the current rate if it takes two
            arguments; returns the rate.
    """

    def __init__(self, schedule: Callable[..., float]) -> None:
        self._schedule = schedule
        try:
            inspect.signature(schedule).bind(0, 0.0)
            self._takes_rate = True
        except TypeError:
            self._takes_rate = False

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Set the rate."""
        optimizer = self.model.optimizer
        args = (epoch, optimizer.learning_rate) if self._takes_rate else (epoch,)
        optimizer.learning_rate = float(self._schedule(*args))


class _Monitor(Callback):
    """The base class of callbacks that follow a metric from epoch to epoch.

    Args:
        monitor: the metric's name in the logs of an epoch.
        mode: ``"min"``, ``"max"``, or ``"auto"`` for max if the name contains "acc", "auc",
            "precision" or "recall".
        min_delta: the least change that counts as an improvement.

    Raises:
        ValueError: the mode is unknown.
    """

    def __init__(self, monitor: str, mode: str = "auto", min_delta: float = 0.0) -> None:
        if mode not in ("auto", "min", "max"):
            raise ValueError(f"mode must be 'auto', 'min' or 'max', got {mode!r}.")
        rising = any(word in monitor for word in ("acc", "auc", "precision", "recall"))
        self.monitor = monitor
        self._sign = 1.0 if mode == "max" or (mode == "auto" and rising) else -1.0
        self._min_delta = abs(min_delta)
        self.best: float | None = None
        self.wait = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Forget the best value."""
        self.best, self.wait = None, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, and the number of epochs since."""
        return {"best": self.best, "wait": self.wait}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `state_dict`."""
        self.best, self.wait = state["best"], state["wait"]

    def improved(self, logs: Logs) -> bool:
        """Return True if the metric is better than ever before; else count the epoch."""
        value = logs.get(self.monitor)
        if value is None:
            names = ", ".join(logs)
            raise ValueError(
                f"{type(self).__name__} monitors {self.monitor!r}, but there are only {names}. "
                "Pass validation_data for names with val_, or another monitor."
            )
        if self.best is None or self._sign * (value - self.best) > self._min_delta:
            self.best, self.wait = value, 0
            return True
        self.wait += 1
        return False


class EarlyStopping(_Monitor):
    """Ends the training when a metric no longer improves.

    Args:
        monitor: the metric's name in the logs of an epoch.
        min_delta: the least change that counts as an improvement.
        patience: the number of epochs without an improvement to wait for one.
        mode: ``"min"``, ``"max"`` or ``"auto"``, by the metric's name.
        baseline: the value to improve on from the start.
        restore_best_weights: whether the model gets the weights of the best epoch at the end.
        start_from_epoch: the first epoch that counts.

    Attributes:
        stopped_epoch: the epoch that ended the training; 0 if none did.
        best: the best value.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        min_delta: float = 0.0,
        patience: int = 0,
        mode: str = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,
        start_from_epoch: int = 0,
    ) -> None:
        super().__init__(monitor, mode, min_delta)
        self.patience = patience
        self.stopped_epoch = 0
        self._baseline = baseline
        self._restores = restore_best_weights
        self._start = start_from_epoch
        self._weights: Any = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Forget the best epoch."""
        super().on_train_begin()
        self.best, self._weights, self.stopped_epoch = self._baseline, None, 0

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Compare the epoch with the best one."""
        if epoch < self._start:
            return
        if self.improved(logs):
            if self._restores:
                self._weights = self.model.get_weights()
        elif self.wait >= self.patience:
            self.stopped_epoch = epoch
            self.model.stop_training = True

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Restore the weights of the best epoch."""
        if self._weights is not None:
            self.model.set_weights(self._weights)


class ReduceLROnPlateau(_Monitor):
    """Lowers the learning rate when a metric no longer improves.

    Args:
        monitor: the metric's name in the logs of an epoch.
        factor: what the rate is multiplied by, in ``(0, 1)``.
        patience: the number of epochs without an improvement to wait for one.
        mode: ``"min"``, ``"max"`` or ``"auto"``, by the metric's name.
        min_delta: the least change that counts as an improvement.
        cooldown: the number of epochs after a change that do not count.
        min_lr: the lowest rate.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        mode: str = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        if not 0 < factor < 1:
            raise ValueError(f"ReduceLROnPlateau: factor must be between 0 and 1, got {factor}.")
        super().__init__(monitor, mode, min_delta)
        self.factor, self.patience, self.min_lr = factor, patience, min_lr
        self._cooldown, self._cooling = cooldown, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, the epochs since, and the rate."""
        rate = self.model.optimizer.learning_rate
        return {**super().state_dict(), "cooling": self._cooling, "rate": rate}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `state_dict`."""
        super().load_state_dict(state)
        self._cooling = state["cooling"]
        self.model.optimizer.learning_rate = state["rate"]

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Lower the rate if the metric has not improved for long enough."""
        better = self.improved(logs)
        if self._cooling:
            self._cooling -= 1
            self.wait = 0
        elif not better and self.wait >= self.patience:
            optimizer = self.model.optimizer
            rate = max(self.min_lr, optimizer.learning_rate * self.factor)
            if rate < optimizer.learning_rate:
                _log.info("epoch %d: the learning rate becomes %g", epoch + 1, rate)
                optimizer.learning_rate = rate
            self._cooling, self.wait = self._cooldown, 0


class ModelCheckpoint(_Monitor):
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
        self.filepath = os.fspath(filepath)
        self._best_only = save_best_only
        self._weights_only = save_weights_only
        self._every = _steps_of(save_freq)
        self._steps = 0
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Remember the epoch, for the path."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Save after each `save_freq` steps."""
        self._steps += 1
        if self._every and self._steps % self._every == 0:
            self._save(logs)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Save the epoch."""
        if not self._every and (not self._best_only or self.improved(logs)):
            self._save(logs)

    def _save(self, logs: Logs) -> None:
        path = self.filepath.format(epoch=self._epoch + 1, **logs)
        if self._weights_only:
            self.model.save_weights(path)
        else:
            Checkpoint(model=self.model).save(path)


class BackupAndRestore(Callback):
    """Saves the training, and continues a training that was interrupted at the same step.

    The state has the model, the optimizer, the metrics, the random generators, the position in the
    dataset, and the state of callbacks that have one. It can be continued with another number of
    replicas or workers. The state is deleted when the training ends.

    Args:
        backup_dir: the directory of the state, which one training uses.
        save_freq: ``"epoch"``, or a number of steps.
        delete_checkpoint: whether to delete the state when the training ends.
    """

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: str | int = "epoch",
        delete_checkpoint: bool = True,
    ) -> None:
        self.directory = Path(backup_dir)
        self._every = _steps_of(save_freq)
        self._deletes = delete_checkpoint
        self._manager: CheckpointManager | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Continue from the saved state, if there is one."""
        position = self.model.position
        stateful = [one for one in position.callbacks if hasattr(one, "state_dict")]
        checkpoint = Checkpoint(model=self.model, position=position, callbacks=stateful)
        self._manager = CheckpointManager(checkpoint, self.directory, max_to_keep=2)
        if self._manager.restore_or_initialize() is not None:
            _log.info("continuing at epoch %d, step %d", position.epoch + 1, position.step)

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Save after each `save_freq` steps."""
        if self._every and self.model.position.steps_made % self._every == 0:
            self._save()

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Save after the epoch."""
        if not self._every:
            self._save()

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Delete the state, if the training was not interrupted."""
        if self._deletes and self._manager is not None and self.model.position.finished:
            self._manager.delete()

    def _save(self) -> None:
        if self._manager is not None:
            self._manager.save(self.model.position.steps_made)


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


class TerminateOnNaN(Callback):
    """Ends the training when the loss is no number, on all replicas after the same step.

    The workers agree after each step, which costs a small collective.
    """

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """End the training if the mean loss of a replica is not finite."""
        if self.model.on_any_worker(not math.isfinite(logs["loss"])):
            _log.warning("step %d: the loss is not finite; the training ends", batch + 1)
            self.model.stop_training = True


def _steps_of(save_freq: str | int) -> int:
    """Return the number of steps between saves; 0 for an epoch."""
    if save_freq == "epoch":
        return 0
    if isinstance(save_freq, str) or save_freq < 1:
        raise ValueError(f"save_freq must be 'epoch' or a number of steps, got {save_freq!r}.")
    return save_freq
