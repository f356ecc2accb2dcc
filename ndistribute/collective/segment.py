"""The shared memory of the processes of one host: a page of counters and a bucket for each.

All processes map one anonymous file. It has no name, so no process has to delete it: the kernel
frees it when the last process has ended, however it ends. A bucket can hold as many bytes as the
host's memory, but uses memory only where it was written. So it never has to be mapped again.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import json
import math
import mmap
import os
import platform
import resource
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ndistribute.blas import cores
from ndistribute.collective.backend import Call
from ndistribute.collective.control_plane import ControlPlane, WaitMonitor
from ndistribute.collective.headers import HEADER_BYTES, compare_headers, encode_header
from ndistribute.devices import Array
from ndistribute.errors import DistributeError
from ndistribute.ownership import COUNTS_INCLUDE_VIEWS, ArrayOwner
from ndistribute.timeline import span
from ndistribute.transport.buffers import ALIGNMENT, make_file, padded
from ndistribute.transport.failure_detector import not_for_forks

# The page of each process: its counter, and the headers of its last two calls. The first page also
# contains a futex, and the value that the counters must reach before the processes that sleep there
# are woken.
_PAGE = 64 * 1024  # A multiple of all page sizes.
_COUNTER, _FUTEX, _AWAITED, _HEADERS = 0, 64, 72, 128
_NONCE_BYTES = 16  # The futex is at the place of the first header.
_START_SECONDS = 60.0

# Spins of about 40 ns each: the time in which a process with equal work arrives.
_LOOKS = 1000
# For this long, a waiting process yields its core but does not sleep: waking up costs 60 to 100 us,
# which is long for a small call.
_YIELD_SECONDS = 300e-6
_CHECK_SECONDS = 0.05

_ORDERED = {"x86_64", "amd64", "i386", "i686"}

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, missing in the module mmap.

# Linux's futex wakes sleeping processes: the locks of Python and of the C library either do not
# work between processes, or fail if their owner dies. If the number of the system call is unknown,
# a process wakes up regularly instead.
_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_NUMBER = _NUMBERS.get(platform.machine()) if sys.maxsize > 1 << 32 else None
_WAIT, _WAKE, _ALL = 0, 1, (1 << 31) - 1
_SLEEP_SECONDS = 1e-3  # Seconds between wake-ups if no process can wake this one.

_call = ctypes.CDLL(None).syscall
_word, _time = ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(ctypes.c_long * 2)
_call.argtypes = [ctypes.c_long, _word, ctypes.c_int, ctypes.c_uint32, _time]
_call.restype = ctypes.c_long


class Segment:
    """The shared memory and the barrier of the processes of this host.

    All processes make the same calls, and in each call `begin`, `arrive` and `wait` equally often.
    After `wait`, a process sees all data that the others wrote before they called `arrive`. `ranks`
    has the ranks of this host's processes; the attribute `rank` is the index of this process there.
    `allocate` does not use the first `head` bytes of a bucket.

    Raises:
        DistributeError: the memory cannot be created or mapped.
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
        self._slots: dict[int, list[ArrayOwner]] = {}  # The arrays that `allocate` made, by length.
        self._start = _address(self._buckets[self.rank])
        pages = [memoryview(self._memory)[rank * _PAGE :][:_PAGE] for rank in range(size)]
        self._counters = [page[_COUNTER : _COUNTER + 8].cast("Q") for page in pages]
        starts = _HEADERS, _HEADERS + HEADER_BYTES
        self._headers = [[page[at : at + HEADER_BYTES] for page in pages] for at in starts]
        self._arrived = self._calls = 0
        self._header: bytes | None = None
        # With fewer cores than processes, spinning would take the core of another process.
        self._looks = _LOOKS if size <= cores() else 0
        self._futex: Any = Futex(self._memory, _FUTEX)
        peers.wake = self._futex.wake
        self._awaited: Any = pages[0][_AWAITED : _AWAITED + 8].cast("Q")
        self._order = _make_fence()
        # These processors show stores to others in order, so data comes before the counter.
        self._fence = None if platform.machine().lower() in _ORDERED else self._order
        not_for_forks.add(self)
        self.view = functools.lru_cache(maxsize=4096)(self._view)

    def begin(self, call: Call) -> None:
        """Start a call, or raise if the group is broken; the next `wait` compares the calls."""
        self._peers.check()
        self._calls += 1
        self._header = encode_header(call, self._calls, self._peers.where.position)
        self._headers[self._calls & 1][self.rank][:] = self._header

    def arrive(self) -> None:
        """Increment the counter, which makes the written data visible to the others."""
        self._arrived += 1
        if self._fence:
            self._fence()
        self._counters[self.rank][0] = self._arrived
        if self._awaited[0] == self._arrived:
            self._wake_all()

    def wait(self, call: Call) -> None:
        """Wait until the counters of all processes have reached the counter of this one.

        Raises:
            CollectiveMismatchError: another process makes a different call.
        """
        looks, arrived = self._looks, self._arrived
        for counter in self._counters:
            while counter[0] < arrived:
                looks -= 1
                if looks < 0:
                    with span("wait", call.title):
                        self._wait_long(call)
        if self._fence:
            self._fence()
        if self._header is not None:
            for rank, header in enumerate(self._headers[self._calls & 1]):
                theirs = header.tobytes()  # Comparing views is slower.
                if theirs != self._header:
                    compare_headers(self._header, theirs, self._ranks[self.rank], self._ranks[rank])
            self._header = None

    def _wait_long(self, call: Call) -> None:
        def missing() -> list[int]:
            pairs = zip(self._ranks, self._counters, strict=True)
            return [rank for rank, counter in pairs if counter[0] < self._arrived]

        patience = WaitMonitor(self._peers, call)
        start = checked = time.monotonic()
        while not self._is_complete():
            count = self._futex.count
            now = time.monotonic()
            if now - checked >= _CHECK_SECONDS or self._peers.has_failure:
                checked = now
                patience.check(missing)
            if self._looks and now - start < _YIELD_SECONDS:
                os.sched_yield()
                continue
            self._awaited[0] = self._arrived
            if not self._wake_all():
                self._futex.sleep(count, _CHECK_SECONDS)

    def _wake_all(self) -> bool:
        """Return True if all processes have arrived, and wake those that sleep."""
        # If two processes each write and then read, at least one sees what the other wrote.
        self._order()
        if complete := self._is_complete():
            self._awaited[0] = 0
            self._futex.wake()
        return complete

    def _is_complete(self) -> bool:
        arrived = self._arrived
        return all(counter[0] >= arrived for counter in self._counters)

    def _view(self, rank: int, start: int, dtype: np.dtype[Any], size: int) -> Array:
        """Return an array in the bucket of a process."""
        if dtype.hasobject:
            raise TypeError("Python objects cannot be shared between processes.")
        return self._buckets[rank, start : start + size * dtype.itemsize].view(dtype)

    def allocate(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array | None:
        """Return an array in this process's bucket, or None if the bucket is full.

        The memory is reused when no reference to the array or to a view of it is left.
        """
        used = math.prod(shape) * dtype.itemsize
        nbytes = padded(max(used, 1))
        # Slots are never freed, so there are few lengths: four per power of two.
        nbytes += -nbytes % max(ALIGNMENT, 1 << (nbytes.bit_length() - 3))
        slots = self._slots.setdefault(nbytes, [])
        slot = next((slot for slot in slots if not slot.is_shared()), None)
        if slot is None:
            start = self._free - nbytes
            if start < self._head or not COUNTS_INCLUDE_VIEWS or not self._populate(start):
                return None
            # This is a view of memory, not of an array, because views of views refer to the first
            # array.
            memory = self._buckets[self.rank, start : self._free].data
            slot = ArrayOwner(np.frombuffer(memory, np.uint8))
            slots.append(slot)
            self._free = start
        return slot.array[:used].view(dtype).reshape(shape)

    def _populate(self, start: int) -> bool:
        """Allocate the pages now, because a lack of memory later would kill the process."""
        first, stop = start // _PAGE * _PAGE, -(-self._free // _PAGE) * _PAGE
        base = self.size * _PAGE + self.rank * self._buckets.shape[1]
        try:
            self._memory.madvise(_POPULATE_WRITE, base + first, stop - first)
        except OSError as error:
            return error.errno == errno.EINVAL  # Linux before 5.14 lacks it.
        return True

    def place_of(self, array: Array) -> int | None:
        """Return the offset in the bucket of an array from `allocate`, or None for other arrays."""
        place = _address(array) - self._start
        return place if 0 <= place < self._buckets.shape[1] else None

    def reset(self) -> None:
        """Start over; all processes call this while none of them is in a call."""
        self._arrived = self._calls = 0
        self._header = None
        self._counters[self.rank][0] = 0

    def let_go(self) -> None:
        """Allocate no more arrays, because a fork would use the memory of its parent."""
        self._free = 0
        self._slots.clear()

    def close(self) -> None:
        """Unmap the memory when no references to it are left."""
        self.let_go()
        self.view.cache_clear()
        self._peers.wake = None
        self._memory = self._futex = self._awaited = None
        self._buckets = np.empty((self.size, 0), np.uint8)
        self._counters, self._headers = [], []


class Futex:
    """A count of wake-ups, at an offset in shared memory.

    A process sleeps until another one changes the count.
    """

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._count = ctypes.c_uint32.from_buffer(memory, offset)

    @property
    def count(self) -> int:
        return self._count.value

    def sleep(self, count: int, seconds: float) -> None:
        """Sleep for less than a second until a wake-up, unless the count has changed already."""
        if _NUMBER is None:
            time.sleep(min(seconds, _SLEEP_SECONDS))
            return
        left = (ctypes.c_long * 2)(0, int(seconds * 1e9))
        _call(_NUMBER, self._count, _WAIT, count, left)

    def wake(self) -> None:
        """Wake all processes that sleep."""
        # Several processes may change it at once: any other number is good enough.
        self._count.value += 1
        if _NUMBER is not None:
            _call(_NUMBER, self._count, _WAKE, _ALL, None)


def _shared_memory(peers: ControlPlane, ranks: Sequence[int], head: int) -> mmap.mmap:
    """Map the file of this host, which its first process creates."""
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
            what = f"worker {peers.rank} needs {head} bytes of shared memory, and gets {bucket}:"
            share = f"the {len(ranks)} workers of a host share its memory, or half of what"
            raise DistributeError(f"{what} {share} `ulimit -v` and `ulimit -f` allow.")
        memory = _map(cards[0], len(ranks) * (_PAGE + bucket), ranks[0], peers.rank)
        peers.exchange("mapped", b"", _START_SECONDS)  # The descriptor must stay open until here.
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
        what = f"the shared memory of the workers of this host cannot be created: {error}."
        how = "Pass CommunicationOptions(implementation='ring'), which needs none."
        raise DistributeError(f"{what} {how}") from error


def _room() -> int:
    """Return the maximum number of bytes that all buckets of this host may use together."""
    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            room = min(room, limit // 2)
    return room


def _map(card: dict[str, Any], length: int, owner: int, reader: int) -> mmap.mmap:
    """Map the file of another process through its descriptor."""
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
        f"worker {reader} cannot map the shared memory of worker {owner} (pid {card['pid']}): "
        f"{reason}. Processes of one host must run as one user and see each other's processes. If "
        "they are in separate containers, give each its own NDISTRIBUTE_HOST_ID: they then talk "
        "over the network.",
        rank=owner,
    )


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def _make_fence() -> Callable[[], None]:
    """Return a memory fence: stores and loads before it come before those after it."""
    lock = threading.Lock()
    lock.acquire(blocking=False)

    def fence() -> None:
        # No load or store moves across a release that is followed by an acquire.
        lock.release()
        lock.acquire(blocking=False)

    return fence
