"""The base class of callbacks, and the callbacks that only report, such as `ProgbarLogger`."""

from __future__ import annotations

import difflib
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from ndistribute.exports import export as _export
from ndistribute.mistakes import Explaining

Logs = Mapping[str, float]


class Callback(Explaining):
    """The base class of callbacks; a subclass overrides the methods that it needs.

    Every worker calls them at the same steps. The logs of an epoch have the metrics of all
    replicas. The logs of a batch have the metrics of this process's replicas since the epoch began.
    Methods for a beginning get empty logs; `on_train_end` gets the logs of the last epoch.

    In an elastic job, the other workers are in a step when a newcomer joins. So its
    `on_train_begin` and first `on_epoch_begin` must not call collectives. Between these two calls
    it gets the states of the others' callbacks that have `state_dict` and `load_state_dict`.

    Attributes:
        model: the model that trains, evaluates or predicts.
        params: the arguments of `fit`: `epochs`, `steps` (None if unknown) and `verbose`.
        restores: whether it saves and restores the states of other callbacks; it is then called
            after them.
    """

    _needs_init = False

    def __init__(self) -> None:
        """Take no arguments, where `Explaining` alone would take any without an effect."""

    @classmethod
    def _instead_of(cls, name: str) -> str | None:
        if not name.startswith("on_") or hasattr(Callback, name):
            return None
        near = difflib.get_close_matches(name, dir(Callback), 1)
        return f"define {near[0]}" if near else "see help(Callback)"

    restores: bool = False
    model: Any = None
    params: Mapping[str, Any] = {}

    def set_model(self, model: Any) -> None:
        """Set `model`; called first."""
        self.model = model

    def set_params(self, params: Mapping[str, Any]) -> None:
        """Set `params`; called first."""
        self.params = params

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Called before the first epoch."""

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Called after the last epoch; also if an exception ends training."""

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Called before each epoch, counted from 0."""

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Called after each epoch and its validation."""

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Called before each step, counted from 0 in each epoch; calls `on_batch_begin`."""
        self.on_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Called after each step; calls `on_batch_end`."""
        self.on_batch_end(batch, logs)

    def on_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Called by `on_train_batch_begin`, unless a subclass overrides that method."""

    def on_batch_end(self, batch: int, logs: Logs) -> None:
        """Called by `on_train_batch_end`, unless a subclass overrides that method."""

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Called before an evaluation, and before each validation of `fit`."""

    def on_test_end(self, logs: Logs) -> None:
        """Called after an evaluation, with its metrics."""

    def on_test_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Called before each of its batches, counted from 0."""

    def on_test_batch_end(self, batch: int, logs: Logs) -> None:
        """Called after each of its batches."""

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        """Called before a prediction."""

    def on_predict_end(self, logs: Logs | None = None) -> None:
        """Called after a prediction."""

    def on_predict_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Called before each of its batches, counted from 0."""

    def on_predict_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
        """Called after each of its batches, with its predictions as ``outputs``."""

    def saves_after(self, steps_made: int) -> bool:
        """Return True if `on_train_batch_end` saves the state after a number of steps.

        A chief that schedules the steps then waits with the next step until the state is saved.
        """
        return False


class Callbacks:
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
        for member in self.members:
            if not isinstance(member, Callback):
                raise TypeError(f"callbacks must be a list of Callback objects, got {member!r}.")
            member._refuse_uncalled(name for name in vars(member) if callable(vars(member)[name]))
            member.set_model(model)
            member.set_params(params)

    def call(self, name: str, *args: Any) -> None:
        """Call a method of each.

        Callbacks that restore and save the states of others come last: the others reset their state
        at the beginning, and update it after an epoch.
        """
        is_of_states = name in ("on_train_begin", "on_epoch_end")
        for member in sorted(self.members, key=lambda member: is_of_states and member.restores):
            getattr(member, name)(*args)

    def overriding(self, name: str) -> list[Callable[..., Any]]:
        """Return a method of all callbacks that define it or its short form."""
        names = (name, _SHORT.get(name, name))
        definers = (member for member in self.members if any(_owns(member, each) for each in names))
        return [getattr(member, name) for member in definers]


_SHORT = {"on_train_batch_begin": "on_batch_begin", "on_train_batch_end": "on_batch_end"}


def _owns(callback: Callback, name: str) -> bool:
    """Return whether a callback overrides a method of `Callback`."""
    return getattr(getattr(callback, name), "__func__", None) is not getattr(Callback, name)


