"""The base class of callbacks, and those that only tell others."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ndistribute.mistakes import Explaining

Logs = Mapping[str, float]


class Callback(Explaining):
    """The base class of callbacks; a subclass overrides the methods that it needs.

    Every worker calls them at the same steps. Metrics in the logs of an epoch are those of all
    replicas; in the logs of a batch, those of the replicas of this process since the epoch began.
    Methods for a beginning, and `on_train_end`, get empty logs.

    Attributes:
        model: the model that is fitted, evaluated or predicts.
        params: the arguments of `fit`: `epochs`, `steps` (None if unknown) and `verbose`.
        restores: whether it saves and restores the states of others, so that it comes after them.
    """

    _needs_init = False

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
        """Called after the last epoch; also if an exception ends the training."""

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Called before each epoch, counted from 0."""

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Called after each epoch and its validation."""

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Called before each step, counted from 0 in each epoch."""

    def on_train_batch_end(self, batch: int, logs: Logs) -> None:
        """Called after each step."""

    def on_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Called in place of `on_train_batch_begin`, if only this is defined."""

    def on_batch_end(self, batch: int, logs: Logs) -> None:
        """Called in place of `on_train_batch_end`, if only this is defined."""

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Called before an evaluation, and before each validation of `fit`."""

    def on_test_end(self, logs: Logs) -> None:
        """Called after it, with its metrics."""

    def on_test_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Called before each of its batches, counted from 0."""

    def on_test_batch_end(self, batch: int, logs: Logs) -> None:
        """Called after each of its batches."""

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        """Called before a prediction."""

    def on_predict_end(self, logs: Logs | None = None) -> None:
        """Called after it."""

    def on_predict_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        """Called before each of its batches, counted from 0."""

    def on_predict_batch_end(self, batch: int, logs: Mapping[str, Any]) -> None:
        """Called after each of its batches, with its predictions as ``outputs``."""

    def saves_after(self, steps_made: int) -> bool:
        """Return True if `on_train_batch_end` saves the state after a number of steps.

        A chief that schedules the steps lets no worker begin the next step before.
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
        self._restoring_last = sorted(self.members, key=lambda member: member.restores)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Call them; those that restore the states of others last, as these forget theirs."""
        for member in self._restoring_last:
            member.on_train_begin({})

    def on_epoch_end(self, epoch: int, logs: Logs) -> None:
        """Call them; those that save the states of others last, when these know the epoch."""
        for member in self._restoring_last:
            member.on_epoch_end(epoch, logs)

    def call(self, name: str, *args: Any) -> None:
        """Call a method of each."""
        for member in self.members:
            getattr(member, name)(*args)

    def overriding(self, name: str) -> list[Callable[..., Any]]:
        """Return the methods of a name, or of its short form, that a callback defines itself."""
        names = (name, _SHORT.get(name, name))
        methods = (_own(member, names[0]) or _own(member, names[1]) for member in self.members)
        return [method for method in methods if method is not None]


_SHORT = {"on_train_batch_begin": "on_batch_begin", "on_train_batch_end": "on_batch_end"}


def _own(callback: Callback, name: str) -> Callable[..., Any] | None:
    """Return a method of a callback, unless it is that of `Callback`."""
    method: Any = getattr(callback, name)
    return None if getattr(method, "__func__", None) is getattr(Callback, name) else method


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


def steps_of(freq: str | int, argument: str = "save_freq") -> int:
    """Return the number of steps of a frequency; 0 for an epoch."""
    if freq == "epoch":
        return 0
    if isinstance(freq, str) or freq < 1 or freq % 1:
        raise ValueError(f"{argument} must be 'epoch' or a number of steps, got {freq!r}.")
    return int(freq)
