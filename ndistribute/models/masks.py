"""Masks of sequences: which time steps of an array count.

A layer attaches a mask to its output, and the next layer, the loss and the metrics find it there. A
mask lives as long as its array, and belongs to the array object: NumPy's functions make new arrays,
which have none.
"""

from __future__ import annotations

import weakref
from typing import Any

from ndistribute.autodiff import untrack

_masks: dict[int, tuple[weakref.ref[Any], Any]] = {}


def attach_mask(array: Any, mask: Any) -> None:
    """Attach a mask to an array, plain or tracked, unless that has one, or the mask is None."""
    array = untrack(array)
    key = id(array)
    if mask is not None and key not in _masks and hasattr(array, "dtype"):
        _masks[key] = weakref.ref(array, lambda _: _masks.pop(key, None)), mask


def mask_of(array: Any) -> Any:
    """Return the mask of an array: booleans of its first axes; None if it has none.

    >>> import numpy as np
    >>> from ndistribute.models.layers import Embedding
    >>> mask_of(Embedding(3, 4, mask_zero=True)(np.array([[1, 2, 0]])))
    array([[ True,  True, False]])
    """
    entry = _masks.get(id(untrack(array))) if _masks else None
    return None if entry is None else entry[1]


def detach_mask(array: Any) -> None:
    """Let an array have no mask."""
    _masks.pop(id(untrack(array)), None)
