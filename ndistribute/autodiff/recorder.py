"""The graph in which the tapes of a thread record, and the backward pass over it.

A graph is a list of entries in order of creation: None for a leaf (a variable or a watched array),
otherwise the indices of an operation's arguments and the rules that compute their gradients.
Tracked arrays refer to an entry by its index only, so dropping the list frees all arrays that the
rules keep. The tapes of a thread share one graph, the recorder of the thread's frame.

The backward pass walks the entries in reverse, which is a topological order, and visits only those
between the target and a source. Gradients are added in place if nothing else refers to the buffer.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from sys import getrefcount
from typing import Any, NamedTuple

import numpy as np

from ndistribute import tree
from ndistribute.autodiff import collectives
from ndistribute.autodiff.diagnostics import refuse_read, refusing
from ndistribute.autodiff.rules.placing import is_tracked
from ndistribute.autodiff.rules.shape import SparseGradient, index_rule
from ndistribute.autodiff.rules.unbroadcast import identity
from ndistribute.autodiff.tracked import Tracked, is_differentiable
from ndistribute.context import Frame, current_frame, frame_stack
from ndistribute.indexed_slices import IndexedSlices, dense

Entry = tuple[tuple[int, ...], Any]
Spans = Sequence[tuple[int, int]]
Memory = Callable[[np.dtype[Any], tuple[int, ...]], Any]


class Component(NamedTuple):
    """The gradient of one of several results of an operation, and its position among them."""

    position: int
    total: int
    gradient: Any


def backpropagate(
    entries: list[Entry | None],
    seeds: Mapping[int, Any],
    sources: set[int],
    *,
    spans: Spans,
    free: bool,
    memory: Memory | None = None,
) -> dict[int, Any]:
    """Return the gradients of some entries, in new arrays; None for one that is not connected.

    Args:
        entries: the entries of a graph.
        seeds: the gradients at the start, by entry; they are not changed.
        sources: the entries whose gradients to compute.
        spans: ranges of entries to use; an operation outside them is a constant.
        free: whether to drop each entry after its use, so that its memory can be reused.
        memory: called with a dtype and a shape; returns an array for the gradient of a weight, or
            None. An all-reduce need not copy such an array. It is passed to the method `into` of
            rules that have one, such as `RightFactor`.
    """
    walk = _Pass(entries, seeds, sources, spans)
    results = {}
    for index in range(len(walk.flows) - 1, -1, -1):
        is_source = index in walk.reached
        if walk.flows[index] and walk.gradients[index] is not None:
            _step(index, walk, memory, keep=is_source)
        if is_source:
            results[index] = walk.take(index)
        if free:
            entries[index] = None
    return results


def tracked_pass(graph: Any, seeds: Mapping[int, Any], sources: set[Any], spans: Spans) -> Any:
    """Return what `backpropagate` returns, computed with tracked arrays, so that tapes record it.

    It makes the rules again from tracked arguments and results. Where that is impossible, the
    gradients are constants, and differentiating them raises an error.
    """
    entries = list(graph.entries)
    walk = _Pass(entries, seeds, sources - {None}, spans)
    first = min((start for start, _ in spans), default=0)
    for index in range(len(walk.flows) - 1, first - 1, -1):
        if not walk.flows[index] or walk.gradients[index] is None:
            continue
        parents, rules = entries[index]
        function, again = graph.again.get(index, (None, _not_kept))
        for parent in parents:  # A failed attempt may change none of these arrays.
            walk.gradients[parent], walk.owned[parent] = dense(walk.gradients[parent]), 0
        before = [(parent, walk.gradients[parent]) for parent in parents]
        try:
            if getattr(rules[0] if type(rules) is tuple else None, "func", None) is not Component:
                entries[index] = parents, again()
            _step(index, walk, None, keep=True)
        except (TypeError, ValueError, NotImplementedError, AttributeError) as error:
            for parent, gradient in before:
                walk.gradients[parent] = gradient
            refusal = refusing(function, str(error))
            constant = functools.partial(_constant, graph, parents, rules, walk.needed, refusal)
            entries[index] = parents, constant
            _step(index, walk, None, keep=True)
    known = {source: walk.gradients[source] for source in walk.reached}
    graph.has_rows = any(getattr(g, "is_rows", False) for g in known.values())
    # Nothing else may refer to an array that the user gets.
    return {source: np.copy(dense(g)) for source, g in known.items() if g is not None}


def _not_kept() -> Any:
    raise NotImplementedError(
        "only one tape recorded it. Nest two tapes, and open both before the computation"
    )


def _constant(
    graph: Any, parents: Any, rules: Any, needed: bytearray, refusal: Any, upstream: Any
) -> list[Any]:
    """Return the gradients of the arguments of one operation, whose own gradient is refused."""
    gradients = upstream if type(upstream) is list else [upstream]
    tied = (*parents, *(g.index for g in gradients if is_tracked(g)))
    raw = [g.value if is_tracked(g) else g for g in gradients]
    if type(rules) is tuple:
        pairs = zip(parents, rules, strict=True)
        changes = [rule(raw[0]) if needed[parent] else None for parent, rule in pairs]
    else:
        changes = rules(raw if type(upstream) is list else raw[0])
    return [None if g is None else graph.record(dense(g), tied, refusal) for g in changes]


def _step(index: int, walk: _Pass, memory: Memory | None, keep: bool) -> None:
    """Add the gradients of the arguments of one operation."""
    gradients, needed = walk.gradients, walk.needed
    upstream = gradients[index]
    if not keep:
        gradients[index] = None
    parents, rules = walk.entries[index]
    if type(rules) is not tuple:
        changes = list(rules(upstream))
        changes.reverse()
        for parent in parents:
            change = changes.pop()
            owned = change is not upstream and getrefcount(change) == _ALONE
            walk.add(parent, change, owned)
        return
    for parent, rule in zip(parents, rules, strict=True):
        if not needed[parent]:
            continue
        if memory is not None and hasattr(rule, "into") and walk.is_new_leaf(parent):
            gradients[parent] = rule.into(upstream, memory)
            walk.owned[parent] = True
            continue
        change = upstream if rule is identity else rule(upstream)
        owned = change is not upstream and getrefcount(change) == _ALONE
        if gradients[parent] is None and type(change) is np.ndarray:
            # The common case, without a call.
            gradients[parent] = change
            walk.owned[parent] = owned and change.base is None
        else:
            walk.add(parent, change, owned)


class _Pass:
    """The plan and the gradients of a backward pass, each in a list with an item for each entry.

    Attributes:
        reached: the sources that are not after the seeds.
        flows: 1 if the entry passes a gradient on.
        needed: 1 if it needs one.
        gradients: its gradient so far.
        owned: 1 if the buffer of its gradient may be overwritten.
    """

    __slots__ = ("entries", "flows", "gradients", "needed", "owned", "reached")

    def __init__(
        self, entries: list[Any], seeds: Mapping[int, Any], sources: set[int], spans: Spans
    ) -> None:
        size = max(seeds, default=-1) + 1
        self.entries, self.reached = entries, {source for source in sources if source < size}
        self.gradients: list[Any] = [None] * size
        self.owned, self.flows, self.needed = bytearray(size), bytearray(size), bytearray(size)
        flows, needed = self.flows, self.needed
        for source in self.reached:
            needed[source] = 1
        for start, stop in spans:
            for index, entry in enumerate(entries[start : min(stop, size)], start):
                for parent in entry[0] if entry is not None else ():
                    if needed[parent]:
                        flows[index] = needed[index] = 1
        for index, seed in seeds.items():
            self.add(index, seed, owned=False)

    def is_new_leaf(self, index: int) -> bool:
        return self.entries[index] is None and self.gradients[index] is None

    def add(self, index: int, change: Any, owned: bool) -> None:
        """Add a contribution to the gradient of an entry; `owned` if nothing else refers to it."""
        if change is None:
            return
        old = self.gradients[index]
        if type(change) is SparseGradient:
            self._add_sparse(index, change)
        elif type(change) is IndexedSlices:
            shape, rows, values = change.dense_shape, change.indices, change.values
            self._add_sparse(index, SparseGradient(shape, rows, values, is_rows=True))
        elif type(change) is Component:
            parts = [None] * change.total if old is None else old
            parts[change.position] = change.gradient
            self.gradients[index] = parts
        elif old is None:
            self.gradients[index] = change
            self.owned[index] = owned and change.base is None
        elif type(old) is SparseGradient:
            self._own(index, old.to_dense() + change)
        elif self.owned[index] and (type(change) is np.ndarray or not is_tracked(change)):
            # Assigned again, because NumPy scalars do not change in place.
            old += change
            self.gradients[index] = old
        else:
            self._own(index, old + change)

    def take(self, source: int) -> Any:
        """Return the gradient of a source, in an array that nothing else refers to."""
        gradient = self.gradients[source]
        if gradient is None:
            return None
        if isinstance(gradient, SparseGradient | np.generic):
            return finished(gradient)
        if self.entries[source] is not None or not self.owned[source]:
            # If the source is a result, the gradient of its argument may be the same array.
            return gradient.copy()
        self.gradients[source] = None
        return gradient

    def _add_sparse(self, index: int, change: SparseGradient) -> None:
        old = self.gradients[index]
        if old is None:
            # A leaf keeps rows sparse; rules accept dense gradients only.
            keep = change.is_rows and self.entries[index] is None
            self._own(index, change if keep else change.to_dense())
            return
        if type(old) is SparseGradient:
            if change.is_rows:
                old.parts.extend(change.parts)
                return
            old = old.to_dense()
        elif isinstance(old, np.generic):
            old = np.array(old)
        elif not self.owned[index]:
            old = old.copy()
        self._own(index, change.add_to(old))

    def _own(self, index: int, gradient: Any) -> None:
        self.gradients[index] = gradient
        self.owned[index] = 1


def finished(gradient: Any) -> Any:
    """Return a rule's result as the gradient of a source: an array or rows."""
    if type(gradient) is SparseGradient:
        return gradient.to_slices() if gradient.is_rows else gradient.to_dense()
    return np.asarray(gradient) if isinstance(gradient, np.generic) else gradient


