"""The graph in which the tapes of a thread record.

A graph is a list of entries in order of creation: None for a leaf (a variable or a watched array),
otherwise the indices of an operation's arguments and the rules that compute their gradients.
Tracked arrays refer to an entry by its index only, so dropping the list frees all arrays that the
rules keep. The tapes of a thread share one graph, the recorder of the thread's frame.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

from ndistribute import tree
from ndistribute.autodiff import collectives
from ndistribute.autodiff.backward import Component, Entry
from ndistribute.autodiff.diagnostics import refuse_read
from ndistribute.autodiff.rules.shape import index_rule
from ndistribute.autodiff.tracked import Tracked, is_differentiable
from ndistribute.context import Frame, current_frame, frame_stack

_new: Any = object.__new__


class Graph:
    """The recorder of a frame while a tape records, which variables and contexts call."""

    __slots__ = (
        *"_frame _open _outer _recording again askers entries".split(),
        *"has_rows leaves lock nested shared".split(),
    )

    def __init__(self, frame: Frame) -> None:
        self.entries: list[Entry | None] = []
        # The variables that were read and their entries, by id; this keeps them alive.
        self.leaves: dict[int, tuple[Any, int]] = {}
        self.askers = 0  # The number of tapes whose `gradient` may still be called.
        self.shared = False  # Whether several tapes were open at the same time.
        self.nested = False  # Whether several tapes are open now.
        # For entries of nested tapes: the function, and what returns rules of tracked arrays.
        self.again: dict[int, tuple[Any, Callable[[], Any]]] = {}
        self.has_rows = False  # Whether the last tracked gradients were rows, before made whole.
        self.lock: Any = None  # Of the threads that append to it, if there are several.
        self._frame = frame
        self._open = 0
        self._recording: list[Any] = []
        # What the frame gets back when no tape records.
        self._outer = frame.recorder

    @property
    def is_recording(self) -> bool:
        """Whether a tape records."""
        return bool(self._recording)

    def record(self, value: Any, parents: tuple[int, ...], rules: Any) -> Tracked:
        """Append an operation on the entries `parents`, and return its tracked result.

        `rules` are one function for each parent, from the result's gradient to the parent's; or one
        function that returns the gradients of all parents.
        """
        # Every operation runs this code, and a call of `Tracked.__init__` takes a third longer.
        tracked: Tracked = _new(Tracked)
        tracked.value = value
        tracked.graph = self
        tracked.index = len(self.entries)
        self.entries.append((parents, rules))
        return tracked

    def record_many(self, values: Any, parents: tuple[int, ...], joint: Callable[..., Any]) -> Any:
        """Append an operation with a nest of results, and return them tracked, but for integers.

        `joint` takes one gradient for each result, None for an unused one, and returns one for each
        parent.
        """
        results = tree.flatten(values)
        base = self.leaf(None).index
        self.entries[base] = (parents, joint)
        for k, one in enumerate(results):
            if is_differentiable(one):
                rule = functools.partial(Component, k, len(results))
                results[k] = self.record(one, (base,), (rule,))
        return tree.unflatten(values, results)

    def leaf(self, value: Any) -> Tracked:
        """Append a leaf, and return the tracked array for it."""
        tracked = Tracked(value, self, len(self.entries))
        self.entries.append(None)
        return tracked

    def read(self, variable: Any, value: Any) -> Any:
        """Return a variable's value, tracked if a recording tape watches the variable."""
        known = self.leaves.get(id(variable))
        if known is not None:
            return Tracked(value, self, known[1])
        for tape in self._recording:
            if tape.watches(variable) and is_differentiable(value):
                self.leaves[id(variable)] = variable, len(self.entries)
                return self.leaf(value)
        return value

    def around_step(self) -> Graph:
        """Return the recorder of a step of `strategy.run`, in which these tapes do not record."""
        return _AroundStep(self)

    def read_part(self, variable: Any, index: Any, value: Any) -> Any:
        """Return ``variable[index]``, given as `value`, tracked if `read` would track the whole."""
        whole = self.read(variable, value)
        if not isinstance(whole, Tracked):
            return value
        rules = (index_rule(variable, index),)
        part = self.record(value, (whole.index,), rules)
        self.again[part.index] = operator.getitem, lambda: rules  # It takes tracked gradients.
        return part

    all_reduce = collectives.all_reduce
    all_gather = collectives.all_gather

    @classmethod
    def joined(cls, tape: Any) -> Graph:
        """Return the graph of this thread, or a new one, in which a tape now records."""
        frame = current_frame()
        graph = frame.recorder
        if not isinstance(graph, Graph) or not graph._open:
            graph = cls(frame)
        graph.nested = graph._open > 0
        graph.shared = graph.nested or graph.shared
        graph._open += 1
        graph.askers += 1
        graph.resume(tape)
        return graph

    def resume(self, tape: Any) -> None:
        """Start or continue recording for a tape."""
        self._recording.append(tape)
        self._frame.recorder = current_frame().recorder = self

    def pause(self, tape: Any) -> None:
        """Stop recording for a tape."""
        self._recording.remove(tape)
        # The frame of the first tape, and those of scopes entered afterwards.
        for frame in (self._frame, *frame_stack()):
            if not self._recording and frame.recorder is self:
                frame.recorder = self._outer

    def close(self, tape: Any) -> None:
        """Remove a tape; after the last one, only the tapes refer to the entries."""
        if tape in self._recording:
            self.pause(tape)
        self._open -= 1
        self.nested = self._open > 1
        if not self._open:
            self.entries, self.leaves, self.again = [], {}, {}


class _AroundStep(Graph):
    """The recorder of a step inside an open tape: it records nothing, and refuses lost reads."""

    __slots__ = ("_around",)

    def __init__(self, graph: Graph) -> None:
        super().__init__(Frame(None, None))
        self._around = graph

    def read(self, variable: Any, value: Any) -> Any:
        watched = any(tape.watches(variable) for tape in self._around._recording)
        if watched and is_differentiable(value):
            refuse_read(variable)
        return value
