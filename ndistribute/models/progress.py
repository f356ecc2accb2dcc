"""The progress of `fit`: a bar in a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from ndistribute.models.callbacks.callback import Callback

__all__ = ["Progress"]


class Progress(Callback):
    """Shows the metrics during an epoch and at its end.

    Args:
        verbose: 0 for nothing, 1 or ``"auto"`` for a bar (lines if the output is no terminal or
            tqdm is missing), 2 for a line an epoch.
    """

    def __init__(self, verbose: int | str) -> None:
        self.verbose = 1 if verbose == "auto" else int(verbose)
        self._bar: Any = None
        self._began = 0.0

    def on_epoch_begin(self, epoch: int) -> None:
        """Open the bar."""
        self._began = time.monotonic()
        if self.verbose == 1 and sys.stderr.isatty():
            self._bar = _bar(f"Epoch {epoch + 1}/{self.params['epochs']}", self.params["steps"])

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float]) -> None:
        """Advance the bar."""
        if self._bar is not None:
            self._bar.set_postfix_str(_shown(logs), refresh=False)
            self._bar.update()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float]) -> None:
        """Close the bar with the metrics of the epoch, or write a line."""
        if self._bar is not None:
            self._bar.set_postfix_str(_shown(logs), refresh=False)
            self._bar.close()
            self._bar = None
        elif self.verbose:
            took = time.monotonic() - self._began
            epochs = self.params["epochs"]
            self.show_line(logs, f"Epoch {epoch + 1}/{epochs} - {took:.1f} s - ")

    def on_train_end(self) -> None:
        """Close the bar of an epoch that did not end."""
        if self._bar is not None:
            self._bar.close()

    def show_line(self, logs: Mapping[str, float], prefix: str = "") -> None:
        """Write a line of metrics."""
        if self.verbose:
            sys.stderr.write(f"{prefix}{_shown(logs)}\n")
            sys.stderr.flush()


def _shown(logs: Mapping[str, float]) -> str:
    return " - ".join(f"{name}: {value:.4g}" for name, value in logs.items())


def _bar(text: str, steps: int | None) -> Any:
    """Return a tqdm bar, or None without tqdm."""
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(desc=text, total=steps, file=sys.stderr, mininterval=0.1, unit="step")