def _count_alone() -> int:
    """Return the reference count of an array that only one variable refers to."""
    array = np.empty(0)
    return getrefcount(array)


# A rule may return an array that it keeps, and writing to it would change later gradients.
_ALONE = _count_alone()


_new: Any = object.__new__


class TapeGraph:
    """The recorder of a frame while a tape records, which variables and contexts call."""

    __slots__ = (
        *"_frame _open _outer _recording again askers entries".split(),
        *"has_rows kind leaves lock nested".split(),
    )

    def __init__(self, frame: Frame) -> None:
        self.entries: list[Entry | None] = []
        # The variables that were read and their entries, by id; this keeps them alive.
        self.leaves: dict[int, tuple[Any, int]] = {}
        self.askers = 0  # The number of tapes whose `gradient` may still be called.
        self.kind = Tracked  # The class of tracked arrays.
        self.nested = False  # Whether several tapes are open now.
        # For entries of nested tapes: the function, and what returns rules of tracked arrays.
        self.again: dict[int, tuple[Any, Callable[[], Any]]] = {}
        self.has_rows = False  # Whether the last tracked gradients were sparse rows.
        self.lock: Any = None  # For the threads that append to it, if there are several.
        self._frame = frame
        self._open = 0
        self._recording: list[Any] = []
        # The recorder that the frame gets back when no tape records.
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
        tracked: Tracked = _new(self.kind)
        tracked.value = value
        tracked.graph = self
        tracked.index = len(self.entries)
        self.entries.append((parents, rules))
        return tracked

    def record_many(self, values: Any, parents: tuple[int, ...], joint: Callable[..., Any]) -> Any:
        """Append an operation with a nest of results; return them tracked, except for integers.

        `joint` takes one gradient for each result, None for an unused one, and returns one for each
        parent.
        """
        results = tree.flatten(values)
        base = self.leaf(None).index
        self.entries[base] = (parents, joint)
        for k, result in enumerate(results):
            if is_differentiable(result):
                rule = functools.partial(Component, k, len(results))
                results[k] = self.record(result, (base,), (rule,))
        return tree.unflatten(values, results)

    def leaf(self, value: Any) -> Tracked:
        """Append a leaf, and return the tracked array for it."""
        tracked = self.kind(value, self, len(self.entries))
        self.entries.append(None)
        return tracked

    def read(self, variable: Any, value: Any) -> Any:
        """Return a variable's value, tracked if a recording tape watches the variable."""
        known = self.leaves.get(id(variable))
        if known is not None:
            return self.kind(value, self, known[1])
        for tape in self._recording:
            if tape.watches(variable) and is_differentiable(value):
                self.leaves[id(variable)] = variable, len(self.entries)
                return self.leaf(value)
        return value

    def around_step(self) -> TapeGraph:
        """Return the recorder of a step of `strategy.run`, in which these tapes do not record."""
        return _AroundStep(self)

    def read_part(self, variable: Any, index: Any, value: Any) -> Any:
        """Return `value`, which is ``variable[index]``, tracked if `read` would track the whole."""
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
    def joined(cls, tape: Any) -> TapeGraph:
        """Return the graph of this thread, or a new one, in which a tape now records."""
        frame = current_frame()
        graph = frame.recorder
        if not isinstance(graph, TapeGraph) or not graph._open:
            graph = cls(frame)
        graph.nested = graph._open > 0
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


class _AroundStep(TapeGraph):
    """The recorder of a step inside an open tape; it raises if a read would lose its gradient."""

    __slots__ = ("_around",)

    def __init__(self, graph: TapeGraph) -> None:
        super().__init__(Frame(None, None))
        self._around = graph

    def read(self, variable: Any, value: Any) -> Any:
        watched = any(tape.watches(variable) for tape in self._around._recording)
        if watched and is_differentiable(value):
            refuse_read(variable)
        return value
