"""Buffers that follow each other, seen as one long message, and cut without being joined."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import accumulate

from ndistribute.cluster.wire.tensors import Buffer

__all__ = ["Pieces", "nbytes_of"]


class Pieces:
    """See buffers that follow each other as one long one, without joining them.

    >>> pieces = Pieces([b"abc", b"", b"defg"])
    >>> len(pieces), b"".join(pieces.cut(2, 5))
    (7, b'cde')
    """

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._views = [memoryview(buffer).cast("B") for buffer in buffers]
        self._starts = list(accumulate((view.nbytes for view in self._views), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def cut(self, start: int, stop: int) -> list[memoryview]:
        """Return what lies from a place to another."""
        if start >= stop:
            return []
        found = []
        for index in range(bisect.bisect_right(self._starts, start) - 1, len(self._views)):
            begin = self._starts[index]
            if begin >= stop:
                break
            found.append(self._views[index][max(0, start - begin) : stop - begin])
        return found


def nbytes_of(buffer: Buffer) -> int:
    """Return how many bytes a buffer has.

    >>> nbytes_of(b"abc"), nbytes_of(memoryview(b"abcdefgh").cast("Q"))
    (3, 8)
    """
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)
