"""The memory that a process shows to the others of its host: a page of counters, and windows.

It is an anonymous file: it has no name that could be left behind, and the system frees it with the
last process that maps it, however that process ends. Its size never changes.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ndistribute.collective.header import HEADER_BYTES
from ndistribute.device import Array
from ndistribute.errors import DistributeError

if TYPE_CHECKING:
    from ndistribute.collective.control import ControlPlane

__all__ = ["Segment", "share_segments"]

# Each stands on a cache line of its own, so that who waits for one is not disturbed by another.
_NONCE, _FILLED, _REDUCED, _ARENA, _HEADERS, _WINDOWS = 0, 128, 256, 320, 384, 4096
_NONCE_BYTES = 16


class Segment:
    """Map the memory of one process: its own, or another's.

    Args:
        fd: the file; it may be closed afterwards.
        window: how many bytes each of the windows has.
        windows: how many there are.

    Attributes:
        filled: ``filled[0]`` is the number of the last chunk that the process has put in a window.
        reduced: ``reduced[0]`` is the number of the last chunk whose part it has reduced.
        arena: ``arena[0]`` is the number of the arena in which its data lies, or 0.
        headers: what the process says about a call that starts in the one or other window.
        windows: the bytes of the windows.
    """

    def __init__(self, fd: int, window: int, windows: int) -> None:
        memory = memoryview(mmap.mmap(fd, size_of(window, windows)))
        self.nonce = memory[_NONCE : _NONCE + _NONCE_BYTES]
        self.filled = memory[_FILLED : _FILLED + 8].cast("Q")
        self.reduced = memory[_REDUCED : _REDUCED + 8].cast("Q")
        self.arena = memory[_ARENA : _ARENA + 8].cast("Q")
        self.headers = [
            memory[start : start + HEADER_BYTES] for start in (_HEADERS, _HEADERS + HEADER_BYTES)
        ]
        self.windows = [
            np.frombuffer(memory, np.uint8, window, _WINDOWS + index * window)
            for index in range(windows)
        ]
        self._typed: dict[np.dtype[Any], list[Array]] = {}

    def view(self, index: int, dtype: np.dtype[Any], offset: int, count: int) -> Array:
        """Return elements of a window that start so many bytes behind its start."""
        if offset % dtype.itemsize:  # Text may have items of any length.
            return self.windows[index][offset : offset + count * dtype.itemsize].view(dtype)
        typed = self._typed.get(dtype)
        if typed is None:
            if dtype.hasobject:
                raise TypeError("Python objects can not be shared between processes.")
            whole = len(self.windows[0]) // dtype.itemsize * dtype.itemsize
            typed = self._typed[dtype] = [window[:whole].view(dtype) for window in self.windows]
        start = offset // dtype.itemsize
        return typed[index][start : start + count]

    def close(self) -> None:
        """Give the memory back, as soon as nobody looks at it any more."""
        del self.nonce, self.filled, self.reduced, self.arena, self.headers, self.windows
        self._typed.clear()


def size_of(window: int, windows: int) -> int:
    """Return how many bytes a segment has."""
    return _WINDOWS + windows * window


def share_segments(
    peers: ControlPlane, ranks: Sequence[int], window: int, timeout: float, windows: int
) -> list[Segment]:
    """Make this process's segment and map those of the others on its host.

    Args:
        peers: all processes; each of them must call this, on whichever host it is.
        ranks: those that share this host.
        window: how many bytes each window has.
        timeout: how long to wait for the others, in seconds.
        windows: how many there are.

    Returns:
        The segments in the order of `ranks`.

    Raises:
        DistributeError: another process's memory can not be reached.
    """
    fd = os.memfd_create("ndistribute", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size_of(window, windows))
        mine = Segment(fd, window, windows)
        mine.nonce[:] = nonce = secrets.token_bytes(_NONCE_BYTES)
        card = json.dumps({"pid": os.getpid(), "fd": fd, "nonce": nonce.hex(), "window": window})
        cards = peers.exchange("segment", card.encode(), timeout)
        segments = [
            mine
            if rank == peers.rank
            else _map(rank, peers.rank, json.loads(cards[rank]), window, windows)
            for rank in ranks
        ]
        peers.exchange("mapped", b"", timeout)  # Until then the others need the descriptor.
    except BaseException as error:
        peers.abort(error)
        raise
    finally:
        os.close(fd)
    return segments


def _map(rank: int, reader: int, card: dict[str, Any], window: int, windows: int) -> Segment:
    """Map the memory of another process, by way of its descriptor."""
    path = f"/proc/{card['pid']}/fd/{card['fd']}"
    reason = f"its windows have {card['window']} bytes, expected {window}"
    if card["window"] == window:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                segment = Segment(fd, window, windows)
            finally:
                os.close(fd)
            if segment.nonce.hex() == card["nonce"]:
                return segment
            reason = f"{path} is not what it shared"
        except (OSError, ValueError) as error:
            reason = str(error)
    raise DistributeError(
        f"worker {reader} can not map the shared memory of worker {rank} (pid {card['pid']}): "
        f"{reason}. Processes of one host must run as one user and see each other's processes. If "
        "they are in separate containers, give each its own NDISTRIBUTE_HOST_ID: they then talk "
        "over the network.",
        rank=rank,
    )
