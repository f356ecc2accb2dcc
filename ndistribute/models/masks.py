"""Masks of sequences: which time steps of an array count.

A layer attaches a mask to its output. The next layer, the loss and the metrics read it from there.
A mask belongs to the array object and lives as long as it. NumPy's functions return new arrays,
which have no mask.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from ndistribute import tree
from ndistribute.autodiff import untrack

_masks: dict[int, tuple[weakref.ref[Any], Any]] = {}


def attach_mask(nest: Any, masks: Any) -> None:
    """Attach a mask to a plain or tracked array, unless it already has one or the mask is None.

    The arrays of a nest get the masks in turn; a single mask goes to the first array.
    """
    if masks is None:
        return
    for leaf, mask in zip(tree.flatten(nest), tree.flatten(masks), strict=False):
        array = untrack(leaf)
        key = id(array)
        if mask is not None and key not in _masks and hasattr(array, "dtype"):
            _masks[key] = weakref.ref(array, functools.partial(_forget, key)), mask


def _forget(key: int, _: Any) -> None:
    _masks.pop(key, None)


def mask_of(nest: Any) -> Any:
    """Return the mask of an array: booleans of its first axes; None if it has none.

    For a nest, return a nest of masks, or None if no array in it has one.

    >>> import numpy as np
    >>> from ndistribute.models.layers import Embedding
    >>> mask_of(Embedding(3, 4, mask_zero=True)(np.array([[1, 2, 0]])))
    array([[ True,  True, False]])
    """
    if not _masks:
        return None
    masks = tree.map_leaves(_mask_of_leaf, nest)
    return masks if any(mask is not None for mask in tree.flatten(masks)) else None


def with_mask_of(array: Any, former: Any) -> Any:
    """Return an array, with the mask of one whose elements it has."""
    attach_mask(array, mask_of(former))
    return array


def _mask_of_leaf(leaf: Any) -> Any:
    entry = _masks.get(id(untrack(leaf)))
    return None if entry is None else entry[1]


def detach_mask(array: Any) -> None:
    """Remove the mask of an array."""
    _masks.pop(id(untrack(array)), None)
