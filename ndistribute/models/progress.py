"""The progress of `fit`: a bar in a terminal, lines elsewhere."""

from __future__ import annotations

import math
import os
import sys
import time
from typing import Any

from ndistribute.models.callbacks.callback import Callback, Logs

_RUNNING = "{elapsed}<{remaining}"


class Progress(Callback):
    """Shows the metrics during an epoch and at its end.

    Args:
        verbose: 0 for nothing, 1 or ``"auto"`` for a bar (lines if the output is no terminal or
            tqdm is missing), 2 for a line an epoch.
    """

    def __init__(self, verbose: int | str) -> None:
        if verbose not in ("auto", 0, 1, 2):
            raise ValueError(f"verbose must be 'auto', 0, 1 or 2, got {verbose!r}.")
        self.verbose = 1 if verbose == "auto" else int(verbose)
        self._bar: Any = None
        self._began = 0.0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Open the bar."""
        self._began = time.monotonic()
        if self.verbose == 1 and sys.stderr.isatty():
            title = f"Epoch {epoch + 1}/{self.params['epochs']}"
            self._bar = _bar(title, self.params["steps"], self.model.position.step)
        if self._bar is not None:  # Without a bar, no step has to read the metrics.
            self.on_train_batch_end = self._advance  # type: ignore[method-assign]

    def _advance(self, batch: int, logs: Logs) -> None:
        self._bar.bar_format = _format(_RUNNING, self._bar.total, logs)
        self._bar.update()

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Close the bar with the metrics of the epoch, or write a line."""
        took = f"{time.monotonic() - self._began:.1f} s"
        if self._bar is not None:
            bar = self._bar
            bar.bar_format = _format(took, bar.total, logs)
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
        """Write a line of metrics."""
        if self.verbose:
            sys.stderr.write(f"{prefix}{_shown(logs)}\n")
            sys.stderr.flush()

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _shown(logs: Logs) -> str:
    return " - ".join(f"{name}: {_number(value)}" for name, value in logs.items())


def _wrapped(text: str, columns: int) -> str:
    """Return a text in lines of a terminal's width, which end between metrics.

    >>> print(_wrapped("Epoch 1/4 - loss: 1.2756 - accuracy: 0.6311", 30))
    Epoch 1/4 - loss: 1.2756
        - accuracy: 0.6311
    """
    lines = [""]
    for part in text.split(" - "):
        joined = f"{lines[-1]} - {part}" if lines[-1] else part
        if len(joined) > columns and lines[-1]:
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


def _format(duration: str, total: int | None, logs: Logs) -> str:
    """Return the format of a bar, which is short so that a terminal has room for the metrics."""
    bar = "{n_fmt} steps" if total is None else "{n_fmt}/{total_fmt} |{bar:10}|"
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

    try:
        columns, rows = os.get_terminal_size(sys.stderr.fileno())
    except OSError:
        columns = rows = 0
    # A terminal of unknown size says 0, for which tqdm shows nothing.
    shape = {"ncols": columns or 80, "nrows": rows or 24}
    layout = _format(_RUNNING, steps, {})
    return Bar(total=steps, initial=done, desc=title, file=sys.stderr, bar_format=layout, **shape)