class History(Callback):
    """The logs of each epoch; `fit` returns it.

    Attributes:
        epoch: the numbers of the epochs.
        history: a list for each metric, with a value per epoch.
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
                raise TypeError(
                    f"LambdaCallback got the unknown keyword {name!r}: pass functions by the names "
                    "of Callback's methods, such as on_epoch_end."
                )
            setattr(self, name, function)


def steps_of(freq: str | int, argument: str = "save_freq") -> int:
    """Return the number of steps of a frequency; 0 for an epoch."""
    if freq == "epoch":
        return 0
    if isinstance(freq, str) or freq < 1 or freq % 1:
        raise ValueError(f"{argument} must be 'epoch' or a number of steps, got {freq!r}.")
    return int(freq)


_RUNNING = "{elapsed}<{remaining}"


class ProgbarLogger(Callback):
    """A callback that shows the metrics during an epoch and at its end.

    Args:
        verbose: 0 for nothing; 1 or ``"auto"`` for a bar, or lines if the output is not a terminal
            or tqdm is missing; 2 for one line per epoch.
    """

    def __init__(self, verbose: int | str = 1) -> None:
        if verbose not in ("auto", 0, 1, 2):
            raise ValueError(f"verbose must be 'auto', 0, 1 or 2, got {verbose!r}.")
        self._verbose = 1 if verbose == "auto" else int(verbose)
        self._columns = _columns()
        self._bar: Any = None
        self._began = 0.0

    @property
    def verbose(self) -> int:
        """The level of output; 0 on all processes except the chief."""
        is_chief = self.model is None or self.model.strategy.is_chief
        return self._verbose if is_chief else 0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Open the bar."""
        self._began = time.monotonic()
        if self.verbose == 1 and sys.stderr.isatty():
            title = f"Epoch {epoch + 1}/{self.params['epochs']}"
            self._bar = _bar(title, self.params["steps"], self.model.position.step)
        if self._bar is not None:  # Without a bar, no step has to read the metrics.
            self.on_train_batch_end = self._advance  # type: ignore[method-assign]

    def _advance(self, batch: int, logs: Logs) -> None:
        bar = self._bar
        bar.bar_format = _format(_RUNNING, bar.total, bar.ncols, logs)
        bar.update()

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Close the bar with the metrics of the epoch, or write a line."""
        took = _duration(time.monotonic() - self._began)
        if self._bar is not None:
            bar = self._bar
            bar.bar_format = _format(took, bar.total, bar.ncols, logs)
            columns, bar.ncols = bar.ncols, None  # Nothing is cut off at the end.
            line, bar.leave = _wrapped(str(bar), columns), False
            self._close()
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
        elif self.verbose:
            self.show_line(logs, f"Epoch {epoch + 1}/{self.params['epochs']} - {took} - ")

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Close the bar of an epoch that did not end."""
        self._close()

    def show_line(self, logs: Logs, prefix: str = "") -> None:
        """Write a line of metrics, or lines as wide as the terminal of the launcher is."""
        if self.verbose:
            sys.stderr.write(f"{_wrapped(prefix + _shown(logs), self._columns)}\n")
            sys.stderr.flush()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _columns() -> int:
    """Return the width of lines where the output is not a terminal."""
    text = os.environ.get("NDISTRIBUTE_COLUMNS") or str(sys.maxsize)
    if not text.isdecimal():
        raise ValueError(f"NDISTRIBUTE_COLUMNS must be a number of columns, got {text!r}.")
    return int(text)


def _shown(logs: Logs) -> str:
    return " - ".join(f"{name}: {_number(float(np.mean(v)))}" for name, v in logs.items())


def _duration(seconds: float) -> str:
    """Return the time that an epoch took.

    >>> _duration(0.0123), _duration(0.05), _duration(75.02)
    ('12 ms', '0.1 s', '75.0 s')
    """
    return f"{seconds * 1e3:.0f} ms" if seconds < 0.05 else f"{seconds:.1f} s"


def _wrapped(text: str, columns: int) -> str:
    """Return a text in lines of a terminal's width, which end between metrics.

    The metrics of a validation begin a line if not all of the text fits in one.

    >>> print(_wrapped("Epoch 1/4 - loss: 1.28 - mae: 0.6311 - val_loss: 1.3 - val_mae: 0.7", 40))
    Epoch 1/4 - loss: 1.28 - mae: 0.6311
        - val_loss: 1.3 - val_mae: 0.7
    """
    if len(text) <= columns:
        return text
    lines, validates = [""], False
    for part in text.split(" - "):
        begins, validates = not validates and part.startswith("val_"), part.startswith("val_")
        joined = f"{lines[-1]} - {part}" if lines[-1] else part
        if lines[-1] and (begins or len(joined) > columns):
            lines.append(f"    - {part}")
        else:
            lines[-1] = joined
    return "\n".join(lines)


def _number(value: float) -> str:
    """Return a number in the same width from epoch to epoch, if it is neither large nor small.

    >>> _number(1.0), _number(0.98612), _number(2e-05)
    ('1.0000', '0.9861', '2.0000e-05')
    """
    fits = value == 0 or 1e-3 <= abs(value) < 1e5 or not math.isfinite(value)
    return f"{value:.4f}" if fits else f"{value:.4e}"


def _format(duration: str, total: int | None, columns: int, logs: Logs) -> str:
    """Return the format of a bar, which is short so that a terminal has room for the metrics."""
    width = min(10, max(1, columns // 4 - 10))
    bar = "{n_fmt} steps" if total is None else f"{{n_fmt}}/{{total_fmt}} |{{bar:{width}}}|"
    metrics = f" - {_shown(logs)}".replace("{", "{{").replace("}", "}}") if logs else ""
    return f"{{desc}} - {bar} {duration}{metrics}"


def _bar(title: str, steps: int | None, done: int) -> Any:
    """Return a tqdm bar, or None without tqdm."""
    try:
        from tqdm import tqdm
    except ImportError:
        return None

    class Bar(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # Otherwise tqdm keeps a thread.

        @staticmethod
        def format_meter(*, ncols: int | None, **values: Any) -> str:
            """Return the bar with as many metrics as fit; half a number would mislead."""
            line = str(tqdm.format_meter(ncols=None, **values))
            while ncols is not None and len(line) > ncols:
                shorter, separator, _ = line.rpartition(" - ")
                line = shorter if separator else line[:ncols]
            return line

    columns, rows = shutil.get_terminal_size()
    layout = {"bar_format": _format(_RUNNING, steps, columns, {}), "ncols": columns, "nrows": rows}
    return Bar(total=steps, initial=done, desc=title, file=sys.stderr, **layout)


_export(vars(), but="Callbacks steps_of")
