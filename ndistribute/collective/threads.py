"""The backend for replicas that are threads of one process.

All replicas see each other's arrays, so nothing is packed and nothing is sent: each replica owns a
slice of the data, adds everyone's part of it in replica order, and writes the sum where it is
needed. Small values are reduced whole by whoever comes last, which saves the second meeting.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from ndistribute.collective.backend import Call, Update
from ndistribute.collective.buckets import blocks, owned_ranges
from ndistribute.collective.reduce_op import ReduceOp, reduce_arrays
from ndistribute.collective.rendezvous import Rendezvous
from ndistribute.device import Array, array_namespace, copy_to, is_gpu_array
from ndistribute.stream import Stream, settle, write_to

__all__ = ["ThreadBackend"]

T = TypeVar("T")

# Below this many bytes the last to arrive reduces alone. Measured on 2 cores with 2 replicas: the
# second meeting costs 100 to 150 us, in which one core reduces about this much.
SMALL_BYTES = 1024 * 1024

# Larger than the processor's cache alone would ask for: each block is a NumPy call, which gives up
# the interpreter lock and has to win it back from the other replicas. Measured with 32 MiB and 2
# replicas: 33 ms with blocks of 64 KiB, 17 ms with 128 KiB, 10 ms from 512 KiB on.
BLOCK_BYTES = 512 * 1024

_owned_ranges = functools.lru_cache(maxsize=256)(owned_ranges)


class ThreadBackend:
    """Move data between one replica and the other threads of its process.

    Args:
        rendezvous: where the replicas meet; shared by all of them.
        streams: the device and stream of each replica.
        rank: which replica this is.
        owner: this replica's place among those that update the same memory.
        owners: how many replicas update that memory.
        one_device: whether one replica reduces alone, whatever the size.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        streams: Sequence[Stream],
        rank: int,
        *,
        owner: int,
        owners: int,
        one_device: bool = False,
    ) -> None:
        self.rank = rank
        self.size = rendezvous.size
        self.device = streams[rank].device
        self._rendezvous = rendezvous
        self._stream = streams[rank]
        self._streams = [stream for stream in streams if stream.on_gpu]
        self.owner = owner
        self.owners = owners
        self._one_device = one_device

    def merge(
        self, call: Call, value: Any, combine: Callable[[Sequence[Any]], T], timeout: float
    ) -> T:
        """Run `combine` once, on the thread of the last replica to arrive."""
        if not self._streams:
            return self._rendezvous.exchange(self.rank, call, value, combine, timeout)

        def settled(values: Sequence[Any]) -> T:
            combined = combine(values)
            settle(self._streams)
            return combined

        # The replicas read on their own streams what others computed on theirs, and what is
        # combined on the last one's.
        self._stream.synchronize()
        return self._rendezvous.exchange(self.rank, call, value, settled, timeout)

    def all_reduce(
        self,
        call: Call,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        op: ReduceOp,
        timeout: float,
    ) -> None:
        """Reduce by slice owners, or by the last to arrive where that is faster."""
        alone = self._one_device or sum(array.nbytes for array in inputs) <= SMALL_BYTES

        def combine(everyone: Sequence[Any]) -> Sequence[Any]:
            if alone:
                for leaf in range(len(inputs)):
                    self._reduce_range(op, everyone, leaf, slice(None))
            return everyone

        everyone = self.merge(call, (inputs, outputs), combine, timeout)
        if alone:
            return
        sizes = tuple(array.size for array in inputs)
        for leaf, start, stop in _owned_ranges(sizes, self.size, self.rank):
            for part in _walk(inputs[leaf], start, stop):
                self._reduce_range(op, everyone, leaf, part)
        self._meet_again(call, timeout)

    def reduce_update(
        self,
        call: Call,
        inputs: Sequence[Array],
        op: ReduceOp,
        prepare: Callable[[], Any],
        update: Update,
        timeout: float,
    ) -> Any:
        """Reduce each owned range block by block, updating while it is in the cache."""

        def combine(everyone: Sequence[Any]) -> tuple[Sequence[Any], Any]:
            return everyone, prepare()

        everyone, prepared = self.merge(call, inputs, combine, timeout)
        sizes = tuple(array.size for array in inputs)
        scratch: dict[Any, Array] = {}
        for leaf, start, stop in _owned_ranges(sizes, self.owners, self.owner):
            for part in _walk(inputs[leaf], start, stop):
                mine = [_here(arrays[leaf][part], self._stream) for arrays in everyone]
                total = reduce_arrays(op, mine, out=_scratch_like(scratch, mine[0]))
                update(prepared, leaf, part.start, part.stop, total)
        self._meet_again(call, timeout)
        return prepared

    def all_gather(self, call: Call, inputs: Sequence[Array], timeout: float) -> list[Array]:
        """Join everyone's rows; each replica copies for itself."""
        everyone = self.merge(call, inputs, list, timeout)
        joined = []
        for leaf, own in enumerate(inputs):
            rows = [_here(arrays[leaf], self._stream) for arrays in everyone]
            joined.append(array_namespace(own).concatenate(rows))
        self._meet_again(call, timeout)
        return joined

    def broadcast(self, call: Call, buffers: Sequence[Array], root: int, timeout: float) -> None:
        """Copy from the root's buffers."""
        everyone = self.merge(call, buffers, list, timeout)
        if self.rank != root:
            for own, theirs in zip(buffers, everyone[root], strict=True):
                own[...] = _here(theirs, self._stream)
        self._meet_again(call, timeout)

    def abort(self, cause: BaseException) -> None:
        """Release every replica of this process."""
        self._rendezvous.abort(cause)

    def _reduce_range(self, op: ReduceOp, everyone: Sequence[Any], leaf: int, part: slice) -> None:
        """Reduce a range of a leaf over the replicas and write it into everyone's output."""
        terms = [_here(inputs[leaf][part], self._stream) for inputs, _ in everyone]
        outputs = [outputs[leaf][part] for _, outputs in everyone]
        total = reduce_arrays(op, terms, out=outputs.pop(self.rank))
        for output in outputs:
            if self._streams:
                write_to(output, total)
            else:
                output[...] = total

    def _meet_again(self, call: Call, timeout: float) -> None:
        """Wait until nobody reads this replica's arrays any more."""
        self.merge(call, None, _nothing, timeout)


def _nothing(_: Sequence[Any]) -> None:
    return None


def _here(array: Array, stream: Stream) -> Array:
    """Return an array in the memory of this replica's device; on a CPU it is there already."""
    return copy_to(array, stream.device) if stream.on_gpu or is_gpu_array(array) else array


def _walk(array: Array, start: int, stop: int) -> Iterator[slice]:
    """Cut a range into blocks that fit the cache; a GPU takes it whole."""
    length = stop - start if is_gpu_array(array) else BLOCK_BYTES // array.dtype.itemsize
    return (slice(first, last) for first, last in blocks(start, stop, max(1, length)))


def _scratch_like(scratch: dict[Any, Array], array: Array) -> Array:
    """Return a buffer of this size and dtype that the next block may use again."""
    key = (array.dtype, array.size)
    if key not in scratch:
        scratch[key] = array_namespace(array).empty(array.size, array.dtype)
    return scratch[key]
