"""Reduces gradients while the backward pass still computes others.

Gradients become final from the last layer to the first. They are copied into buckets in that
order, and a thread takes each full bucket to the other processes while the replica goes on.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from typing import Any

from ndistribute.collective.buckets import LeafSpec, pack
from ndistribute.device import Array, array_namespace
from ndistribute.errors import CollectiveTimeoutError

__all__ = ["EarlyReduction"]


class EarlyReduction:
    """Sum gradients over replicas as they come; used again at each step.

    Every replica adds all leaves, and makes no other collective before `finish` has returned.

    Args:
        reduce: sums a flat array over all replicas in place.
        courier: runs it, one bucket at a time.
        leaves: dtypes and sizes of what is summed, the same on all replicas.
        bucket_bytes: how many bytes travel together.
        timeout: how long `finish` waits, in seconds.

    >>> import numpy as np
    >>> from concurrent.futures import ThreadPoolExecutor
    >>> leaves = [LeafSpec(np.dtype(float), 2), LeafSpec(np.dtype(float), 3)]
    >>> with ThreadPoolExecutor(1) as courier:
    ...     early = EarlyReduction(lambda flat: None, courier, leaves, 64, timeout=5.0)
    ...     early.begin()
    ...     early.add(1, np.ones(3))
    ...     early.add(0, np.zeros(2))
    ...     [total.tolist() for total in early.finish()]
    [[0.0, 0.0], [1.0, 1.0, 1.0]]
    """

    def __init__(
        self,
        reduce: Callable[[Array], None],
        courier: Executor,
        leaves: Sequence[LeafSpec],
        bucket_bytes: int,
        timeout: float,
    ) -> None:
        self._reduce = reduce
        self._courier = courier
        self._timeout = timeout
        self._layout = pack(leaves, bucket_bytes)
        self._leaves_in = [0] * len(self._layout.buckets)
        for slot in self._layout.slots:
            self._leaves_in[slot.bucket] += 1
        self._buckets: list[Array] = []
        self._under_way: list[Future[None]] = []
        self._missing: list[int] = []

    def begin(self) -> None:
        """Start a step; one that failed half-way is waited for and forgotten."""
        wait(self._under_way, timeout=self._timeout)
        self._under_way.clear()
        self._missing = list(self._leaves_in)

    def add(self, leaf: int, gradient: Array) -> None:
        """Take a gradient that is final; it may be changed afterwards."""
        slot = self._layout.slots[leaf]
        if not self._buckets:
            xp = array_namespace(gradient)
            self._buckets = [xp.zeros(spec.size, spec.dtype) for spec in self._layout.buckets]
        self._buckets[slot.bucket][slot.start : slot.stop] = gradient.reshape(-1)
        self._missing[slot.bucket] -= 1
        # Buckets leave in their order, for all replicas must send the same one at a time.
        while (nth := len(self._under_way)) < len(self._missing) and not self._missing[nth]:
            run: Any = contextvars.copy_context().run  # The caller's np.errstate goes along.
            self._under_way.append(self._courier.submit(run, self._reduce, self._buckets[nth]))

    def finish(self) -> list[Array]:
        """Return the sums, flat and in the order of the leaves; they stay until the next `add`.

        Raises:
            DistributeError: a collective failed, or took too long.
        """
        wait(self._under_way, timeout=self._timeout)
        for bucket in self._under_way:
            if not bucket.done():
                raise CollectiveTimeoutError(
                    f"the gradients of a step were not summed within {self._timeout:g} s.",
                    op="all_reduce",
                )
            bucket.result(timeout=0)
        return [self._buckets[slot.bucket][slot.start : slot.stop] for slot in self._layout.slots]
