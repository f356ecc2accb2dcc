"""The memory that the processes of one host share: for each a page of counters, and a bucket.

It is one anonymous file, which all of them map. It has no name that could be left behind, and the
system frees it with the last process that maps it, however that process ends. A bucket is as large
as the host's memory allows but takes memory only where it was used, so nothing is ever mapped anew.
"""

from __future__ import annotations

import errno
import functools
import json
import math
import mmap
import os
import platform
import resource
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ndistribute.collective.backend import Call
from ndistribute.collective.header import HEADER_BYTES, compare, encode
from ndistribute.device import Array
from ndistribute.errors import DistributeError
from ndistribute.ownership import COUNTS_TELL, ArrayOwner
from ndistribute.timeline import span
from ndistribute.transport.failure_detector import not_for_forks
from ndistribute.transport.shared_memory import ALIGNMENT, make_file, padded

if TYPE_CHECKING:
    from ndistribute.collective.control import ControlPlane

__all__ = ["Segment"]

# In the page of each process: how far it has come; and what it says about its calls, in turn.
_PAGE = 64 * 1024  # Of memory, on any processor.
_COUNTER, _HEADERS = 0, 128
_NONCE_BYTES = 16  # They stand where the first header will.
_START_SECONDS = 60.0

# About 40 ns each in CPython: a while in which a process that does the same work will come.
_LOOKS = 1000
# Until then a process that waits stays on its core but lets others have it; a sleep, even of no
# length, costs 60 to 100 us, which is what a small call in a small step would feel.
_YIELD_SECONDS = 300e-6
_SLEEPS = (50e-6, 1e-3)
_CHECK_SECONDS = 1e-3

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, which the module mmap does not name.


