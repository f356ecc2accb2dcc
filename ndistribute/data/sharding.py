"""Which rows, batches and steps belong to whom, as plans computed from numbers alone.

Every cut that the input layer makes is decided here, so that "exactly once" can be proved with
neither arrays nor processes. Nothing here reads data, waits or remembers.
"""

from __future__ import annotations

import functools
from itertools import pairwise

__all__ = ["balanced_slices", "worker_batches", "worker_slices"]


@functools.lru_cache(maxsize=256)
def balanced_slices(length: int, parts: int) -> tuple[slice, ...]:
    """Cut ``length`` rows into contiguous pieces, the first ``length % parts`` one row longer.

    >>> [piece.stop - piece.start for piece in balanced_slices(4, 3)]
    [2, 1, 1]
    """
    size, longer = divmod(length, parts)
    bounds = [part * size + min(part, longer) for part in range(parts + 1)]
    return tuple(slice(start, stop) for start, stop in pairwise(bounds))


def worker_slices(
    length: int, replicas: int, num_workers: int = 1, worker_index: int = 0
) -> tuple[slice, ...]:
    """Return the pieces of a global batch for the replicas of one worker.

    The batch is cut for all replicas of all workers at once, so the result of a step does not
    depend on how the replicas are spread over processes.

    Args:
        length: rows of the global batch.
        replicas: replicas of each worker.
        num_workers: workers of the job.
        worker_index: this worker.

    >>> worker_slices(5, replicas=2, num_workers=2, worker_index=1)
    (slice(3, 4, None), slice(4, 5, None))
    """
    first = worker_index * replicas
    return balanced_slices(length, replicas * num_workers)[first : first + replicas]


def worker_batches(num_batches: int, num_workers: int, worker_index: int) -> tuple[int | None, ...]:
    """Deal whole batches to workers; all of them make the same number of steps.

    Returns:
        The batch that this worker takes at each joint step; None where it has run out and takes
        part with empty pieces.

    >>> worker_batches(3, num_workers=2, worker_index=0), worker_batches(3, 2, 1)
    ((0, 2), (1, None))
    """
    joint_steps = -(-num_batches // num_workers)
    mine = range(worker_index, num_batches, num_workers)
    return tuple(mine) + (None,) * (joint_steps - len(mine))
