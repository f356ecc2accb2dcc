"""The backward pass: it walks a graph in reverse, and computes the gradients of some entries.

Entries are in order of creation, so their reverse is a topological order. Gradients are added in
place if nothing else refers to the buffer. The pass visits only the entries between the target and
a source.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from sys import getrefcount
from typing import Any

import numpy as np

from ndistribute.autodiff.diagnostics import refusing
from ndistribute.autodiff.rules.placing import is_tracked
from ndistribute.autodiff.rules.shape import SparseGradient
from ndistribute.autodiff.rules.unbroadcast import identity
from ndistribute.indexed_slices import IndexedSlices, dense

Entry = tuple[tuple[int, ...], Any]
Spans = Sequence[tuple[int, int]]
Memory = Callable[[np.dtype[Any], tuple[int, ...]], Any]


class Component:
    """The gradient of one of several results of an operation, and its position among them."""

    __slots__ = ("gradient", "position", "total")

    def __init__(self, position: int, total: int, gradient: Any) -> None:
        self.position = position
        self.total = total
        self.gradient = gradient


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

    The rules are made again, from tracked arguments and results. Where that is not possible, the
    gradients are constants whose own gradient is refused.
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
    graph.has_rows = any(getattr(one, "is_rows", False) for one in known.values())
    # Nothing else may refer to an array that the user gets.
    return {source: np.copy(dense(one)) for source, one in known.items() if one is not None}


def _not_kept() -> Any:
    raise NotImplementedError(
        "only one tape recorded it. Nest two tapes, and open both of them before it"
    )


def _constant(
    graph: Any, parents: Any, rules: Any, needed: bytearray, refusal: Any, upstream: Any
) -> list[Any]:
    """Return the gradients of the arguments of one operation, whose own gradient is refused."""
    given = upstream if type(upstream) is list else [upstream]
    tied = (*parents, *(one.index for one in given if is_tracked(one)))
    raw = [one.value if is_tracked(one) else one for one in given]
    if type(rules) is tuple:
        pairs = zip(parents, rules, strict=True)
        changes = [rule(raw[0]) if needed[parent] else None for parent, rule in pairs]
    else:
        changes = rules(raw if type(upstream) is list else raw[0])
    return [None if one is None else graph.record(dense(one), tied, refusal) for one in changes]


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
    """Return what a rule gave as the gradient of a source: an array or rows."""
    if type(gradient) is SparseGradient:
        return gradient.to_slices() if gradient.is_rows else gradient.to_dense()
    return np.asarray(gradient) if isinstance(gradient, np.generic) else gradient


def _count_alone() -> int:
    """Return the reference count of an array that only one variable refers to."""
    array = np.empty(0)
    return getrefcount(array)


# A rule may return an array that it keeps, and writing to it would change later gradients.
_ALONE = _count_alone()
