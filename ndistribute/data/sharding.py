"""Which rows, batches and steps belong to whom, as plans computed from numbers alone.

Every cut that the input layer makes is decided here, so that "exactly once" can be proved with
neither arrays nor processes. Nothing here reads data, waits or remembers.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise

__all__ = ["balanced_slices", "replica_slices"]


@functools.lru_cache(maxsize=256)
def balanced_slices(length: int, parts: int) -> tuple[slice, ...]:
    """Cut ``length`` rows into contiguous pieces, the first ``length % parts`` one row longer.

    >>> [piece.stop - piece.start for piece in balanced_slices(4, 3)]
    [2, 1, 1]
    """
    size, longer = divmod(length, parts)
    bounds = [part * size + min(part, longer) for part in range(parts + 1)]
    return tuple(slice(start, stop) for start, stop in pairwise(bounds))


def replica_slices(
    length: int, replica_counts: Sequence[int], worker_index: int
) -> tuple[slice, ...]:
    """Return the pieces of a global batch for the replicas of one worker.

    The batch is cut for all replicas of all workers at once, so the result of a step does not
    depend on how the replicas are spread over processes.

    Args:
        length: rows of the global batch.
        replica_counts: replicas of each worker.
        worker_index: this worker.

    >>> replica_slices(5, replica_counts=(1, 3), worker_index=1)
    (slice(2, 3, None), slice(3, 4, None), slice(4, 5, None))
    """
    first = sum(replica_counts[:worker_index])
    pieces = balanced_slices(length, sum(replica_counts))
    return pieces[first : first + replica_counts[worker_index]]
