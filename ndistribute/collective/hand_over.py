"""How a process that owns its copies alone hands a finished reduction to whoever updates them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ndistribute.collective.backend import Call, Update
from ndistribute.collective.buckets import blocks
from ndistribute.device import Array
from ndistribute.timeline import span

__all__ = ["BLOCK_ELEMENTS", "update_in_blocks"]

# The total and the variable stay in a core's second-level cache.
BLOCK_ELEMENTS = 64 * 1024


def update_in_blocks(
    call: Call,
    inputs: Sequence[Array],
    totals: Sequence[Array],
    prepare: Callable[[], Any],
    update: Update,
) -> Any:
    """Update with totals that are all there, so that a failure before changes nothing.

    Args:
        call: what they are the totals of.
        inputs: what was reduced; a total is handed over in its dtype.
        totals: flat, and of no further use to the caller: `update` may change them.
        prepare: run once, before the first update.
        update: see `Update`.

    Returns:
        What `prepare` returned.
    """
    with span("update", call.title):
        prepared = prepare()
        for leaf, (array, total) in enumerate(zip(inputs, totals, strict=True)):
            for start, stop in blocks(0, total.size, BLOCK_ELEMENTS):
                part = total[start:stop].astype(array.dtype, copy=False)
                update(prepared, leaf, start, stop, part)
    return prepared
