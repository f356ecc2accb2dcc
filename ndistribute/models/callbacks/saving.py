"""Callbacks that save the model, the whole state of training, or metrics for TensorBoard.

Before a cluster takes machines away, it sends a worker a SIGTERM. The signal only sets a flag.
After each step, a small collective tells the workers whether any of them has the flag, so all save
at the same step.
"""

from __future__ import annotations

import contextlib
import csv
import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ndistribute import tensor_files, timeline
from ndistribute.devices import as_array
from ndistribute.event_files import EventFile, histogram, image
from ndistribute.exports import export as _export
from ndistribute.mistakes import accepting
from ndistribute.models.callbacks.callback import Callback, Logs, steps_of
from ndistribute.models.callbacks.control import Monitor
from ndistribute.models.checkpoint import Checkpoint, by_chief, on_any_worker
from ndistribute.models.checkpoint_manager import CheckpointManager
from ndistribute.models.newcomers import is_outside

_log = logging.getLogger("ndistribute")


class _Saving(Callback):
    """The base class of callbacks that save after each epoch, or every `save_freq` steps."""

    _every: int  # The number of steps; 0: after each epoch.

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Save after each `save_freq` steps."""
        if self.saves_after(self.model.position.steps_made):
            self._save(logs)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Save after the epoch, unless `save_freq` is a number of steps."""
        if not self._every:
            self._save(logs)

    def saves_after(self, steps_made: int) -> bool:
        """Return True after each `save_freq` steps."""
        return bool(self._every) and steps_made % self._every == 0

    def _save(self, logs: Logs) -> None:
        raise NotImplementedError


class ModelCheckpoint(_Saving, Monitor):
    """A callback that saves the model, its optimizer and its metrics.

    If the path ends in ``.keras`` or ``.h5``, it saves like `Model.save`, and `models.load` reads
    the result. Otherwise it writes an `nd.Checkpoint`, which
    ``nd.Checkpoint(model=model).restore(path)`` reads. `load_weights` reads both.

    Args:
        filepath: the path, in which ``{epoch}`` (from 1) and names of metrics are replaced, such as
            ``"runs/{epoch:02d}-{val_loss:.2f}"``.
        monitor: the metric of `save_best_only`.
        save_best_only: whether to save only when the metric is the best so far.
        save_weights_only: whether to save the variables of the layers only.
        mode: ``"min"``, ``"max"`` or ``"auto"``, by the metric's name.
        save_freq: ``"epoch"``, or a number of steps.
    """

    @accepting("verbose")
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
        if self._best_only and not (self.is_judged(logs) and self.improved(logs)):
            return
        path = self.filepath.format(epoch=self._epoch + 1, **logs)
        if self._weights_only:
            self.model.save_weights(path)
        elif path.endswith((".keras", ".h5")):
            self.model.save(path)
        else:
            Checkpoint(model=self.model).save(path)


class BackupAndRestore(_Saving):
    """A callback that saves the state of training, and continues at the same step after a crash.

    The state contains the model, the optimizer, the metrics, the random generators, the position in
    the dataset, and the states of callbacks. Training can continue with another number of replicas
    or workers. The callback deletes the state when training ends.

    Args:
        backup_dir: the directory of the state. Only one job may use it at a time: in a second job,
            `fit` raises an `OSError`.
        save_freq: ``"epoch"``, or a number of steps.
        delete_checkpoint: whether to delete the state when training ends.
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
        self._claims = False

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Continue from the saved state, if there is one."""
        by_chief(self.model.strategy, self._claim)
        manager = CheckpointManager(Checkpoint(model=self.model), self.directory, max_to_keep=2)
        self._manager = continued(manager, self.model)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Delete the state, unless training was interrupted."""
        with self._held:
            if self._deletes and self._manager is not None and self.model.position.finished:
                self._manager.delete()

    def _save(self, logs: Logs) -> None:
        if self._manager is not None:
            if self.model.strategy.is_chief:
                with contextlib.suppress(OSError):  # A stopped chief may hold it.
                    self._claim()
            self._manager.save(self.model.position.steps_made)

    def _claim(self) -> None:
        """Lock the directory, unless this worker has done so."""
        if not self._claims:
            lock = tensor_files.exclusive(self.directory, "backup", seconds=0)
            self._held.enter_context(lock)
            self._claims = True
            self._held.callback(setattr, self, "_claims", False)


def continued(manager: CheckpointManager, model: Any) -> CheckpointManager:
    """Return a manager that also saves a model's training; continue from its newest state."""
    position = model.position
    stateful = [callback for callback in position.callbacks if hasattr(callback, "state_dict")]
    named = {f"{type(each).__name__}_{number}": each for number, each in enumerate(stateful)}
    manager = manager.extended(_model=model, _position=position, _callbacks=named)
    if manager.restore_or_initialize() is not None:
        _log.info("training continues at epoch %d, step %d", position.epoch + 1, position.step)
    return manager


