"""Imitated devices, streams and memory: which device is current, and who may touch what when.

Every operation of the imitation is given to the current stream and done at once, on the host. What
a GPU would do later is kept by clocks: an operation is pending until somebody waits for its stream.
Touching memory beside a pending operation of another stream, of which one writes, is a `RaceError`,
whether or not the numbers would have come out right. Streams are non-blocking ones: the null
stream waits for nobody. NCCL's kernels alone run on threads, for they wait for other GPUs.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Clock", "Memory", "Pinned", "RaceError", "World", "current_world", "set_world"]


class RaceError(AssertionError):
    """Two streams use the same memory, and nothing orders them."""


class Clock:
    """Count what a stream was given, and what of it is known to be done."""

    def __init__(self, device: int, pointer: int) -> None:
        self.device = device
        self.pointer = pointer
        self.given = 0
        self.done = 0
        self.kernel: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"stream {self.pointer} of gpu:{self.device}"


@dataclass(frozen=True, slots=True)
class _Access:
    clock: Clock
    number: int
    low: int
    high: int
    writes: bool

    def pending_for(self, clock: Clock) -> bool:
        return self.clock is not clock and self.number > self.clock.done


class Memory:
    """One allocation: its device, and the pending operations on it."""

    def __init__(self, device: int) -> None:
        self.device = device
        self._accesses: list[_Access] = []

    def touch(self, clock: Clock, host: np.ndarray[Any, Any], writes: bool) -> None:
        """Note an operation that was just given to a stream.

        Raises:
            RaceError: another stream has work pending there.
        """
        low, high = np.lib.array_utils.byte_bounds(host)
        new = _Access(clock, clock.given, low, high, writes)
        kept = []
        for old in self._accesses:
            overlaps = old.low < high and low < old.high
            if overlaps and (writes or old.writes) and old.pending_for(clock):
                verbs = ["read", "write"]
                raise RaceError(
                    f"{clock} {verbs[writes]}s what {old.clock} was given to "
                    f"{verbs[old.writes]}, and nobody waited for that."
                )
            again = (old.clock, old.low, old.high) == (clock, low, high) and writes >= old.writes
            if old.number > old.clock.done and not again:
                kept.append(old)
        self._accesses = [*kept, new]


class Pinned(bytearray):
    """Page-locked memory of the host, from which a GPU copies when it gets to it."""

    def lend(self, world: World) -> None:
        """Note that the current stream was given a copy from here, or to here."""
        clock = world.clock
        weakref.finalize(self, _check_copied, world, clock, clock.given)


def _check_copied(world: World, clock: Clock, number: int) -> None:
    if clock.done < number:
        world.faults.append(f"pinned memory was given back before {clock} had copied it")


class World:
    """The GPUs of a test, and which of them each thread uses.

    Args:
        count: how many GPUs there are.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.faults: list[str] = []  # found where nothing can be raised
        self._lock = threading.RLock()
        self._local = threading.local()
        self._null = [Clock(device, 0) for device in range(count)]
        self._clocks = list(self._null)

    @property
    def device(self) -> int:
        """Return this thread's current device: the first, until it says otherwise."""
        return getattr(self._local, "device", 0)

    @device.setter
    def device(self, index: int) -> None:
        if not 0 <= index < self.count:
            raise ValueError(f"cudaErrorInvalidDevice: invalid device ordinal {index}")
        self._local.device = index

    def stack(self, device: int) -> list[Clock]:
        """Return this thread's current streams of a device, innermost last."""
        stacks: dict[int, list[Clock]] = self._local.__dict__.setdefault("stacks", {})
        return stacks.setdefault(device, [self._null[device]])

    @property
    def clock(self) -> Clock:
        """Return the current stream of the current device."""
        return self.stack(self.device)[-1]

    def new_clock(self) -> Clock:
        """Return the clock of a new stream on the current device."""
        with self._lock:
            self._clocks.append(Clock(self.device, len(self._clocks)))
            return self._clocks[-1]

    def launch(self, reads: Iterable[Any], writes: Iterable[Any], *, between: bool = False) -> None:
        """Give an operation to the current stream.

        Args:
            reads: the arrays that it reads.
            writes: those that it writes.
            between: whether it copies between devices, so that arrays may lie anywhere.

        Raises:
            ValueError: an array is on another device than the current one.
            RaceError: another stream has work pending in the same memory.
        """
        used = [(array, False) for array in reads] + [(array, True) for array in writes]
        with self._lock:
            clock = self.clock
            clock.given += 1
            for array, writing in used:
                memory = array.memory
                if memory.device != self.device and not between:
                    raise ValueError(
                        f"The device where the array resides ({memory.device}) is different from "
                        f"the current device ({self.device}). Peer access is unavailable between "
                        "these devices."
                    )
                if array.host.size:
                    memory.touch(clock, array.host, writing)

    def run_kernel(self, pointer: int, kernel: threading.Thread) -> None:
        """Give a stream a kernel that takes its time, as nothing else does."""
        clock = self._clocks[pointer]
        _await_kernel(clock)
        clock.kernel = kernel
        kernel.daemon = True
        kernel.start()

    def query(self, pointer: int) -> int:
        """Return what ``cudaStreamQuery`` does: 0, or 600 where the stream is not done."""
        clock = self._clocks[pointer] if pointer else self.clock
        if clock.kernel is not None and clock.kernel.is_alive():
            return 600
        self.wait([clock])  # Whoever asks sees it done in the end.
        return 0

    def wait(self, clocks: Sequence[Clock]) -> None:
        """Let the host wait for streams."""
        for clock in clocks:
            _await_kernel(clock)
        with self._lock:
            for clock in clocks:
                clock.done = clock.given

    def wait_for_device(self, device: int) -> None:
        """Let the host wait for all streams of a device."""
        self.wait([clock for clock in self._clocks if clock.device == device])


def _await_kernel(clock: Clock) -> None:
    if clock.kernel is not None:
        clock.kernel.join(timeout=30.0)
        if clock.kernel.is_alive():
            raise AssertionError(f"{clock} hangs: a kernel waits for another GPU")


_worlds: list[World] = []


def current_world() -> World:
    """Return the GPUs of the test that runs."""
    return _worlds[-1]


def set_world(world: World | None) -> None:
    """Make GPUs appear, or disappear."""
    _worlds[:] = [] if world is None else [world]
