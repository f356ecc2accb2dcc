"""Applies an update to a whole array, to a range of it, or to some of its rows, in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ndistribute.collective.buckets import blocks
from ndistribute.collective.indexed_slices import IndexedSlices
from ndistribute.device import Array, device_of, is_gpu_array
from ndistribute.stream import working_on, write_to

__all__ = ["Targets", "block_of", "update_range", "update_rows", "update_whole"]

# A block of the gradient, the variable and two slots fit a core's second-level cache.
BLOCK_ELEMENTS = 32 * 1024


@dataclass(frozen=True, slots=True)
class Targets:
    """What an update may write to, opened once for all replicas.

    `arrays[i][home]` are variable number i and its slots in one memory space.
    """

    arrays: list[list[tuple[Array, ...]]]
    rates: Any


Update = Callable[[Array, Array, Sequence[Array], Any], None]


def update_whole(update: Update, arrays: tuple[Array, ...], gradient: Array, rates: Any) -> None:
    """Update a variable and its slots, block by block; the gradient stays as it is."""
    flat = gradient.reshape(-1)
    size = flat.size if is_gpu_array(flat) else BLOCK_ELEMENTS
    for start, stop in blocks(0, flat.size, max(1, size)):
        update_range(update, arrays, start, stop, flat[start:stop].copy(), rates)


def update_range(
    update: Update, arrays: tuple[Array, ...], start: int, stop: int, gradient: Array, rates: Any
) -> None:
    """Update a range of a variable and of its slots; `gradient` may be changed."""
    variable, *slots = (array.reshape(-1)[start:stop] for array in arrays)
    update(variable, gradient.astype(variable.dtype, copy=False), slots, rates)


def update_rows(update: Update, arrays: tuple[Array, ...], rows: IndexedSlices, rates: Any) -> None:
    """Update the rows that a gradient names, each once."""
    device = device_of(arrays[0])
    with working_on(device):
        rows = rows.on(device)
        taken = [array[rows.indices] for array in arrays]
        values = rows.values.astype(taken[0].dtype)
        update(taken[0], values, taken[1:], rates)
        for array, part in zip(arrays, taken, strict=True):
            array[rows.indices] = part


def block_of(gradient: Array, start: int, stop: int, like: Array) -> Array:
    """Return a range of a gradient, in memory that may be changed."""
    write_to(like, gradient.reshape(-1)[start:stop])
    return like