class CSVLogger(Callback):
    """A callback that writes the metrics of each epoch as a line of a file, on the chief.

    If only some epochs are validated, the other epochs have ``NA`` in these columns.

    Args:
        filename: the file.
        separator: the text between columns.
        append: whether to append to an existing file.
    """

    def __init__(
        self, filename: str | os.PathLike[str], separator: str = ",", append: bool = False
    ) -> None:
        self._path = Path(filename)
        self._separator = separator
        self._append = append
        self._columns: list[str] = []

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Append to the file if other workers have begun training."""
        self._append = self._append or is_outside(self.model.strategy)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Append a line; write the names before the first line."""
        self.model.strategy.attempt(lambda: self._write(epoch, logs))

    def _write(self, epoch: int, logs: Logs) -> None:
        """Write the line of an epoch, unless a chief that was lost has done so."""
        strategy = self.model.strategy
        if not self._columns and self._append and self._path.exists():
            with self._path.open(newline="") as file:
                self._columns = next(csv.reader(file, delimiter=self._separator), [])
        is_new = not self._columns
        if is_new:
            self._columns = ["epoch", *logs]
            if self.model.position.validates and not any(name[:4] == "val_" for name in logs):
                self._columns += [f"val_{name}" for name in logs]
        if not strategy.is_chief:
            return
        if strategy.session is not None and not is_new:
            last = self._path.read_text().splitlines()[-1:]
            if last and last[0].startswith(f"{epoch}{self._separator}"):
                return
        with self._path.open("w" if is_new else "a", newline="") as file:
            writer = csv.DictWriter(file, self._columns, "NA", delimiter=self._separator)
            if is_new:
                writer.writeheader()
            writer.writerow({"epoch": epoch, **logs})


@dataclass(frozen=True)
class TerminationConfig:
    """How a `PreemptionCheckpointHandler` learns that this process must end, and how it ends it.

    Args:
        termination_watcher_fn: called after each step; returns True if this process must end. None:
            only a SIGTERM ends the process.
        exit_fn: called after the state is saved. None: raise `SystemExit` with the code 143, for
            which a launcher starts all workers again.
        grace_period: the number of seconds for which training continues first; None: 0.
        save_fn: called instead of the manager's `save`.

    Raises:
        ValueError: `grace_period` is below 0.

    >>> TerminationConfig(grace_period=30).grace_period
    30
    """

    termination_watcher_fn: Callable[[], object] | None = None
    exit_fn: Callable[[], object] | None = None
    grace_period: float | None = None
    save_fn: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        if self.grace_period is not None and self.grace_period < 0:
            raise ValueError(f"grace_period must be 0 or more seconds, got {self.grace_period}.")


