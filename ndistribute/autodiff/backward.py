"""Walk a graph from its end to its beginning, and hand over gradients as they become final.

Entries are in the order in which they were made, so their reverse is a topological order and no
sorting is needed. Gradients are added in place wherever nobody else can see the buffer. Only what
leads from the target to a source is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from sys import getrefcount
from typing import Any

import numpy as np

from ndistribute.autodiff.rules.indexing import Part, Rows
from ndistribute.autodiff.rules.linear import RightFactor
from ndistribute.collective.indexed_slices import IndexedSlices

__all__ = ["Component", "Entry", "backpropagate"]

Entry = tuple[tuple[int, ...], Any]
Deliver = Callable[[int, Any], None]
Spans = Sequence[tuple[int, int]]
Memory = Callable[[np.dtype[Any], tuple[int, ...]], Any]


class Component:
    """Mark the gradient of one result of an operation that has several.

    Args:
        position: which result.
        count: how many there are.
    """

    __slots__ = ("count", "gradient", "position")

    def __init__(self, position: int, count: int, gradient: Any = None) -> None:
        self.position = position
        self.count = count
        self.gradient = gradient

    def __call__(self, g: Any) -> Component:
        return Component(self.position, self.count, g)


def backpropagate(
    entries: list[Entry | None],
    seeds: Mapping[int, Any],
    sources: set[int],
    deliver: Deliver,
    *,
    spans: Spans,
    free: bool,
    memory: Memory | None = None,
) -> None:
    """Compute the gradients of some entries.

    Args:
        entries: a graph's.
        seeds: the gradients to start from, under their entries; not changed.
        sources: the entries whose gradients are wanted.
        deliver: called with a source and its gradient as soon as that is final, the last used
            first; the gradient is the receiver's own, None if the source is not connected. Not
            called for a source that was made after everything in `seeds`.
        spans: ranges of entries that count; an operation outside is a constant.
        free: whether to drop each entry once it is done, so that its memory serves the next.
        memory: offers arrays for the gradients of weights, or None; such memory need not be copied
            when gradients are added over replicas.
    """
    top = max(seeds, default=-1)
    flows, needed, final = _plan(entries, top, sources, spans)
    found = _Found(entries, top)
    for index, seed in seeds.items():
        found.add(index, seed, owned=False)
    for index in range(top, -1, -1):
        if flows[index] and found.gradients[index] is not None:
            _step(index, found, needed, memory, keep=index in sources)
        if free:
            entries[index] = None
        if index in final:
            for source in final[index]:
                deliver(source, found.take(source))


def _plan(
    entries: Sequence[Entry | None], top: int, sources: set[int], spans: Spans
) -> tuple[bytearray, bytearray, dict[int, list[int]]]:
    """Decide what to compute.

    Returns:
        Which entries pass a gradient on; which need one; and after which entry each source's
        gradient is final: the first one that used it.
    """
    flows, needed = bytearray(top + 1), bytearray(top + 1)
    used = dict.fromkeys(sorted(source for source in sources if source <= top), -1)
    for source in used:
        needed[source] = 1
    for start, stop in spans:
        for index, entry in enumerate(entries[start : min(stop, top + 1)], start):
            for parent in entry[0] if entry is not None else ():
                if needed[parent]:
                    flows[index] = needed[index] = 1
                    if used.get(parent) == -1:
                        used[parent] = index
    final: dict[int, list[int]] = {}
    for source, first in used.items():
        final.setdefault(source if first < 0 else first, []).append(source)
    return flows, needed, final


def _step(index: int, found: _Found, needed: bytearray, memory: Memory | None, keep: bool) -> None:
    """Pass the gradient of one operation on to what it used."""
    gradients = found.gradients
    upstream = gradients[index]
    if not keep:
        gradients[index] = None
    parents, rules = found.entries[index]
    if type(rules) is not tuple:
        _joint_step(found, parents, list(rules(upstream)), upstream)
        return
    for parent, rule in zip(parents, rules, strict=True):
        if needed[parent]:
            if memory is not None and type(rule) is RightFactor and found.is_new_leaf(parent):
                gradients[parent] = rule.into(upstream, memory)
                found.owned[parent] = True
                continue
            change = rule(upstream)
            owned = change is not upstream and getrefcount(change) == _ALONE
            if gradients[parent] is None and type(change) is np.ndarray:
                # What nearly always happens, without a call.
                gradients[parent] = change
                found.owned[parent] = owned and change.base is None
            else:
                found.add(parent, change, owned)


def _joint_step(found: _Found, parents: Sequence[int], changes: list[Any], upstream: Any) -> None:
    changes.reverse()
    for parent in parents:
        change = changes.pop()
        owned = change is not upstream and getrefcount(change) == _ALONE
        found.add(parent, change, owned)


class _Found:
    """Hold the gradients of a walk, and which of their buffers may be written to."""

    __slots__ = ("entries", "gradients", "owned")

    def __init__(self, entries: list[Any], top: int) -> None:
        self.entries = entries
        self.gradients: list[Any] = [None] * (top + 1)
        self.owned = bytearray(top + 1)

    def is_new_leaf(self, index: int) -> bool:
        """Return True for a leaf that has no gradient yet."""
        return self.entries[index] is None and self.gradients[index] is None

    def add(self, index: int, change: Any, owned: bool) -> None:
        """Add a contribution to the gradient of an entry.

        Args:
            index: the entry.
            change: the contribution, None for nothing.
            owned: whether nobody else refers to `change`.
        """
        if type(change) is not np.ndarray and not self._is_array(index, change):
            return
        old = self.gradients[index]
        if old is None:
            self.gradients[index] = change
            self.owned[index] = owned and change.base is None
        elif type(old) is Rows:
            self._own(index, old.to_dense() + change)
        elif self.owned[index]:
            # The result is bound again because NumPy numbers are not changed in place.
            old += change
            self.gradients[index] = old
        else:
            self._own(index, old + change)

    def take(self, source: int) -> Any:
        """Return a source's gradient as an array that belongs to the caller alone."""
        gradient = self.gradients[source]
        if gradient is None:
            return None
        if type(gradient) is Rows:
            return gradient.to_slices()
        if isinstance(gradient, np.generic):
            return np.asarray(gradient)
        if self.entries[source] is not None or not self.owned[source]:
            # A source that is itself a result: the walk still has to pass its gradient on.
            return gradient.copy()
        self.gradients[source] = None
        return gradient

    def _is_array(self, index: int, change: Any) -> bool:
        """Add a contribution that is not an array, and say so; leave an array to the caller."""
        kind = type(change)
        if kind is Component:
            self._add_component(index, change)
        elif kind is Part or kind is Rows:
            self._add_sparse(index, change)
        elif kind is IndexedSlices:
            self._add_sparse(index, Rows(change.dense_shape, change.indices, change.values))
        else:
            return change is not None
        return False

    def _add_component(self, index: int, component: Component) -> None:
        if self.gradients[index] is None:
            self.gradients[index] = [None] * component.count
        self.gradients[index][component.position] = component.gradient

    def _add_sparse(self, index: int, change: Part | Rows) -> None:
        old = self.gradients[index]
        is_leaf = self.entries[index] is None
        if type(old) is Rows and type(change) is Rows:
            old.merge(change)
        elif old is None:
            # Rows stay rows for a leaf; a rule upstream would not know what to do with them.
            keep = is_leaf and type(change) is Rows
            self._own(index, change if keep else change.to_dense())
        else:
            if type(old) is Rows:
                old = old.to_dense()
            elif not self.owned[index]:
                old = old.copy()
            change.add_to(old)
            self._own(index, old)

    def _own(self, index: int, gradient: Any) -> None:
        self.gradients[index] = gradient
        self.owned[index] = 1


def _count_alone() -> int:
    """Count the references to an array that one variable alone holds."""
    array = np.empty(0)
    return getrefcount(array)


# A rule may return an array that it keeps; writing into that would change the next gradient.
_ALONE = _count_alone()
