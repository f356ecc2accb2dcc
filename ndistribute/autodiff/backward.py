"""Walk a graph from its end to its beginning, and compute the gradients of some entries.

Entries are in the order in which they were made, so their reverse is a topological order and no
sorting is needed. Gradients are added in place wherever nobody else can see the buffer. Only what
leads from the target to a source is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from sys import getrefcount
from typing import Any

import numpy as np

from ndistribute.autodiff.rules.indexing import SliceGradient, SparseGradient
from ndistribute.autodiff.rules.products import RightFactor
from ndistribute.autodiff.rules.unbroadcast import identity
from ndistribute.collective.indexed_slices import IndexedSlices

__all__ = ["Component", "Entry", "backpropagate"]

Entry = tuple[tuple[int, ...], Any]
Spans = Sequence[tuple[int, int]]
Memory = Callable[[np.dtype[Any], tuple[int, ...]], Any]


class Component:
    """Hold the gradient of one result of an operation that has several.

    Args:
        position: which result.
        total: how many there are.
        gradient: that of the result.
    """

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
    """Compute the gradients of some entries.

    Args:
        entries: a graph's.
        seeds: the gradients to start from, under their entries; not changed.
        sources: the entries whose gradients are wanted.
        spans: ranges of entries that count; an operation outside is a constant.
        free: whether to drop each entry once it is done, so that its memory serves the next.
        memory: offers arrays for the gradients of weights, or None; such memory need not be copied
            when gradients are added over replicas.

    Returns:
        The gradient of each source, which is the caller's own; None if it is not connected.
    """
    top = max(seeds, default=-1)
    reached = {source for source in sources if source <= top}
    flows, needed = _plan(entries, top, reached, spans)
    found = _Found(entries, top)
    for index, seed in seeds.items():
        found.add(index, seed, owned=False)
    results = {}
    for index in range(top, -1, -1):
        is_source = index in reached
        if flows[index] and found.gradients[index] is not None:
            _step(index, found, needed, memory, keep=is_source)
        if is_source:
            results[index] = found.take(index)
        if free:
            entries[index] = None
    return results


def _plan(
    entries: Sequence[Entry | None], top: int, sources: set[int], spans: Spans
) -> tuple[bytearray, bytearray]:
    """Return for each entry 1 if it passes a gradient on, and 1 if it needs one."""
    flows, needed = bytearray(top + 1), bytearray(top + 1)
    for source in sources:
        needed[source] = 1
    for start, stop in spans:
        for index, entry in enumerate(entries[start : min(stop, top + 1)], start):
            for parent in entry[0] if entry is not None else ():
                if needed[parent]:
                    flows[index] = needed[index] = 1
    return flows, needed


def _step(index: int, found: _Found, needed: bytearray, memory: Memory | None, keep: bool) -> None:
    """Pass the gradient of one operation on to what it used."""
    gradients = found.gradients
    upstream = gradients[index]
    if not keep:
        gradients[index] = None
    parents, rules = found.entries[index]
    if type(rules) is not tuple:
        changes = list(rules(upstream))
        changes.reverse()
        for parent in parents:
            change = changes.pop()
            owned = change is not upstream and getrefcount(change) == _ALONE
            found.add(parent, change, owned)
        return
    for parent, rule in zip(parents, rules, strict=True):
        if not needed[parent]:
            continue
        if memory is not None and type(rule) is RightFactor and found.is_new_leaf(parent):
            gradients[parent] = rule.into(upstream, memory)
            found.owned[parent] = True
            continue
        change = upstream if rule is identity else rule(upstream)
        owned = change is not upstream and getrefcount(change) == _ALONE
        if gradients[parent] is None and type(change) is np.ndarray:
            # What nearly always happens, without a call.
            gradients[parent] = change
            found.owned[parent] = owned and change.base is None
        else:
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
        if change is None:
            return
        old = self.gradients[index]
        if type(change) in (SliceGradient, SparseGradient, IndexedSlices):
            self._add_sparse(index, change)
        elif type(change) is Component:
            parts = [None] * change.total if old is None else old
            parts[change.position] = change.gradient
            self.gradients[index] = parts
        elif old is None:
            self.gradients[index] = change
            self.owned[index] = owned and change.base is None
        elif type(old) is SparseGradient:
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
        if type(gradient) is SparseGradient:
            return gradient.to_slices()
        if isinstance(gradient, np.generic):
            return np.asarray(gradient)
        if self.entries[source] is not None or not self.owned[source]:
            # Of a source that is itself a result, what it used may have the same array.
            return gradient.copy()
        self.gradients[source] = None
        return gradient

    def _add_sparse(
        self, index: int, change: SliceGradient | SparseGradient | IndexedSlices
    ) -> None:
        if isinstance(change, IndexedSlices):
            change = SparseGradient(change.dense_shape, change.indices, change.values)
        old = self.gradients[index]
        if type(old) is SparseGradient and type(change) is SparseGradient:
            old.merge(change)
        elif old is None:
            # Rows stay rows for a leaf; a rule upstream would not know what to do with them.
            keep = self.entries[index] is None and type(change) is SparseGradient
            self._own(index, change if keep else change.to_dense())
        else:
            if type(old) is SparseGradient:
                old = old.to_dense()
            elif isinstance(old, np.generic):
                old = np.array(old)
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