class PreemptionCheckpointHandler(Callback):
    """A callback that saves and exits at the same step on all workers if one gets a SIGTERM.

    As a callback of `fit`, it continues from the manager's newest checkpoint. In addition to what
    the manager saves, it saves the model, the position in the data and the states of the callbacks.
    In your own loop, use it as a context manager, which restores the newest checkpoint::

        with PreemptionCheckpointHandler(manager) as handler:
            for _ in range(handler.steps_made, 1000):
                handler.run(train_step, iterator)

    Every worker must use it, in its main thread. If a chief schedules the steps, only the chief
    uses it.

    Args:
        manager: the `CheckpointManager` that saves.
        termination_config: a `TerminationConfig`; None: the defaults.

    Attributes:
        steps_made: the number of calls of `run`, since the first start of the program.
    """

    restores = True  # After the other callbacks have begun.

    def __init__(
        self, manager: CheckpointManager, termination_config: TerminationConfig | None = None
    ) -> None:
        self.manager = manager
        self._config = termination_config or TerminationConfig()
        self._known_since: float | None = None  # Whether this process must end.
        self.steps_made = 0
        self._signalled = False
        self._previous: Any = None
        self._listens = False
        self._fitting: CheckpointManager | None = None

    @property
    def total_run_calls(self) -> int:
        """The same as `steps_made`; this is its name in TensorFlow."""
        return self.steps_made

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that makes a step, and return its result; exit if a worker must.

        Raises:
            RuntimeError: called outside of the handler's ``with`` block.
            SystemExit: a worker has got a SIGTERM, and the state is saved.
        """
        if not self._listens:
            raise RuntimeError(
                "PreemptionCheckpointHandler.run was called before the handler was entered: write "
                "`with handler:` around the loop."
            )
        result = function(*args, **kwargs)
        self.steps_made += 1
        self._exit_if_signalled(self.manager, self.steps_made)
        return result

    def __enter__(self) -> PreemptionCheckpointHandler:
        """Restore the newest checkpoint, and listen for the signal."""
        self._listen()
        try:
            if self.manager.restore_or_initialize() is not None:
                self.steps_made = self.manager.step or 0
        except BaseException:
            self._stop_listening()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the earlier handler of the signal."""
        self._stop_listening()

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Continue from the newest checkpoint, and listen for the signal."""
        self._listen()
        self._fitting = continued(self.manager, self.model)

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Exit if a worker must."""
        if not self.model.position.ahead:
            self._exit_from_fit()

    def saves_after(self, steps_made: int) -> bool:
        """Return True if this process must exit: a chief then waits for its workers."""
        return self._is_due()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Exit if a worker must: all callbacks have seen the end of the last epoch."""
        if not self.model.position.has_joined:  # Otherwise the others are in a step.
            self._exit_from_fit()

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Exit if a worker must, and restore the earlier handler of the signal."""
        try:
            if self.model.position.finished:
                self._exit_from_fit()
        finally:
            self._stop_listening()

    def _exit_from_fit(self) -> None:
        if self._fitting is not None and self._listens:
            self._exit_if_signalled(self._fitting, self.model.position.steps_made)

    def _exit_if_signalled(self, manager: CheckpointManager, step: int) -> None:
        if not on_any_worker(manager.checkpoint.strategy, self._is_due()):
            return
        if self._config.save_fn is None:
            manager.save(step, check_interval=False)
            manager.wait()
        else:
            self._config.save_fn()
        _log.warning(
            "a worker got SIGTERM, so a checkpoint was saved after step %d in %s",
            step,
            manager.directory,
        )
        self._signalled = False  # The signal is served.
        self._stop_listening()
        if self._config.exit_fn is None:
            raise SystemExit(143)  # The code of a process that a SIGTERM ended.
        self._config.exit_fn()

    def _is_due(self) -> bool:
        """Return True if this process must end and its grace period is over."""
        watcher = self._config.termination_watcher_fn
        if self._known_since is None and (self._signalled or (watcher is not None and watcher())):
            self._known_since = time.monotonic()
        grace = self._config.grace_period or 0.0
        return self._known_since is not None and time.monotonic() - self._known_since >= grace

    def _listen(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "PreemptionCheckpointHandler must be used in the main thread, the only one in "
                f"which Python handles signals; this is {threading.current_thread().name!r}."
            )
        if not self._listens:
            self._signalled, self._listens, self._known_since = False, True, None
            self._previous = signal.signal(signal.SIGTERM, self._remember)

    def _remember(self, number: int, frame: object) -> None:
        self._signalled = True

    def _stop_listening(self) -> None:
        """Restore the earlier handler, which gets a signal that was not served."""
        if not self._listens:
            return
        self._listens = False
        # None: a handler that was not installed from Python, which cannot be restored.
        signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)
        if self._signalled:
            self._signalled = False
            signal.raise_signal(signal.SIGTERM)


_MOST_IMAGES = 3


