"""`TrainingPosition`: the position of `fit` in its epochs and data, from which it can continue."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ndistribute.models.callbacks.callback import Callback
from ndistribute.variables import Variable

NO_BATCHES = "{} got no batches: the dataset, or each array, is empty."
USED_UP = (
    "{} got no batches for another epoch: a generator yields its batches once. Pass "
    "steps_per_epoch, or a dataset, which can be iterated over again."
)


@dataclasses.dataclass(eq=False)
class TrainingPosition:
    """The position of a training run: a part of the state from which it can continue."""

    epoch: int  # From 0.
    callbacks: Sequence[Callback] = ()
    step: int = 0  # The steps made in the epoch.
    steps_made: int = 0  # The steps made in all epochs.
    ahead: int = 0  # The steps beyond these that workers of a chief are making.
    iterator: Any = None  # Over the distributed dataset.
    finished: bool = False  # Whether training ended as planned.
    validates: bool = False  # Whether some epochs are validated.
    exhausted: bool = False  # Whether the dataset has no batch for an epoch.
    has_joined: bool = False  # Whether a newcomer continues in an epoch that others began.
    trained: Sequence[Variable] = ()
    penalized: Any = None  # The layers with penalties, once a loop has begun.
    logs: dict[str, Any] | None = None  # The last step's result, if the model defines it.
    shown: Any = None  # The metrics by name, once they are shown after a batch.
    fingerprint: Mapping[str, str] = dataclasses.field(default_factory=dict)
    _restored: Any = None  # The position of the iterator to begin at.

    def begin_epoch(self, dataset: Any, steps: int | None) -> None:
        """Set the iterator for an epoch, to the restored position if there is one.

        Args:
            dataset: the distributed dataset.
            steps: the steps of an epoch, if each epoch continues in the dataset where the last one
                ended; otherwise None.
        """
        if self.has_joined:
            self.has_joined = False  # Its iterator is that of the others.
            return
        restored, self._restored = self._restored, None
        if restored is not None:
            self.iterator = iter(dataset)
            self.iterator.load_state_dict(restored)  # Later iterations continue after it.
        if self.iterator is None or (steps is None and not self.step):
            self.iterator = iter(dataset)
            for _ in range(self.step):  # A chief saves no position in its input, so skip its steps.
                next(self.iterator, None)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain values."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "steps_made": self.steps_made,
            "input": None if self.iterator is None else self.iterator.state_dict(),
            "fingerprint": dict(self.fingerprint),
        }

    def check_state(self, source: Path, state: Mapping[str, Any]) -> None:
        """Raise a `ValueError` if a state that was saved in a folder is of another training run."""
        was, now = state.get("fingerprint", {}), self.fingerprint
        parts = [part for part in {**was, **now} if was.get(part) != now.get(part)]
        if parts:
            changed = "; ".join(f"{x} was {was.get(x)}, but is now {now.get(x)}" for x in parts)
            raise ValueError(
                f"{source} belongs to a different training run: {changed}. To continue that run, "
                "start the program as it was. To start from the beginning, delete "
                f"{source.parent}. Nothing has changed."
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of `state_dict`."""
        self.epoch, self.step = state["epoch"], state["step"]
        self.steps_made, self._restored = state["steps_made"], state["input"]

    def next_batch(self, dataset: Any, steps: int | None) -> Any:
        """Return the next batch of an epoch, or None at its end.

        If the dataset has ended, the next epoch starts over in it. If it ends during an epoch, the
        epoch ends too, with a warning if steps are left. An empty dataset ends training.

        Args:
            dataset: see `begin_epoch`.
            steps: see `begin_epoch`.

        Raises:
            ValueError: the dataset is empty.
        """
        batch = next(self.iterator, None)
        if batch is None and not self.step and steps is not None:
            self.iterator = iter(dataset)
            batch = next(self.iterator, None)
        if batch is None:
            if not self.steps_made or (steps is None and not self.step):
                raise ValueError((USED_UP if self.steps_made else NO_BATCHES).format("fit"))
            if steps is not None:
                self.exhausted, self.iterator = not self.step, None
                warn_of_end(f"epoch {self.epoch + 1}", self.step, f"steps_per_epoch={steps}")
        return batch


def warn_of_end(what: str, made: int, asked: str) -> None:
    """Warn, as Keras does, that a dataset has ended before all steps were made."""
    text = f"{what} stops: the dataset ended after {made} of {asked} steps."
    warnings.warn(f"{text} Append .repeat() to the dataset, or pass fewer steps.", stacklevel=5)
