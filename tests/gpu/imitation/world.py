"""Imitated devices, streams and memory: which device is current, and who may touch what when.

Every operation is given to the current stream and done at once, on the host. What a GPU would do
later is kept by clocks: an operation is pending until somebody waits for its stream. Touching
memory beside a pending operation of another stream, of which one writes, is a `RaceError`, whether
or not the numbers would have come out right. Streams are non-blocking ones: the null stream waits
for nobody. NCCL's kernels alone run on threads, for they wait for other GPUs.
"""

import threading
import weakref
from typing import NamedTuple

import numpy as np


class RaceError(AssertionError):
    """Two streams use the same memory, and nothing orders them."""


class Clock:
    """Count what a stream was given, and what of it is known to be done."""

    def __init__(self, device, pointer):
        self.device, self.pointer = device, pointer
        self.given = self.done = 0
        self.kernel = None

    def __repr__(self):
        return f"stream {self.pointer} of gpu:{self.device}"

    def await_kernel(self):
        if self.kernel is not None:
            self.kernel.join(timeout=30.0)
            assert not self.kernel.is_alive(), f"{self} hangs: a kernel waits for another GPU"


class _Access(NamedTuple):
    clock: Clock
    number: int
    low: int
    high: int
    writes: bool


class Memory:
    """One allocation: its device, and the pending operations on it."""

    def __init__(self, device):
        self.device = device
        self._accesses = []

    def touch(self, clock, host, writes):
        """Note an operation that was just given to a stream; raise if another has work there."""
        low, high = np.lib.array_utils.byte_bounds(host)
        kept = []
        for old in self._accesses:
            pending = old.number > old.clock.done
            beside = pending and old.clock is not clock and old.low < high and low < old.high
            if beside and (writes or old.writes):
                verbs = ["read", "write"]
                raise RaceError(
                    f"{clock} {verbs[writes]}s what {old.clock} was given to "
                    f"{verbs[old.writes]}, and nobody waited for that."
                )
            again = (old.clock, old.low, old.high) == (clock, low, high) and writes >= old.writes
            if pending and not again:
                kept.append(old)
        self._accesses = [*kept, _Access(clock, clock.given, low, high, writes)]


class Pinned(bytearray):
    """Page-locked memory of the host, from which a GPU copies when it gets to it."""

    def lend(self):
        """Note that the current stream was given a copy from here, or to here."""
        world = current_world()
        weakref.finalize(self, _check_copied, world, world.clock, world.clock.given)


def _check_copied(world, clock, number):
    if clock.done < number:
        world.faults.append(f"pinned memory was given back before {clock} had copied it")


class World:
    """The `count` GPUs of a test, and which of them each thread uses."""

    def __init__(self, count):
        self.count = count
        self.faults = []  # found where nothing can be raised
        self._lock = threading.RLock()
        self._local = threading.local()
        self._null = [Clock(device, 0) for device in range(count)]
        self._clocks = list(self._null)

    @property
    def device(self):
        """Return this thread's current device: the first, until it says otherwise."""
        return getattr(self._local, "device", 0)

    @device.setter
    def device(self, index):
        if not 0 <= index < self.count:
            raise ValueError(f"cudaErrorInvalidDevice: invalid device ordinal {index}")
        self._local.device = index

    def stack(self, device):
        """Return this thread's current streams of a device, innermost last."""
        stacks = self._local.__dict__.setdefault("stacks", {})
        return stacks.setdefault(device, [self._null[device]])

    @property
    def clock(self):
        """Return the current stream of the current device."""
        return self.stack(self.device)[-1]

    def new_clock(self):
        with self._lock:
            self._clocks.append(Clock(self.device, len(self._clocks)))
            return self._clocks[-1]

    def launch(self, reads, writes, *, between=False):
        """Give an operation on arrays to the current stream; `between` devices, or on this one."""
        with self._lock:
            clock = self.clock
            clock.given += 1
            for arrays, writing in ((reads, False), (writes, True)):
                for array in arrays:
                    if array.memory.device != self.device and not between:
                        raise ValueError(
                            f"The device where the array resides ({array.memory.device}) is "
                            f"different from the current device ({self.device}). Peer access is "
                            "unavailable between these devices."
                        )
                    if array.host.size:
                        array.memory.touch(clock, array.host, writing)

    def run_kernel(self, pointer, kernel):
        """Give a stream a kernel that takes its time, as nothing else does."""
        clock = self._clocks[pointer]
        clock.await_kernel()
        clock.kernel = kernel
        kernel.daemon = True
        kernel.start()

    def query(self, pointer):
        """Return what ``cudaStreamQuery`` does: 0, or 600 where the stream is not done."""
        clock = self._clocks[pointer] if pointer else self.clock
        if clock.kernel is not None and clock.kernel.is_alive():
            return 600
        self.wait([clock])  # Whoever asks sees it done in the end.
        return 0

    def wait(self, clocks):
        """Let the host wait for streams."""
        for clock in clocks:
            clock.await_kernel()
        with self._lock:
            for clock in clocks:
                clock.done = clock.given

    def wait_for_device(self, device):
        self.wait([clock for clock in self._clocks if clock.device == device])


_worlds = []


def current_world():
    """Return the GPUs of the test that runs."""
    return _worlds[-1]


def set_world(world):
    """Make GPUs appear, or disappear."""
    _worlds[:] = [] if world is None else [world]


class Device:
    """Play ``cupy.cuda.Device``."""

    def __init__(self, device=None):
        self.id = current_world().device if device is None else int(device)
        self.pci_bus_id = f"0000:{0x3B + self.id:02x}:00.0"
        self._before = []

    def synchronize(self):
        current_world().wait_for_device(self.id)

    def use(self):
        current_world().device = self.id

    def __enter__(self):
        self._before.append(current_world().device)
        self.use()
        return self

    def __exit__(self, *_):
        current_world().device = self._before.pop()

    def __eq__(self, other):
        return isinstance(other, Device) and other.id == self.id

    def __hash__(self):
        return hash(self.id)


class Stream:
    """Play ``cupy.cuda.Stream``; non-blocking ones and the null stream alone."""

    def __init__(self, null=False, non_blocking=False, ptds=False):
        assert null or non_blocking
        world = current_world()
        self._hold(world.stack(world.device)[0] if null else world.new_clock())

    def _hold(self, clock):
        self.clock, self.ptr, self.device_id = clock, clock.pointer, clock.device
        return self

    @classmethod
    def current(cls, device_id=-1):
        """Return this thread's stream, as ``cupy.cuda.get_current_stream`` does."""
        world = current_world()
        stack = world.stack(world.device if device_id < 0 else device_id)
        return cls.__new__(cls)._hold(stack[-1])

    def synchronize(self):
        current_world().wait([self.clock])

    def __enter__(self):
        world = current_world()
        if self.device_id != world.device:
            raise RuntimeError(
                f"The device that the stream is created on ({self.device_id}) does not match "
                f"with the current device ({world.device})"
            )
        world.stack(world.device).append(self.clock)
        return self

    def __exit__(self, *_):
        current_world().stack(self.device_id).pop()