class TensorBoard(Callback):
    """A callback that writes event files for TensorBoard, on the chief.

    The folders and names are those of Keras: `train` and `validation`, with ``epoch_loss`` and so
    on, ``epoch_learning_rate``, and ``batch_loss`` by step. If tracing is enabled (see
    `ndistribute.timeline`), ``step_ms/compute`` and so on are the milliseconds that the threads of
    the chief's process spent in a step, on average over an epoch. Histograms and images have the
    names of layers: ``dense/kernel/histogram``.

    Args:
        log_dir: the directory.
        histogram_freq: write histograms of the variables every this many epochs; 0: never.
        write_graph: whether to write the graph of the layers and their connections.
        write_images: whether to write variables with two or more axes as images, as often as
            histograms.
        update_freq: ``"epoch"``, ``"batch"``, or a number of steps after which to write the metrics
            so far.
        embeddings_freq: must be 0, because embeddings are not written.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "logs",
        histogram_freq: int = 0,
        write_graph: bool = True,
        write_images: bool = False,
        update_freq: str | int = "epoch",
        embeddings_freq: int = 0,
    ) -> None:
        if embeddings_freq:
            raise ValueError(
                "TensorBoard: this callback writes no embeddings, so embeddings_freq must be 0. "
                "For the projector, write them yourself: np.savetxt(path, "
                "layer.embeddings.numpy())."
            )
        if histogram_freq < 0:
            raise ValueError(f"histogram_freq must be 0 or more, got {histogram_freq}.")
        self.log_dir = os.fspath(log_dir)
        self._histograms = histogram_freq
        self._graph, self._images = write_graph, write_images
        self._every = 1 if update_freq == "batch" else steps_of(update_freq, "update_freq")
        self._files: dict[str, EventFile] = {}
        self._spans: dict[str, float] = {}
        self._made = 0  # Steps, when the epoch began.

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Write the graph."""
        if self._graph and self.model.strategy.is_chief:
            self._file("train").graph(self.model.nodes())

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Start the clock."""
        self._spans = timeline.totals()
        self._made = self.model.position.steps_made

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Write the metrics so far, after each `update_freq` steps."""
        made = self.model.position.steps_made
        if self._every and made % self._every == 0:
            self._scalars("train", {f"batch_{name}": value for name, value in logs.items()}, made)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Write the metrics of the epoch, and every `histogram_freq` epochs the variables."""
        self.model.strategy.attempt(lambda: self._write(epoch, logs))

    def _write(self, epoch: int, logs: Logs) -> None:
        train: dict[str, float] = {}
        validation: dict[str, float] = {}
        for name, value in logs.items():
            into = validation if name.startswith("val_") else train
            into[f"epoch_{name.removeprefix('val_')}"] = value
        rate = getattr(self.model.optimizer, "learning_rate", None)
        if rate is not None:
            steps = self.model.optimizer.iterations
            train["epoch_learning_rate"] = float(as_array(rate(steps) if callable(rate) else rate))
        self._scalars("train", train | self._step_times(), epoch)
        self._scalars("validation", validation, epoch)
        if self._histograms and epoch % self._histograms == 0:
            self._variables(epoch)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files = {}

    def _step_times(self) -> dict[str, float]:
        """Return the milliseconds of a step by the spans' names."""
        steps, before = self.model.position.steps_made - self._made, self._spans
        seconds = {name: total - before.get(name, 0.0) for name, total in timeline.totals().items()}
        return {f"step_ms/{name}": seconds[name] * 1000 / steps for name in seconds if steps}

    def _variables(self, epoch: int) -> None:
        named = self.model.named_variables()
        counts = Counter(variable.name for variable in named.values())
        for path, variable in named.items():
            name = variable.name if counts[variable.name] == 1 else path
            value = variable.numpy()  # All workers read it, as some kinds are reduced.
            if not self.model.strategy.is_chief:
                continue
            file = self._file("train")
            if summary := histogram(f"{name}/histogram", value):
                file.add(summary, epoch)
            for number, pixels in enumerate(_images(value) if self._images else ()):
                file.add(image(f"{name}/image/{number}", pixels), epoch)

    def _scalars(self, folder: str, values: Mapping[str, float], step: int) -> None:
        if values and self.model.strategy.is_chief:
            self._file(folder).scalars(dict(values), step)

    def _file(self, folder: str) -> EventFile:
        if folder not in self._files:
            self._files[folder] = EventFile(Path(self.log_dir, folder))
        return self._files[folder]


def _images(value: Any) -> list[Any]:
    """Return a matrix, or the first ones of several, in grey from the least to the largest."""
    value = np.asarray(value, np.float64)
    if value.ndim < 2 or not value.size or not np.isfinite(value).all():
        return []
    low, high = value.min(), value.max()
    grey = np.round((value - low) * (255 / (high - low or 1.0))).astype(np.uint8)
    # The kernel of a convolution is (height, width, inputs, outputs): show an image per output.
    planes = grey[None] if grey.ndim == 2 else np.moveaxis(grey.reshape(*grey.shape[:2], -1), -1, 0)
    return [plane[..., None] for plane in planes[:_MOST_IMAGES]]


_export(vars(), but="continued")
