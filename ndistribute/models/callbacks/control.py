"""Callbacks that set the learning rate or stop training, by the metrics of epochs."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from ndistribute.devices import as_array
from ndistribute.exports import export as _export
from ndistribute.mistakes import accepting
from ndistribute.models.callbacks.callback import Callback, Logs
from ndistribute.models.checkpoint import on_any_worker

_log = logging.getLogger("ndistribute")


class _Continued(Callback):
    """The base class of callbacks whose state is the attributes named in `kept`."""

    kept: tuple[str, ...] = ()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a continued training run needs."""
        return {name: getattr(self, name) for name in self.kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of `state_dict`."""
        for name in self.kept:
            setattr(self, name, state[name])

    @property
    def rate(self) -> float:
        """The optimizer's learning rate, which must be a number."""
        rate = self.model.optimizer.learning_rate
        if callable(rate):
            raise ValueError(
                f"{type(self).__name__} sets the learning rate, but the optimizer has a schedule, "
                "which sets it at each step: create the optimizer with a number as learning_rate, "
                "or leave out the callback."
            )
        return float(as_array(rate))

    @rate.setter
    def rate(self, rate: float) -> None:
        self.model.optimizer.learning_rate = rate

    def log_rate(self, logs: Logs) -> None:
        """Add the rate to the logs of an epoch, which the callbacks after this one see."""
        if isinstance(logs, dict):
            logs["learning_rate"] = self.rate


class LearningRateScheduler(_Continued):
    """A callback that sets the optimizer's learning rate before each epoch.

    Args:
        schedule: called with the epoch, from 0, and with the current rate if it takes two
            arguments; returns the rate.
    """

    kept = ("rate", "_set")

    @accepting("verbose")
    def __init__(self, schedule: Callable[..., float]) -> None:
        self._schedule = schedule
        try:
            inspect.signature(schedule).bind(0, 0.0)
            self._takes_rate = True
        except TypeError:
            self._takes_rate = False
        self._set: int | None = None  # The epoch for which the rate is set.

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Check that the optimizer has no schedule."""
        _ = self.rate  # Raises if it is a schedule.
        self._set = None

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Set the rate, unless this continues an epoch that had begun."""
        if epoch != self._set:
            args = (epoch, self.rate) if self._takes_rate else (epoch,)
            self.rate, self._set = float(self._schedule(*args)), epoch

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Log the rate."""
        self.log_rate(logs)


class Monitor(_Continued):
    """The base class of callbacks that follow a metric from epoch to epoch.

    Args:
        monitor: the metric's name in the logs of an epoch.
        mode: ``"min"``, ``"max"`` or ``"auto"``; ``"auto"`` means max if the name contains "acc",
            "auc", "precision" or "recall", and otherwise min.
        min_delta: the least change that counts as an improvement.

    Raises:
        ValueError: the mode is unknown.
    """

    kept: tuple[str, ...] = ("best", "wait")

    def __init__(self, monitor: str, mode: str = "auto", min_delta: float = 0.0) -> None:
        if mode not in ("auto", "min", "max"):
            raise ValueError(f"mode must be 'auto', 'min' or 'max', got {mode!r}.")
        if mode == "auto":
            rising = any(word in monitor for word in ("acc", "auc", "precision", "recall"))
            mode = "max" if rising else "min"
        self.monitor = monitor
        self._sign = 1.0 if mode == "max" else -1.0
        self._min_delta = abs(min_delta)
        self.best: float | None = None
        self.wait = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Forget the best value."""
        self.best, self.wait = None, 0

    def is_judged(self, logs: Logs) -> bool:
        """Return True if an epoch has the metric, False if the epoch was not validated."""
        if self.monitor in logs:
            return True
        is_validated = any(name.startswith("val_") for name in logs)
        if not self.monitor.startswith("val_") or is_validated or not self.model.position.validates:
            names = ", ".join(logs)
            raise ValueError(
                f"{type(self).__name__} monitors {self.monitor!r}, but the logs have only {names}. "
                "Pass validation_data to get names with val_, or monitor one of these."
            )
        return False

    def improved(self, logs: Logs) -> bool:
        """Return True if the metric is the best so far; otherwise count the epoch."""
        value = logs[self.monitor]
        if self.exceeds(value, self.best):
            self.best, self.wait = value, 0
            return True
        self.wait += 1
        return False

    def exceeds(self, value: float, other: float | None) -> bool:
        """Return True if a value is better than another; any value is better than None."""
        if math.isnan(value):
            return False
        return other is None or self._sign * (value - other) > self._min_delta


class EarlyStopping(Monitor):
    """A callback that stops training when a metric no longer improves.

    Args:
        monitor: the metric's name in the logs of an epoch.
        min_delta: the least change that counts as an improvement.
        patience: the number of epochs without an improvement to wait for one.
        mode: ``"min"``, ``"max"`` or ``"auto"``, by the metric's name.
        baseline: an improvement ends the wait only if its value is also better than this.
        restore_best_weights: whether to restore the weights of the best epoch at the end.
        start_from_epoch: the first epoch that counts.

    Attributes:
        stopped_epoch: the epoch after which the callback stopped training; 0 if it did not.
        best: the best value.
    """

    kept = (*Monitor.kept, "stopped_epoch", "_weights")

    @accepting("verbose")
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
        self._weights, self.stopped_epoch = None, 0

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `state_dict`, or remain stopped."""
        super().load_state_dict(state)
        if self.stopped_epoch:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Compare the epoch with the best one."""
        if epoch < self._start or not self.is_judged(logs):
            return
        waited = self.wait
        better = self.improved(logs)
        if self._restores and (better or self._weights is None):
            self._weights = self.model.get_weights()
        if better:  # Only a value that is also better than the baseline ends the wait.
            if self._baseline is not None and not self.exceeds(logs[self.monitor], self._baseline):
                self.wait = waited + 1
        elif self.wait >= self.patience and epoch > 0:
            self.stopped_epoch = epoch
            self.model.stop_training = True

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Restore the weights of the best epoch."""
        if self._weights is not None:
            self.model.set_weights(self._weights)


class ReduceLROnPlateau(Monitor):
    """A callback that lowers the learning rate when a metric no longer improves.

    Args:
        monitor: the metric's name in the logs of an epoch.
        factor: the factor by which the rate is multiplied, in ``(0, 1)``.
        patience: the number of epochs without an improvement to wait for one.
        mode: ``"min"``, ``"max"`` or ``"auto"``, by the metric's name.
        min_delta: the least change that counts as an improvement.
        cooldown: the number of epochs after a change; as in Keras, the last of them counts again.
        min_lr: the lowest rate.
    """

    kept = (*Monitor.kept, "_cooling", "rate")

    @accepting("verbose")
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

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Forget the best value; check that the optimizer has no schedule."""
        super().on_train_begin()
        _ = self.rate  # Raises if it is a schedule.
        self._cooling = 0

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Lower the rate if the metric has not improved for `patience` epochs; log the old rate."""
        self.log_rate(logs)
        if not self.is_judged(logs):
            return
        better = self.improved(logs)
        if self._cooling:
            self._cooling -= 1
            self.wait = int(not better and not self._cooling)
        if not self._cooling and not better and self.wait >= self.patience:
            rate = max(self.min_lr, self.rate * self.factor)
            if rate < self.rate:
                _log.info("epoch %d: the learning rate becomes %g", epoch + 1, rate)
                self.rate = rate
            self._cooling, self.wait = self._cooldown, 0


class TerminateOnNaN(Callback):
    """A callback that stops training on all replicas when the loss becomes NaN or infinite.

    All workers stop after the same step. For this they make a small collective after each step.
    """

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Stop training if the mean loss of a replica is not finite."""
        if on_any_worker(self.model.strategy, not math.isfinite(logs.get("loss", 0.0))):
            _log.warning("step %d: the loss is NaN or infinite, so training stops", batch + 1)
            self.model.stop_training = True


_export(vars(), but="Monitor")
