"""What a thread records while at least one of its tapes is open.

A graph is a list of entries in the order in which they were made: None for a leaf (a variable, a
watched array), else the entries that an operation used and the rules that turn its gradient into
theirs. Tracked arrays hold a place in the list and nothing else, so dropping the list frees all
that the rules keep. Several tapes of a thread share one graph; the frame of the thread names it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ndistribute import tree
from ndistribute.autodiff.backward import Component, Entry
from ndistribute.autodiff.collectives import all_gather, all_reduce
from ndistribute.autodiff.dispatch import is_differentiable
from ndistribute.autodiff.rules.indexing import index_rule
from ndistribute.autodiff.tracked import Tracked
from ndistribute.context import CommunicatorLike, Frame, current_frame

__all__ = ["Graph"]


class Tape(Protocol):
    """What a graph asks of a tape that records on it."""

    def watches(self, variable: Any) -> bool:
        """Return True if the tape wants the gradients of a variable."""


class Graph:
    """Record operations; implements `ndistribute.context.Recorder`.

    Args:
        frame: where the thread is; the graph is its recorder while a tape records.
    """

    __slots__ = (
        "_frame",
        "_open",
        "_recording",
        "askers",
        "entries",
        "leaves",
        "shared",
    )

    def __init__(self, frame: Frame) -> None:
        self.entries: list[Entry | None] = []
        # The variable stands beside its place, lest another one gets its id.
        self.leaves: dict[int, tuple[Any, int]] = {}
        self.askers = 0
        self.shared = False
        self._frame = frame
        self._open = 0
        self._recording: list[Tape] = []

    def record(self, value: Any, parents: tuple[int, ...], rules: Any) -> Tracked:
        """Append an operation.

        Args:
            value: its raw result.
            parents: the entries that it used.
            rules: one function for each parent, from the result's gradient to the parent's; or one
                function that returns the gradients of all parents.
        """
        entries = self.entries
        tracked = Tracked(value, self, len(entries))
        entries.append((parents, rules))
        return tracked

    def record_many(
        self,
        values: Any,
        parents: tuple[int, ...],
        joint: Callable[[Sequence[Any]], Sequence[Any]],
        differentiable: Callable[[Any], bool] = is_differentiable,
    ) -> Any:
        """Append an operation with several results.

        Args:
            values: a nest of results; those that carry no gradient come back as they are.
            parents: the entries that it used.
            joint: takes one gradient per result, None for a result that nobody used, and returns
                one per parent.
            differentiable: says which results carry a gradient.
        """
        results = tree.flatten(values)
        base = len(self.entries)
        self.entries.append((parents, joint))
        tracked = [
            self.record(one, (base,), (Component(k, len(results)),)) if differentiable(one) else one
            for k, one in enumerate(results)
        ]
        return tree.unflatten(values, tracked)

    def leaf(self, value: Any) -> Tracked:
        """Append a leaf that stands for an array."""
        tracked = Tracked(value, self, len(self.entries))
        self.entries.append(None)
        return tracked

    def read(self, variable: Any, value: Any) -> Any:
        """Return a variable's value, tracked if a tape that records watches the variable."""
        place = self._place_of(variable, value)
        return value if place is None else Tracked(value, self, place)

    def read_part(self, variable: Any, index: Any, value: Any) -> Any:
        """Return ``variable[index]``, read without the rest, tracked like a whole value."""
        place = self._place_of(variable, value)
        if place is None:
            return value
        return self.record(value, (place,), (index_rule(variable, index),))

    def all_reduce(self, communicator: CommunicatorLike, op: Any, value: Any, options: Any) -> Any:
        """Reduce over replicas, and record that."""
        return all_reduce(self, communicator, op, value, options)

    def all_gather(
        self, communicator: CommunicatorLike, value: Any, axis: int, options: Any
    ) -> Any:
        """Concatenate over replicas, and record that."""
        return all_gather(self, communicator, value, axis, options)

    @property
    def is_open(self) -> bool:
        """Return whether another tape may still join."""
        return self._open > 0

    def open(self, tape: Tape) -> None:
        """Let a tape take part, and may it ask for gradients later."""
        self.shared = self._open > 0 or self.shared
        self._open += 1
        self.askers += 1
        self.resume(tape)

    def resume(self, tape: Tape) -> None:
        """Record for a tape."""
        self._recording.append(tape)
        for frame in self._frames():
            frame.recorder = self

    def pause(self, tape: Tape) -> None:
        """Record no longer for a tape; when it was the last one, record nothing."""
        self._recording.remove(tape)
        for frame in self._frames():
            if not self._recording and frame.recorder is self:
                frame.recorder = None

    def close(self, tape: Tape) -> None:
        """Let a tape go; after the last one, only the tapes hold what was recorded."""
        if tape in self._recording:
            self.pause(tape)
        self._open -= 1
        if not self._open:
            self.entries, self.leaves = [], {}

    def _place_of(self, variable: Any, value: Any) -> int | None:
        """Return where a variable's leaf stands, None if no tape that records watches it."""
        known = self.leaves.get(id(variable))
        if known is None:
            for tape in self._recording:
                if tape.watches(variable) and is_differentiable(value):
                    break
            else:
                return None
            known = self.leaves[id(variable)] = (variable, len(self.entries))
            self.entries.append(None)
        return known[1]

    def _frames(self) -> tuple[Frame, Frame]:
        """Return the frame of the first tape, and that of a scope entered since, if any."""
        return self._frame, current_frame()
