"""The backend for replicas that are threads of one process.

All replicas see each other's arrays, so nothing is packed and nothing is sent: each replica owns a
slice of the data, adds everyone's part of it in replica order, and writes the sum where it is
needed. Small values are reduced whole by whoever comes last, which saves the second meeting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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

_ALL = slice(None)


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
        self.owner = owner
        self.owners = owners
        self._rendezvous = rendezvous
        self._stream = streams[rank]
        self._gpus = [stream for stream in streams if stream.on_gpu]
        self._one_device = one_device

    def merge(
        self, call: Call, value: Any, combine: Callable[[Sequence[Any]], T], timeout: float
    ) -> T:
        """Run `combine` once, on the thread of the last replica to arrive."""
        if not self._gpus:
            return self._rendezvous.exchange(self.rank, call, value, combine, timeout)

        def settled(values: Sequence[Any]) -> T:
            combined = combine(values)
            settle(self._gpus)
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
        if self._gpus:
            self._stream.synchronize()
        meeting = self._rendezvous.join(self.rank, call, (inputs, outputs), timeout)
        alone = self._one_device or sum([array.nbytes for array in inputs]) <= SMALL_BYTES
        if meeting.last == self.rank:
            with meeting:
                if alone:
                    self._reduce(op, meeting.values, [(i, _ALL) for i in range(len(inputs))])
                if self._gpus:
                    settle(self._gpus)
        if not alone:
            self._reduce(op, meeting.values, self._walk(inputs, self.size, self.rank))
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
        scratch: dict[Any, Array] = {}
        for leaf, part in self._walk(inputs, self.owners, self.owner):
            terms = [self._here(arrays[leaf][part]) for arrays in everyone]
            key = terms[0].dtype, terms[0].size
            if key not in scratch:  # The next block may use it again.
                scratch[key] = array_namespace(terms[0]).empty(terms[0].size, terms[0].dtype)
            total = reduce_arrays(op, terms, out=scratch[key])
            update(prepared, leaf, part.start, part.stop, total)
        self._meet_again(call, timeout)
        return prepared

    def all_gather(self, call: Call, inputs: Sequence[Array], timeout: float) -> list[Array]:
        """Join everyone's rows; each replica copies for itself."""
        everyone = self.merge(call, inputs, list, timeout)
        joined = [
            array_namespace(own).concatenate([self._here(arrays[leaf]) for arrays in everyone])
            for leaf, own in enumerate(inputs)
        ]
        self._meet_again(call, timeout)
        return joined

    def broadcast(self, call: Call, buffers: Sequence[Array], root: int, timeout: float) -> None:
        """Copy from the root's buffers."""
        everyone = self.merge(call, buffers, list, timeout)
        if self.rank != root:
            for own, theirs in zip(buffers, everyone[root], strict=True):
                own[...] = self._here(theirs)
        self._meet_again(call, timeout)

    def abort(self, cause: BaseException) -> None:
        """Release every replica of this process."""
        self._rendezvous.abort(cause)

    def _reduce(
        self, op: ReduceOp, everyone: Sequence[Any], parts: Iterable[tuple[int, slice]]
    ) -> None:
        """Reduce parts of leaves over the replicas and write them into everyone's outputs."""
        for leaf, part in parts:
            terms, targets = [], []
            for inputs, outputs in everyone:
                terms.append(inputs[leaf][part])
                targets.append(outputs[leaf][part])
            own = targets.pop(self.rank)
            if self._gpus:
                total = reduce_arrays(op, [self._here(term) for term in terms], out=own)
                for target in targets:
                    write_to(target, total)
            else:
                reduce_arrays(op, terms, out=own)
                for target in targets:
                    target[...] = own

    def _meet_again(self, call: Call, timeout: float) -> None:
        """Wait until nobody reads this replica's arrays any more."""
        self.merge(call, None, lambda _: None, timeout)

    def _here(self, array: Array) -> Array:
        """Return an array in the memory of this replica's device; on a CPU it is there already."""
        return copy_to(array, self.device) if self._gpus else array

    def _walk(
        self, arrays: Sequence[Array], owners: int, owner: int
    ) -> Iterator[tuple[int, slice]]:
        """Yield an owner's part of leaves in blocks that fit the cache; a GPU takes it whole."""
        sizes = tuple([array.size for array in arrays])
        for leaf, start, stop in owned_ranges(sizes, owners, owner):
            array = arrays[leaf]
            block = stop - start if is_gpu_array(array) else BLOCK_BYTES // array.dtype.itemsize
            for first, last in blocks(start, stop, max(1, block)):
                yield leaf, slice(first, last)