class Segment:
    """Meet the other processes of this host, and see what they have put in their buckets.

    All processes make the same calls, and in each of them `begin`, `arrive` and `wait` equally
    often. What a process has written before it arrives, the others see once they have waited.

    Args:
        peers: all processes; each of them must make this at the same time, on whichever host.
        ranks: those that share this host, this one among them.
        head: how many bytes at the start of a bucket `allocate` leaves alone.

    Attributes:
        rank: this process's place in `ranks`.

    Raises:
        DistributeError: the memory can not be made, or not be reached.
    """

    def __init__(self, peers: ControlPlane, ranks: Sequence[int], head: int) -> None:
        self.rank = ranks.index(peers.rank)
        self.size = size = len(ranks)
        self._peers = peers
        self._ranks = ranks
        self._memory: Any = _shared_memory(peers, ranks, head)
        whole: Array = np.frombuffer(self._memory, np.uint8)
        self._buckets = whole[size * _PAGE :].reshape(size, -1)
        self._head, self._free = head, self._buckets.shape[1]
        self._slots: dict[int, list[ArrayOwner]] = {}  # What `allocate` has made, by length.
        self._start = _address(self._buckets[self.rank])
        pages = [memoryview(self._memory)[rank * _PAGE :][:_PAGE] for rank in range(size)]
        self._counters = [page[_COUNTER : _COUNTER + 8].cast("Q") for page in pages]
        self._headers = [
            [page[start : start + HEADER_BYTES] for page in pages]
            for start in (_HEADERS, _HEADERS + HEADER_BYTES)
        ]
        self._arrived = self._calls = 0
        self._header: bytes | None = None
        # With fewer cores than processes, whoever looks takes the core from whom it waits for.
        self._looks = _LOOKS if size <= len(os.sched_getaffinity(0)) else 0
        self._fence = _make_fence()
        not_for_forks.add(self)
        self.view = functools.lru_cache(maxsize=4096)(self._view)

    def begin(self, call: Call) -> None:
        """Start a call, if the group is whole: the next `wait` compares it with the others'."""
        self._peers.check()
        self._calls += 1
        self._header = encode(call, self._calls, self._peers.where.position)
        self._headers[self._calls & 1][self.rank][:] = self._header

    def arrive(self) -> None:
        """Tell the others that this process has come here, and show what it has written."""
        self._arrived += 1
        if self._fence:
            self._fence()
        self._counters[self.rank][0] = self._arrived

    def wait(self, call: Call, timeout: float) -> None:
        """Wait until all others have come to where this process has arrived.

        Raises:
            CollectiveMismatchError: another process makes another call.
        """
        looks, arrived = self._looks, self._arrived
        for counter in self._counters:
            while counter[0] < arrived:
                looks -= 1
                if looks < 0:
                    with span("wait", call.title):
                        self._wait_long(arrived, call, timeout)
        if self._fence:
            self._fence()
        if self._header is not None:
            for rank, header in enumerate(self._headers[self._calls & 1]):
                if header != self._header:
                    own, other = self._ranks[self.rank], self._ranks[rank]
                    compare(self._header, header.tobytes(), own, other)
            self._header = None

    def _wait_long(self, arrived: int, call: Call, timeout: float) -> None:
        def missing() -> list[int]:
            pairs = zip(self._ranks, self._counters, strict=True)
            return [rank for rank, counter in pairs if counter[0] < arrived]

        patience = self._peers.patience(call, timeout)
        start = checked = time.monotonic()
        while missing():
            now = time.monotonic()
            if now - checked >= _CHECK_SECONDS:
                checked = now
                patience.check(missing)
            if now - start < _YIELD_SECONDS:
                os.sched_yield()
            else:
                # In proportion, so that waking late never adds much to the wait.
                shortest, longest = _SLEEPS
                time.sleep(min(max(shortest, (now - start) / 20), longest))

    def _view(self, rank: int, start: int, dtype: np.dtype[Any], size: int) -> Array:
        """Return an array in the bucket of one process."""
        if dtype.hasobject:
            raise TypeError("Python objects can not be shared between processes.")
        return self._buckets[rank, start : start + size * dtype.itemsize].view(dtype)

    def allocate(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array | None:
        """Return an array in this process's own bucket, or None if nothing is left of that.

        Its memory is used again once nobody holds the array, or a view of it.
        """
        used = math.prod(shape) * dtype.itemsize
        nbytes = padded(max(used, 1))
        # They are kept for ever, so they have few lengths: four to the double.
        nbytes += -nbytes % max(ALIGNMENT, 1 << (nbytes.bit_length() - 3))
        slots = self._slots.setdefault(nbytes, [])
        slot = next((slot for slot in slots if not slot.is_shared()), None)
        if slot is None:
            start = self._free - nbytes
            if start < self._head or not COUNTS_TELL or not self._populate(start):
                return None
            # A view of memory, and not of another array, which would be what views of it hold.
            memory = self._buckets[self.rank, start : self._free].data
            slot = ArrayOwner(np.frombuffer(memory, np.uint8))
            slots.append(slot)
            self._free = start
        return slot.array[:used].view(dtype).reshape(shape)

    def _populate(self, start: int) -> bool:
        """Take the memory from there on now: where it is lacking later, the system would kill."""
        first, stop = start // _PAGE * _PAGE, -(-self._free // _PAGE) * _PAGE
        base = self.size * _PAGE + self.rank * self._buckets.shape[1]
        try:
            self._memory.madvise(_POPULATE_WRITE, base + first, stop - first)
        except OSError as error:
            return error.errno == errno.EINVAL  # Linux before 5.14 does not know it.
        return True

    def place_of(self, array: Array) -> int | None:
        """Return where an array of `allocate` begins in the bucket; None for any other."""
        place = _address(array) - self._start
        return place if 0 <= place < self._buckets.shape[1] else None

    def reset(self) -> None:
        """Start over; run by every process when none of them is inside a call."""
        self._arrived = self._calls = 0
        self._header = None
        self._counters[self.rank][0] = 0

    def let_go(self) -> None:
        """Lend no memory any more: a fork would lend what its parent lends."""
        self._free = 0
        self._slots.clear()

    def close(self) -> None:
        """Give the memory back, as soon as nobody looks at it any more."""
        self.let_go()
        self.view.cache_clear()
        self._memory = None
        self._buckets = np.empty((self.size, 0), np.uint8)
        self._counters, self._headers = [], []


def _shared_memory(peers: ControlPlane, ranks: Sequence[int], head: int) -> mmap.mmap:
    """Map the file of this host, which the first of its processes makes.

    Raises:
        DistributeError: that is not possible.
    """
    room, made = _room(), -1
    card: dict[str, Any] = {"room": room}
    try:
        if peers.rank == ranks[0]:
            made = _make(len(ranks) * _PAGE + room)
            nonce = secrets.token_bytes(_NONCE_BYTES)
            os.pwrite(made, nonce, _HEADERS)
            card |= {"pid": os.getpid(), "fd": made, "nonce": nonce.hex()}
        blobs = peers.exchange("segment", json.dumps(card).encode(), _START_SECONDS)
        cards = [json.loads(blobs[rank]) for rank in ranks]
        bucket = min(card["room"] for card in cards) // len(ranks) // _PAGE * _PAGE
        if bucket < head:
            raise DistributeError(
                f"worker {peers.rank} needs {head} bytes of shared memory, and has {bucket}: the "
                f"{len(ranks)} workers of a host share its memory, or half of what `ulimit -v` "
                "and `ulimit -f` allow."
            )
        memory = _map(cards[0], len(ranks) * (_PAGE + bucket), ranks[0], peers.rank)
        peers.exchange("mapped", b"", _START_SECONDS)  # Until then the descriptor is needed.
        return memory
    except BaseException as error:
        peers.abort(error)
        raise
    finally:
        if made >= 0:
            os.close(made)


def _make(nbytes: int) -> int:
    try:
        return make_file(nbytes, take=False)
    except OSError as error:
        raise DistributeError(
            f"the memory that the workers of this host share can not be made: {error}. "
            "CommunicationOptions(implementation='ring') needs none."
        ) from error


def _room() -> int:
    """Return how much memory all buckets of this host may be allowed to take together."""
    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            room = min(room, limit // 2)
    return room


def _map(card: dict[str, Any], length: int, owner: int, reader: int) -> mmap.mmap:
    """Map the file that a process has made, by way of its descriptor."""
    path = f"/proc/{card['pid']}/fd/{card['fd']}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(fd, length)
        finally:
            os.close(fd)
        if memory[_HEADERS : _HEADERS + _NONCE_BYTES].hex() == card["nonce"]:
            return memory
        reason = f"{path} is not what it shared"
    except (OSError, ValueError) as error:
        reason = str(error)
    raise DistributeError(
        f"worker {reader} can not map the shared memory of worker {owner} (pid {card['pid']}): "
        f"{reason}. Processes of one host must run as one user and see each other's processes. If "
        "they are in separate containers, give each its own NDISTRIBUTE_HOST_ID: they then talk "
        "over the network.",
        rank=owner,
    )


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


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
