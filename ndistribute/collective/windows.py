"""How processes of one host hand each other data: numbered steps, two windows, and counters.

In each step a process puts something in a window of its own, says so, and waits until all others
have done the same with theirs. Steps use the windows in turn, which saves a second meeting: whoever
has come to a step has read what it needs of the step before, so that window is free again.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ndistribute.collective.backend import Call
from ndistribute.collective.chunks import Chunk
from ndistribute.collective.header import compare, encode
from ndistribute.collective.segment import share_segments
from ndistribute.collective.spin import Spin
from ndistribute.device import Array

if TYPE_CHECKING:
    from ndistribute.collective.control import ControlPlane

__all__ = ["WINDOW_BYTES", "Windows"]

# As large as a core's second-level cache. Measured with 2 processes: 2 to 20 % faster from 1 MiB
# to 64 MiB than with half of it, which is 20 to 40 % faster than an eighth.
WINDOW_BYTES = 1024 * 1024
_START_SECONDS = 60.0
_SHOWN = 2  # Behind the two windows that are filled lie the two in which results are shown.


class Windows:
    """Exchange chunks with the other processes of this host.

    Args:
        peers: all processes.
        ranks: those that share this host.

    Attributes:
        rank: this process's place in `ranks`.
        others: the places of all others.
        step: the number of the last step, over all calls.
    """

    def __init__(self, peers: ControlPlane, ranks: Sequence[int]) -> None:
        self.rank = ranks.index(peers.rank)
        self.others = [rank for rank in range(len(ranks)) if rank != self.rank]
        self.step = 0
        self._count = 0
        self._ranks = ranks
        self._segments = share_segments(peers, ranks, WINDOW_BYTES, _START_SECONDS, windows=4)
        self._own = self._segments[self.rank]
        self._filled = [segment.filled for segment in self._segments]
        self._shown = [segment.reduced for segment in self._segments]
        self._spin = Spin(peers, ranks)
        self._where = peers.where
        self._fence = _make_fence()

    def begin(self, call: Call) -> bytes:
        """Count a call, and return the header that goes with its first step."""
        self._count += 1
        return encode(call, self._count, self._where.position)

    def views(self, step: int, dtype: np.dtype[Any], offset: int, count: int) -> list[Array]:
        """Return the same elements of everybody's window, in the order of ranks."""
        return [segment.view(step & 1, dtype, offset, count) for segment in self._segments]

    def fill(self, step: int, chunk: Chunk, leaves: Sequence[Array]) -> None:
        """Put pieces of leaves in the window of a step."""
        own = self._own
        for leaf, dtype, start, stop, offset in chunk:
            own.view(step & 1, dtype, offset, stop - start)[...] = leaves[leaf][start:stop]

    def publish(self, step: int, header: bytes | None) -> None:
        """Tell the others that this process has filled its window."""
        own = self._own
        if header:
            own.headers[step & 1][:] = header
        if self._fence:
            self._fence()
        own.filled[0] = step

    def meet(self, step: int, header: bytes | None, call: Call, timeout: float) -> None:
        """Wait until all have filled their windows, and see that all make the same call.

        Raises:
            CollectiveMismatchError: they do not.
        """
        self._spin.until(self._filled, step, call, timeout)
        if self._fence:
            self._fence()
        if header:
            for rank in self.others:
                theirs = self._segments[rank].headers[step & 1].tobytes()
                if theirs != header:
                    compare(header, theirs, self._ranks[self.rank], self._ranks[rank])

    def drain(self, step: int, rank: int, chunk: Chunk, leaves: Sequence[Array]) -> None:
        """Copy pieces out of what a process has filled its window with."""
        self._copy(step & 1, rank, chunk, leaves)

    def name_arena(self, number: int) -> None:
        """Say in which arena this process's data lies, before the step is published."""
        self._own.arena[0] = number

    def arenas_named(self) -> set[int]:
        """Return what all have named, when they have met."""
        return {segment.arena[0] for segment in self._segments}

    def stage(self, step: int, dtype: np.dtype[Any], offset: int, count: int) -> Array:
        """Return where a result is to be put before it is shown.

        It is free when all have met in this step: nobody reads there what was shown two steps ago.
        """
        return self._own.view(_SHOWN + (step & 1), dtype, offset, count)

    def show(self, step: int) -> None:
        """Tell the others that this process's results of a step are there."""
        if self._fence:
            self._fence()
        self._own.reduced[0] = step

    def await_shown(self, step: int, call: Call, timeout: float) -> None:
        """Wait until all show their results of a step."""
        self._spin.until(self._shown, step, call, timeout)
        if self._fence:
            self._fence()

    def drain_shown(self, step: int, rank: int, chunk: Chunk, leaves: Sequence[Array]) -> None:
        """Copy pieces out of what a process shows."""
        self._copy(_SHOWN + (step & 1), rank, chunk, leaves)

    def reset(self) -> None:
        """Start over; run by every process when none of them is inside a call."""
        self.step = self._count = 0
        self._own.filled[0] = self._own.reduced[0] = 0

    def close(self) -> None:
        """Give the memory back."""
        self._filled, self._shown = [], []
        for segment in self._segments:
            segment.close()
        self._segments = []

    def _copy(self, window: int, rank: int, chunk: Chunk, leaves: Sequence[Array]) -> None:
        segment = self._segments[rank]
        for leaf, dtype, start, stop, offset in chunk:
            leaves[leaf][start:stop] = segment.view(window, dtype, offset, stop - start)


def _make_fence() -> Callable[[], None] | None:
    """Return what keeps a counter from overtaking the data it stands for, where that is needed."""
    if platform.machine().lower() in {"x86_64", "amd64", "i386", "i686"}:
        return None  # They show stores to others in the order in which they were made.
    lock = threading.Lock()
    lock.acquire(blocking=False)

    def fence() -> None:
        # Neither loads nor stores pass a release that is followed by an acquire.
        lock.release()
        lock.acquire(blocking=False)

    return fence
