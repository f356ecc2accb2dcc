"""Replicas that are threads of one process: how they meet, and the backend among them.

All collectives among these replicas use `Rendezvous`. Replicas can read each other's arrays, so no
data is packed or sent. Each replica owns a slice: it adds that slice of all replicas' arrays in
replica order, and writes the sum to its destinations. The last replica to arrive reduces small
arrays alone, which saves the second meeting.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ndistribute.collective.backend import Arrays, Backend, Call, Combine, T, Update
from ndistribute.collective.cuts import blocks, owned_ranges
from ndistribute.collective.headers import check_calls
from ndistribute.collective.reduce_op import ReduceOp, reduce_arrays
from ndistribute.devices import Array, array_namespace, copy_to, device_of, is_device_array
from ndistribute.errors import CollectiveMismatchError, CollectiveTimeoutError, WorkerLostError
from ndistribute.mistakes import count_of
from ndistribute.stream import Stream, settle, write_to
from ndistribute.timeline import recorded

SLICE_SECONDS = 1.0  # The seconds of one slice of a wait.
# Up to this size, the last replica to arrive reduces alone. Measured on 2 cores with 2 replicas:
# the second meeting costs 100 to 150 us, in which one core reduces about as many bytes.
SMALL_BYTES = 1024 * 1024

# Blocks are larger than the cache requires, because each block is a NumPy call, which releases the
# interpreter lock and must acquire it again. Measured with 32 MiB and 2 replicas: 33 ms with blocks
# of 64 KiB, 17 ms with 128 KiB, 10 ms from 512 KiB on.
BLOCK_BYTES = 512 * 1024


class Meeting:
    """One rendezvous: the last replica to arrive combines the values while the others wait."""

    __slots__ = ("arrived", "calls", "done", "error", "last", "result", "values")

    def __init__(self, size: int) -> None:
        self.calls: list[Any] = [None] * size
        self.values: list[Any] = [None] * size  # In replica order.
        self.arrived = 0
        self.last: int | None = None  # The replica that combines the values.
        self.result: Any = None
        self.error: BaseException | None = None
        # Released when the meeting ends; each waiter acquires it and releases it again.
        self.done = threading.Lock()
        self.done.acquire()


class Rendezvous:
    """A reusable rendezvous of `size` threads, one per replica.

    If a replica returns, raises or arrives too late, the waits of the others raise at once.

    >>> alone = Rendezvous(1)
    >>> alone.exchange(0, Call(1, "merge_call"), 20, lambda values: values[0] + 1)
    21
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._mutex = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Clear the state of the last step; no thread may be in a call."""
        self._returned: tuple[int, int] | None = None
        self._cause: BaseException | None = None
        self._meeting: Meeting | None = None

    def refuse_in_fork(self, cause: BaseException) -> None:
        """Refuse meetings in a forked child, which has one thread; another may hold the lock."""
        self._mutex = threading.Lock()
        self.reset()
        self._cause = cause

    def exchange(self, rank: int, call: Call, value: Any, combine: Combine[T]) -> T:
        """Wait for all replicas, and return the combination of their values.

        The last replica to arrive calls `combine` once, with the values in replica order.

        Raises:
            CollectiveMismatchError: the calls differ, or another replica has returned.
            CollectiveTimeoutError: not all replicas arrived in time.
            WorkerLostError: another replica failed; its exception is the ``__cause__``.
        """
        meeting = self._join(rank, call, value)
        if meeting.last == rank:
            try:
                if meeting.calls.count(call) < self.size:
                    check_calls(meeting.calls)
                meeting.result = combine(meeting.values)
                self._end(meeting, None)
            except BaseException as error:
                self._end(meeting, error)
                raise
        # This concerns the last to arrive: a waiter has given up meanwhile.
        if meeting.error is not None:
            raise _for_waiter(meeting.error)
        return meeting.result  # type: ignore[no-any-return]

    @recorded(lambda meeting, self, rank, call, *_: ("wait", call.title))
    def _join(self, rank: int, call: Call, value: Any) -> Meeting:
        """Return the meeting when it ends; the last to arrive gets it at once, and must end it."""
        with self._mutex:
            if self._cause is not None:
                raise _for_waiter(self._cause)
            if self._returned is not None:
                raise self._skipped(call, rank)
            if self._meeting is None:
                self._meeting = Meeting(self.size)
            meeting = self._meeting
            meeting.calls[rank] = call
            meeting.values[rank] = value
            meeting.arrived += 1
            if meeting.arrived == self.size:
                meeting.last = rank
                return meeting
        self._wait(meeting, rank, call)
        return meeting

    def leave(self, rank: int, calls_made: int) -> None:
        """Record that a replica has returned from its step; make the waits of the others raise."""
        with self._mutex:
            self._returned = self._returned or (rank, calls_made)
            meeting = self._meeting
            calls = [] if meeting is None else list(filter(None, meeting.calls))
        if meeting is not None and calls:
            self._end(meeting, self._skipped(calls[0], meeting.calls.index(calls[0])))

    def abort(self, cause: BaseException) -> None:
        """Make all waits raise because of the first `cause` passed, now and later."""
        with self._mutex:  # Otherwise a replica that now starts a meeting would wait forever.
            if self._cause is None:
                self._cause = cause
            meeting = self._meeting
        self._end(meeting, self._cause)

    def _end(self, meeting: Meeting | None, error: BaseException | None) -> None:
        """End a meeting, unless it has ended."""
        with self._mutex:
            if meeting is not None and meeting is self._meeting:
                meeting.error = error
                self._meeting = None
                meeting.done.release()

    def _wait(self, meeting: Meeting, rank: int, call: Call) -> None:
        deadline = time.monotonic() + call.timeout
        while (left := deadline - time.monotonic()) > 0:
            # The wait is cut into slices: an interrupt just before a sleep is handled only after
            # it, and may prevent another replica from releasing the lock.
            if meeting.done.acquire(timeout=min(left, SLICE_SECONDS)):
                meeting.done.release()
                return
            if meeting is not self._meeting:
                return
        absent = [other for other, held in enumerate(meeting.calls) if held is None]
        whom = ", ".join(f"replica {k}" for k in absent) or "the others in the reduction"
        what = f"replica {rank} waited {call.timeout:g} s for {whom}."
        text = f"{what} If they need more time, increase timeout_seconds in CommunicationOptions."
        error = call.error(CollectiveTimeoutError, text, absent[0] if absent else None)
        with self._mutex:
            if meeting is self._meeting:
                self._cause = self._cause or error
        self._end(meeting, error)

    def _skipped(self, call: Call, waiting: int) -> CollectiveMismatchError:
        rank, made = self._returned or (0, 0)
        calls = count_of(made, "collective call")
        what = f"replica {rank} returned after {calls} while replica {waiting}"
        text = f"{what} called {call}. Every replica must make the same calls in the same order."
        return call.error(CollectiveMismatchError, text, rank)


def _for_waiter(error: BaseException) -> BaseException:
    """Return a new exception for a waiter: an exception has the traceback of one thread."""
    if isinstance(error, CollectiveMismatchError | CollectiveTimeoutError):
        copied = copy.copy(error)
        copied.__notes__ = []  # A shallow copy shares the list, and each replica adds its own note.
        return copied
    what = f"another replica failed with {type(error).__name__}: {error}."
    lost = WorkerLostError(f"{what} This replica was waiting for it in a collective.")
    lost.__cause__ = error
    return lost


class ThreadBackend(Backend):
    """The backend of one replica among the threads of its process.

    `streams` has the streams of all replicas, and `homes` the names of the memories that they
    update. With `one_device`, a single replica reduces arrays of any size.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        streams: Sequence[Stream],
        homes: Sequence[str],
        rank: int,
        one_device: bool = False,
    ) -> None:
        self.rank, self.size = rank, rendezvous.size
        self.owner, self.owners = homes[:rank].count(homes[rank]), homes.count(homes[rank])
        self.device = streams[rank].device
        self._rendezvous = rendezvous
        self._stream = streams[rank]
        self._gpus = [stream for stream in streams if stream.on_gpu]
        self._one_device = one_device

    def merge(self, call: Call, value: Any, combine: Combine[T]) -> T:
        """Run `combine` once, on the thread of the last replica to arrive."""
        if not self._gpus:
            return self._rendezvous.exchange(self.rank, call, value, combine)

        def settled(values: Sequence[Any]) -> T:
            combined = combine(values)
            settle(self._gpus)
            return combined

        self._stream.synchronize()  # Other streams will read the results of this stream.
        return self._rendezvous.exchange(self.rank, call, value, settled)

    def all_reduce(self, call: Call, inputs: Arrays, outputs: Arrays, op: ReduceOp) -> None:
        """Reduce by slice owners, or by the last replica to arrive if that is faster."""
        alone = self._one_device or sum([array.nbytes for array in inputs]) <= SMALL_BYTES

        def combine(everyone: Sequence[Any]) -> Sequence[Any]:
            if alone:
                self.reduce_parts(op, everyone, whole=True)
            return everyone

        everyone = self.merge(call, (inputs, outputs), combine)
        if not alone:
            self.reduce_parts(op, everyone)
            self._meet_again(call)

    @recorded(lambda *_, **__: ("reduce", ""))
    def reduce_parts(self, op: ReduceOp, everyone: Sequence[Any], *, whole: bool = False) -> None:
        """Reduce this replica's slice of the leaves, or whole leaves, for all replicas.

        `everyone` has the inputs and outputs of each replica; replicas may share outputs.
        """
        arrays, targets = everyone[self.rank]
        leaves = enumerate([slice(None)] * len(arrays))
        for leaf, part in leaves if whole else owned_blocks(arrays, self.size, self.rank):
            terms, others = [], []
            for inputs, outputs in everyone:
                terms.append(inputs[leaf][part])
                if outputs[leaf] is not targets[leaf]:
                    others.append(outputs[leaf][part])
            if self._gpus:
                terms = [copy_to(term, device_of(targets[leaf])) for term in terms]
            total = reduce_arrays(op, terms, out=targets[leaf][part])
            for target in others:
                if self._gpus:
                    write_to(target, total)
                else:
                    target[...] = total

    @recorded(lambda prepared, self, call, *_: ("update", call.title))
    def reduce_update(self, call: Call, inputs: Arrays, op: ReduceOp, update: Update) -> Any:
        """Reduce the owned ranges in blocks, and update each block while it is in the cache."""

        def combine(everyone: Sequence[Any]) -> tuple[Sequence[Any], Any]:
            return everyone, update.begin()

        everyone, prepared = self.merge(call, inputs, combine)
        scratch: dict[Any, Array] = {}
        for leaf, part in owned_blocks(inputs, self.owners, self.owner):
            terms = [self._here(arrays[leaf][part]) for arrays in everyone]
            key = terms[0].dtype, terms[0].size
            if key not in scratch:  # The next block reuses this memory.
                scratch[key] = array_namespace(terms[0]).empty(terms[0].size, terms[0].dtype)
            total = reduce_arrays(op, terms, out=scratch[key])
            update.apply(prepared, leaf, part.start, part.stop, total)
        self._meet_again(call)
        return prepared

    def all_gather(self, call: Call, inputs: Arrays) -> list[Array]:
        """Concatenate the rows of all replicas; each replica makes its own copy."""
        everyone = self.merge(call, inputs, list)
        joined = [
            array_namespace(rows).concatenate([self._here(arrays[leaf]) for arrays in everyone])
            for leaf, rows in enumerate(inputs)
        ]
        self._meet_again(call)
        return joined

    def broadcast(self, call: Call, buffers: Arrays, root: int) -> None:
        """Copy from the root's buffers."""
        everyone = self.merge(call, buffers, list)
        if self.rank != root:
            for buffer, theirs in zip(buffers, everyone[root], strict=True):
                buffer[...] = self._here(theirs)
        self._meet_again(call)

    def abort(self, cause: BaseException) -> None:
        self._rendezvous.abort(cause)

    def _meet_again(self, call: Call) -> None:
        """Wait until no replica reads the arrays of another."""
        self.merge(call, None, lambda _: None)

    def _here(self, array: Array) -> Array:
        """Return the array in the memory of this replica's device, copied if necessary."""
        return copy_to(array, self.device) if self._gpus else array


def owned_blocks(
    arrays: Arrays, owners: int, owner: int, block_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[int, slice]]:
    """Yield an owner's part of flat arrays in blocks that fit the cache; on GPUs in one block.

    >>> import numpy as np
    >>> list(owned_blocks([np.zeros(3), np.zeros(40)], owners=2, owner=0, block_bytes=80))
    [(0, slice(0, 3, None)), (1, slice(0, 10, None)), (1, slice(10, 16, None))]
    """
    for leaf, start, stop in owned_ranges(tuple([array.size for array in arrays]), owners, owner):
        array = arrays[leaf]
        block = stop - start if is_device_array(array) else max(1, block_bytes // array.itemsize)
        for first, last in blocks(start, stop, block):
            yield leaf, slice(first, last)
