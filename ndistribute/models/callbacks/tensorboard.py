"""`TensorBoard`: the callback that shows a training in TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ndistribute import timeline
from ndistribute.devices import as_array
from ndistribute.event_files import EventFile, histogram, image
from ndistribute.models.callbacks.callback import Callback, Logs, steps_of
from ndistribute.timers import Timer

_MOST_IMAGES = 3


class TensorBoard(Callback):
    """Writes event files for TensorBoard, on the chief.

    The folders and names are those of Keras: `train` and `validation`, with ``epoch_loss`` and so
    on, ``epoch_learning_rate``, and ``batch_loss`` by step. If tracing is enabled (see
    `ndistribute.timeline`), ``step_ms/compute`` and so on are the milliseconds that the threads of
    the chief's process spent in a step, on average over an epoch.

    Args:
        log_dir: the directory.
        histogram_freq: after how many epochs to write histograms of the variables; 0: never.
        write_images: whether to write, as often, the variables with two axes or more as images.
        write_steps_per_second: whether to write the steps in a second of each epoch.
        update_freq: ``"epoch"``, or after how many steps to write the metrics so far, too.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "logs",
        histogram_freq: int = 0,
        write_images: bool = False,
        write_steps_per_second: bool = False,
        update_freq: str | int = "epoch",
    ) -> None:
        if histogram_freq < 0:
            raise ValueError(f"histogram_freq must be 0 or more, got {histogram_freq}.")
        self._directory = Path(log_dir)
        self._histograms = histogram_freq
        self._images = write_images
        self._speed = write_steps_per_second
        self._every = steps_of(update_freq, "update_freq")
        self._files: dict[str, EventFile] = {}
        self._spans: dict[str, float] = {}
        self._timer = Timer(steps=1)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Start the clock."""
        self._spans = timeline.totals()
        self._timer.mark(self.model.position.steps_made)

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Write the metrics so far, after each `update_freq` steps."""
        made = self.model.position.steps_made
        if self._every and made % self._every == 0:
            self._scalars("train", {f"batch_{name}": value for name, value in logs.items()}, made)

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Write the metrics of the epoch, and the variables if it is their turn."""
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
        """Return the steps in a second, and the milliseconds of a step by the spans' names."""
        made = self.model.position.steps_made
        steps, speed = made - (self._timer.last_step or 0), self._timer.mark(made)
        if not steps:
            return {}
        times = {
            f"step_ms/{name}": (seconds - self._spans.get(name, 0.0)) * 1000 / steps
            for name, seconds in timeline.totals().items()
        }
        if self._speed and speed is not None:
            times["epoch_steps_per_second"] = speed
        return times

    def _variables(self, epoch: int) -> None:
        for name, variable in self.model.named_variables().items():
            value = variable.numpy()  # All workers read it, as some kinds are reduced.
            if not self.model.strategy.is_chief:
                continue
            file = self._file("train")
            file.add(histogram(f"{name}/histogram", value), epoch)
            if self._images:
                for number, pixels in enumerate(_images(value)):
                    file.add(image(f"{name}/image/{number}", pixels), epoch)

    def _scalars(self, folder: str, values: Mapping[str, float], step: int) -> None:
        if values and self.model.strategy.is_chief:
            self._file(folder).scalars(dict(values), step)

    def _file(self, folder: str) -> EventFile:
        if folder not in self._files:
            self._files[folder] = EventFile(self._directory / folder)
        return self._files[folder]


def _images(value: Any) -> list[Any]:
    """Return a matrix, or the first ones of several, in grey from the least to the largest."""
    value = np.asarray(value, np.float64)
    if value.ndim < 2 or not value.size or not np.isfinite(value).all():
        return []
    low, high = value.min(), value.max()
    grey = np.round((value - low) * (255 / (high - low or 1.0))).astype(np.uint8)
    # The kernel of a convolution is (height, width, inputs, outputs): show those of outputs.
    planes = grey[None] if grey.ndim == 2 else np.moveaxis(grey.reshape(*grey.shape[:2], -1), -1, 0)
    return [plane[..., None] for plane in planes[:_MOST_IMAGES]]
