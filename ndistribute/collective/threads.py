"""The backend for replicas that are threads of one process.

Replicas can read each other's arrays, so nothing is packed or sent. Each replica owns a slice: it
adds that slice of all arrays in replica order, and writes the sum to its destinations. The last
replica to arrive reduces small arrays alone, which saves the second meeting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from ndistribute.collective.backend import Call, Update
from ndistribute.collective.buckets import blocks, owned_ranges
from ndistribute.collective.reduce_op import ReduceOp, reduce_arrays
from ndistribute.collective.rendezvous import Rendezvous
from ndistribute.device import Array, array_namespace, copy_to, device_of, is_gpu_array
from ndistribute.stream import Stream, settle, write_to
from ndistribute.timeline import recorded

__all__ = ["ThreadBackend", "owned_blocks"]

T = TypeVar("T")

# Up to this size, the last replica to arrive reduces alone. Measured on 2 cores with 2 replicas:
# the second meeting costs 100 to 150 us, in which one core reduces about as many bytes.
SMALL_BYTES = 1024 * 1024

# Larger than the cache requires, because each block is a NumPy call, which releases the interpreter
# lock and must acquire it again. Measured with 32 MiB and 2 replicas: 33 ms with blocks of 64 KiB,
# 17 ms with 128 KiB, 10 ms from 512 KiB on.
BLOCK_BYTES = 512 * 1024


class ThreadBackend:
    """The backend of one replica among the threads of its process.

    Args:
        rendezvous: the rendezvous of all replicas.
        streams: the device and stream of each replica.
        rank: the index of this replica.
        owner: its index among the replicas that update the same memory.
        owners: the number of replicas that update that memory.
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
        self.rank, self.size = rank, rendezvous.size
        self.owner, self.owners = owner, owners
        self.device = streams[rank].device
        self._rendezvous = rendezvous
        self._stream = streams[rank]
        self._gpus = [stream for stream in streams if stream.on_gpu]
        self._one_device = one_device

    def merge(
        self, call: Call, value: Any, combine: Callable[[Sequence[Any]], T], timeout: float
    ) -> T:
        """Run `combine` once, on the thread of the last replica to arrive."""
        if self._gpus:  # Other streams read what this one has computed.
            self._stream.synchronize()
        meeting = self._rendezvous.join(self.rank, call, value, timeout)
        if meeting.last == self.rank:
            with meeting:
                meeting.result = combine(meeting.values)
                if self._gpus:
                    settle(self._gpus)
        return meeting.result  # type: ignore[no-any-return]

    def all_reduce(
        self,
        call: Call,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        op: ReduceOp,
        timeout: float,
    ) -> None:
        """Reduce by slice owners, or by the last replica to arrive if that is faster."""
        if self._gpus:
            self._stream.synchronize()
        meeting = self._rendezvous.join(self.rank, call, (inputs, outputs), timeout)
        alone = self._one_device or sum([array.nbytes for array in inputs]) <= SMALL_BYTES
        if meeting.last == self.rank:
            with meeting:
                if alone:
                    self.reduce_parts(op, meeting.values, whole=True)
                if self._gpus:
                    settle(self._gpus)
        if not alone:
            self.reduce_parts(op, meeting.values)
            self._meet_again(call, timeout)

    @recorded(lambda *_, **__: ("reduce", ""))
    def reduce_parts(self, op: ReduceOp, everyone: Sequence[Any], *, whole: bool = False) -> None:
        """Reduce this replica's slice of the leaves, or whole leaves, for all replicas.

        `everyone` has the inputs and outputs of each replica; replicas may share outputs.
        """
        arrays, own = everyone[self.rank]
        leaves = enumerate([slice(None)] * len(arrays))
        for leaf, part in leaves if whole else owned_blocks(arrays, self.size, self.rank):
            terms, others = [], []
            for inputs, outputs in everyone:
                terms.append(inputs[leaf][part])
                if outputs[leaf] is not own[leaf]:
                    others.append(outputs[leaf][part])
            if self._gpus:
                terms = [copy_to(term, device_of(own[leaf])) for term in terms]
            total = reduce_arrays(op, terms, out=own[leaf][part])
            for target in others:
                if self._gpus:
                    write_to(target, total)
                else:
                    target[...] = total

    @recorded(lambda prepared, self, call, *_: ("update", call.title))
    def reduce_update(
        self,
        call: Call,
        inputs: Sequence[Array],
        op: ReduceOp,
        prepare: Callable[[], Any],
        update: Update,
        timeout: float,
    ) -> Any:
        """Reduce the owned ranges in blocks, and update each block while it is in the cache."""

        def combine(everyone: Sequence[Any]) -> tuple[Sequence[Any], Any]:
            return everyone, prepare()

        everyone, prepared = self.merge(call, inputs, combine, timeout)
        scratch: dict[Any, Array] = {}
        for leaf, part in owned_blocks(inputs, self.owners, self.owner):
            terms = [self._here(arrays[leaf][part]) for arrays in everyone]
            key = terms[0].dtype, terms[0].size
            if key not in scratch:  # Reused by the next block.
                scratch[key] = array_namespace(terms[0]).empty(terms[0].size, terms[0].dtype)
            total = reduce_arrays(op, terms, out=scratch[key])
            update(prepared, leaf, part.start, part.stop, total)
        self._meet_again(call, timeout)
        return prepared

    def all_gather(self, call: Call, inputs: Sequence[Array], timeout: float) -> list[Array]:
        """Concatenate the rows of all replicas; each replica makes its own copy."""
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
        """Make all waits of this process's replicas raise."""
        self._rendezvous.abort(cause)

    def _meet_again(self, call: Call, timeout: float) -> None:
        """Wait until no replica reads the arrays of another."""
        self.merge(call, None, lambda _: None, timeout)

    def _here(self, array: Array) -> Array:
        """Return the array in the memory of this replica's device, copied if necessary."""
        return copy_to(array, self.device) if self._gpus else array


def owned_blocks(
    arrays: Sequence[Array], owners: int, owner: int, block_bytes: int = BLOCK_BYTES
) -> Iterator[tuple[int, slice]]:
    """Yield an owner's part of flat arrays in blocks that fit the cache; on GPUs in one block.

    >>> import numpy as np
    >>> list(owned_blocks([np.zeros(3), np.zeros(40)], owners=2, owner=0, block_bytes=80))
    [(0, slice(0, 3, None)), (1, slice(0, 10, None)), (1, slice(10, 16, None))]
    """
    for leaf, start, stop in owned_ranges(tuple([array.size for array in arrays]), owners, owner):
        array = arrays[leaf]
        block = stop - start if is_gpu_array(array) else max(1, block_bytes // array.itemsize)
        for first, last in blocks(start, stop, block):
            yield leaf, slice(first, last)
