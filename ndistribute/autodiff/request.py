"""The two ends of a backward pass: the gradients it starts from, and those it gives out.

Pure bookkeeping between the nests that users pass and the entries of a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ndistribute import tree
from ndistribute.autodiff.tracked import untrack
from ndistribute.collective.indexed_slices import IndexedSlices
from ndistribute.device import as_array

__all__ = ["Delivery", "seeds_of", "unconnected_is_zero"]


def unconnected_is_zero(mode: Any) -> bool:
    """Return what `unconnected_gradients` asks for.

    Raises:
        ValueError: it is neither "none" nor "zero".

    >>> unconnected_is_zero("zero")
    True
    """
    name = str(getattr(mode, "value", mode)).lower()
    if name not in ("none", "zero"):
        raise ValueError(f"unconnected_gradients must be 'none' or 'zero', got {mode!r}.")
    return name == "zero"


def seeds_of(
    targets: Sequence[tuple[int | None, Any]], nest: Any, output_gradients: Any
) -> dict[int, Any]:
    """Return the gradients that a backward pass starts from, by entry.

    Args:
        targets: the entry and the raw value of each target; None for a constant.
        nest: the targets as the user passed them.
        output_gradients: the user's; a nest like `nest`, or None for ones.

    Raises:
        ValueError: structure or shape differ from the target's.
    """
    if output_gradients is None:
        given: list[Any] = [None] * len(targets)
    elif tree.same_structure(nest, output_gradients):
        given = tree.flatten(output_gradients)
    else:
        raise ValueError("output_gradients must have the structure of the target, or be None.")
    seeds: dict[int, Any] = {}
    for (place, value), gradient in zip(targets, given, strict=True):
        if place is not None:
            seed = _ones(value) if gradient is None else _seed(value, gradient)
            seeds[place] = seeds[place] + seed if place in seeds else seed
    return seeds


class Delivery:
    """Collect gradients as they become final.

    Args:
        sources: variables and tracked arrays.
        places: the entry of each source, None for one that is not in the graph.
        zero: whether a source without a gradient gets zeros.
    """

    def __init__(
        self,
        sources: Sequence[Any],
        places: Sequence[int | None],
        zero: bool,
    ) -> None:
        self._sources = sources
        self._zero = zero
        self._results: list[Any] = [None] * len(places)
        self._waiting: dict[int | None, list[int]] = {}
        for k, place in enumerate(places):
            self._waiting.setdefault(place, []).append(k)

    @property
    def places(self) -> set[int]:
        """Return the entries whose gradients are wanted."""
        return {place for place in self._waiting if place is not None}

    def __call__(self, place: int | None, gradient: Any) -> None:
        """Take the final gradient of an entry, which belongs to the receiver."""
        first, *others = self._waiting.pop(place)
        self._results[first] = self._finished(first, gradient)
        for k in others:
            self._results[k] = self._finished(k, _copy(gradient))

    def finish(self) -> list[Any]:
        """Return all gradients, having delivered those that never came."""
        for place in list(self._waiting):
            self(place, None)
        return self._results

    def _finished(self, k: int, gradient: Any) -> Any:
        source = self._sources[k]
        if gradient is None:
            return _zeros(source) if self._zero else None
        if gradient.dtype.kind == "c":
            # The rules carry the derivative of the analytic function; users want the direction of
            # steepest ascent, as TensorFlow gives it.
            gradient = np.conj(gradient)
        # Before NumPy 2, a Python float turns a float32 number (not an array) into a float64.
        return gradient if gradient.dtype == source.dtype else gradient.astype(source.dtype)


def _zeros(source: Any) -> Any:
    is_variable = getattr(source, "is_distributed_variable", False)
    return np.zeros_like(untrack(source.tracked_value() if is_variable else source))


def _ones(value: Any) -> Any:
    return type(value)(1) if isinstance(value, np.generic) else np.ones_like(value)


def _seed(value: Any, gradient: Any) -> Any:
    gradient = as_array(untrack(gradient))
    if gradient.shape != value.shape:
        raise ValueError(
            f"output_gradients has shape {gradient.shape} where the target has {value.shape}: they "
            "must be the same."
        )
    gradient = gradient.astype(value.dtype, copy=False)
    return np.conj(gradient) if value.dtype.kind == "c" else gradient


def _copy(gradient: Any) -> Any:
    if isinstance(gradient, IndexedSlices):
        return IndexedSlices(gradient.values.copy(), gradient.indices.copy(), gradient.dense_shape)
    return None if gradient is None else gradient.copy()
