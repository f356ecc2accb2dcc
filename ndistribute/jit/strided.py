"""Writes to a part of an array of JAX, as XLA runs them fast."""

from __future__ import annotations

from typing import Any

import numpy as np

from ndistribute.devices import jax_module


def placed(value: Any, index: Any, new: Any) -> Any:
    """Return a value of JAX with new elements at an index."""
    parts = index if isinstance(index, tuple) else (index,)
    slices = [part for part in parts if isinstance(part, slice)]
    if len(slices) < len(parts) or all(part.step in (None, 1) for part in slices):
        return value.at[index].set(new)
    # XLA scatters elements with a step between them one by one; a choice is one parallel loop.
    ranges = [range(n)[part] for n, part in zip(value.shape, slices, strict=False)]
    ranges += map(range, value.shape[len(slices) :])
    if any(not r or r.step < 1 for r in ranges):
        return value.at[index].set(new)
    numpy, lax = jax_module().numpy, jax_module().lax
    new = numpy.broadcast_to(new, [len(r) for r in ranges])
    gaps = [(r[0], n - 1 - r[-1], r.step - 1) for n, r in zip(value.shape, ranges, strict=True)]
    chosen = numpy.ones((), bool)
    for k, (length, r) in enumerate(zip(value.shape, ranges, strict=True)):
        is_in = np.isin(np.arange(length), r)
        chosen &= is_in.reshape(-1, *[1] * (value.ndim - 1 - k))
    return numpy.where(chosen, lax.pad(new, numpy.zeros((), new.dtype), gaps), value)
