"""The backend for processes of one host: each writes its bucket, and all read all buckets.

A process writes its contribution once, into its own bucket. When all processes have arrived, each
reads the other buckets. If there are two processes, each adds all elements; if there are more, each
adds only its slice, in place. Sums are in rank order, so all processes compute the same bits.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from ndistribute.collective.backend import Arrays, Backend, Call, LeafKey, Update
from ndistribute.collective.control_plane import ControlPlane
from ndistribute.collective.cuts import blocks, owned_ranges, update_in_blocks
from ndistribute.collective.reduce_op import ReduceOp, reduce_arrays
from ndistribute.collective.segment import Segment
from ndistribute.devices import Array
from ndistribute.timeline import span
from ndistribute.transport.buffers import padded

# Other arrays of the caller are streamed through two alternating windows of the bucket, which fit
# into a core's second-level cache: 3.7 ms for 16 MiB, where a whole copy took 5.1. A process that
# has arrived at a step has read the step before, so one meeting per step is enough.
WINDOW_BYTES = 1024 * 1024
# After the windows is room for copies that last for a whole call: an update of 4 MiB takes 1.2 ms
# with such a copy, and 1.5 ms through the windows.
_WHOLE = 2 * WINDOW_BYTES
WHOLE_BYTES = 4 * 1024 * 1024

# Up to this size, every process adds all elements, which saves a meeting. Measured with 2
# processes: 2.8 us for 4 KiB instead of 6.9 us in slices, 8.4 instead of 10 us for 64 KiB.
SMALL_BYTES = 64 * 1024

# Two blocks, their sum and the updated range fit into a core's second-level cache.
BLOCK_BYTES = 256 * 1024

# A leaf, a part of it, and that part in every process's bucket.
_Piece = tuple[int, slice, list[Array]]
_key = operator.attrgetter("dtype", "size")  # A part of a leaf.


class SharedMemoryBackend(Backend):
    """The backend of a process among the processes of its host, which `rank` and `size` count.

    `ranks` are the ranks of this host, including this one; None means all ranks. All processes of
    all hosts create their backends together.

    Raises:
        DistributeError: the memory cannot be created or mapped.
    """

    def __init__(self, peers: ControlPlane, *, ranks: Sequence[int] | None = None) -> None:
        here = tuple(range(peers.size) if ranks is None else ranks)
        self._segment = Segment(peers, here, _WHOLE + WHOLE_BYTES)
        self.rank = self._segment.rank
        self.size = len(here)
        self._peers = peers
        self._chunks = functools.lru_cache(maxsize=128)(self._cut)
        # New memory costs a page fault per 4 KiB.
        self._totals = functools.lru_cache(1)(lambda keys: [np.empty(n, t) for t, n in keys])
        self._window = 0
        self._failed = False  # The other processes may still read arrays from `allocate`.

    def __enter__(self) -> None:
        """Begin a block; an exception in it breaks the group."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self.abort(error)

    def all_reduce(self, call: Call, inputs: Arrays, outputs: Arrays, op: ReduceOp) -> None:
        """Reduce chunk by chunk; reduce arrays from `allocate` in place."""
        with self:
            if all(map(operator.is_, inputs, outputs)) and _nbytes(inputs) > SMALL_BYTES:
                everyone, _ = self._show_whole(call, inputs, copy=False)
                if any(everyone):
                    self._add_slices(call, [terms for terms in everyone if terms], op)
                rest = [a for a, terms in zip(inputs, everyone, strict=True) if not terms]
                if not rest:
                    return
                inputs = outputs = rest
            self._segment.begin(call)
            in_slices = self.size > 2 and _nbytes(inputs) > SMALL_BYTES
            title = call.title
            for chunk in self._chunks(tuple(map(_key, inputs)), self._window):
                self._show(call, title, chunk, inputs)
                if in_slices:
                    self._add_slices(call, [everyone for _, _, everyone in chunk], op)
                with span("reduce", title):
                    for leaf, part, everyone in chunk:
                        if in_slices:
                            outputs[leaf][part] = everyone[self.rank]
                            continue
                        terms = everyone
                        if self.size == 2:  # Not from shared memory: half the time for 1 MiB.
                            mine = inputs[leaf][part]
                            terms = [mine, everyone[1]] if self.rank == 0 else [everyone[0], mine]
                        reduce_arrays(op, terms, out=outputs[leaf][part])

    def reduce_update(self, call: Call, inputs: Arrays, op: ReduceOp, update: Update) -> Any:
        """Reduce and update; two processes add each block where they update it.

        All data of the other processes has arrived before the first update. So after a failure of
        another process, either all updates are made or none.
        """
        with self:
            if self.size > 2 or _nbytes(inputs) <= SMALL_BYTES:
                totals = self._sum(call, inputs, op)
                return update_in_blocks(call, inputs, totals, update)
            everyone, lends = self._show_whole(call, inputs)
            rest = [leaf for leaf, terms in enumerate(everyone) if not terms]
            if rest:
                totals = self._sum(call, [inputs[leaf] for leaf in rest], op)
                for leaf, total in zip(rest, totals, strict=True):
                    everyone[leaf] = [total]
            with span("update", call.title):
                prepared = update.begin()
                for leaf, terms in enumerate(everyone):
                    block = BLOCK_BYTES // terms[0].itemsize
                    scratch = np.empty_like(terms[0][:block])
                    for start, stop in blocks(0, terms[0].size, block):
                        total = terms[0][start:stop]
                        if len(terms) > 1:
                            parts = [term[start:stop] for term in terms]
                            total = reduce_arrays(op, parts, out=scratch[: stop - start])
                        update.apply(prepared, leaf, start, stop, total)
            if len(rest) < len(inputs):
                # From here on a failure does not undo the update, and recovery must know that.
                where = self._peers.where
                where.finished = where.exchanged = call.sequence
                self._segment.arrive()
                if lends:  # The caller may write to its arrays at once.
                    self._segment.wait(call)
            return prepared

    def all_gather(self, call: Call, inputs: Arrays) -> list[Array]:
        """Exchange the numbers of rows, then concatenate the rows of all processes."""
        with self:
            self._segment.begin(call)
            lengths_of_all = self._exchange(call, [len(rows) for rows in inputs])
            flats = [_bytes_of(rows) for rows in inputs]
            joined, places, longest = [], [], []
            for rows, *lengths in zip(inputs, *lengths_of_all, strict=True):
                width = math.prod(rows.shape[1:]) * rows.itemsize
                stops = itertools.accumulate([width * length for length in lengths], initial=0)
                joined.append(np.empty((sum(lengths), *rows.shape[1:]), rows.dtype))
                flat = _bytes_of(joined[-1])
                places.append([flat[start:stop] for start, stop in itertools.pairwise(stops)])
                longest.append((flat.dtype, width * max(lengths)))
            whole = sum([padded(nbytes) for _, nbytes in longest]) <= WHOLE_BYTES
            for chunk in self._chunks(tuple(longest), self._window, whole):
                self._show(call, call.title, chunk, flats)
                with span("reduce", call.title):
                    for leaf, part, everyone in chunk:
                        shown = list(everyone)
                        shown[self.rank] = flats[leaf][part]  # Faster than shared memory.
                        for place, theirs in zip(places[leaf], shown, strict=True):
                            target = place[part]
                            target[...] = theirs[: target.size]
            if whole:  # The next update may write there.
                self._segment.arrive()
            return joined

    def broadcast(self, call: Call, buffers: Arrays, root: int) -> None:
        """Copy from the root's bucket."""
        with self:
            self._segment.begin(call)
            buffers = list(map(_bytes_of, buffers))
            for chunk in self._chunks(tuple(map(_key, buffers)), self._window):
                self._show(call, call.title, chunk, buffers if self.rank == root else ())
                if self.rank != root:
                    with span("reduce", call.title):
                        for leaf, part, everyone in chunk:
                            buffers[leaf][part] = everyone[root]

    def allocate(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array | None:
        """Return an array in shared memory; `reduce_update` reads it without a copy."""
        return self._segment.allocate(dtype, shape)

    def gradient_memory(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array | None:
        """Return an array from `allocate` if that saves a copy, else None."""
        if self.size > 2 or self._failed or math.prod(shape) * dtype.itemsize < SMALL_BYTES:
            return None
        return self.allocate(dtype, shape)

    def abort(self, cause: BaseException) -> None:
        self._failed = True
        self._peers.abort(cause)

    def reset(self) -> None:
        """Start over; all processes call this while none of them is in a call."""
        self._segment.reset()
        self._window = 0
        self._failed = False

    def close(self) -> None:
        """Release the memory; the backend cannot be used afterwards."""
        self._chunks.cache_clear()
        self._segment.close()

    def _cut(
        self, leaves: tuple[LeafKey, ...], window: int, whole: bool = False
    ) -> list[list[_Piece]]:
        """Return the chunks of leaves and their places, starting after the last used window."""
        chunks = []
        for chunk in cut(leaves, WHOLE_BYTES if whole else WINDOW_BYTES):
            # Chunks that last for a whole call are after the windows.
            window = 2 if whole else 1 - window
            pieces = []
            for leaf, start, stop, offset in chunk:
                place = window * WINDOW_BYTES + offset, leaves[leaf][0], stop - start
                everyone = [self._segment.view(rank, *place) for rank in range(self.size)]
                pieces.append((leaf, slice(start, stop), everyone))
            chunks.append(pieces)
        return chunks

    def _show(self, call: Call, title: str, chunk: list[_Piece], leaves: Arrays) -> None:
        """Write a chunk of leaves, or none, into the bucket; wait until all processes did so."""
        self._window = 1 - self._window  # No process reads that window now.
        with span("pack", title):
            if leaves:
                for leaf, part, everyone in chunk:
                    data = leaves[leaf][part]
                    everyone[self.rank][: data.size] = data
            self._segment.arrive()
        self._segment.wait(call)

    def _show_whole(
        self, call: Call, arrays: Arrays, *, copy: bool = True
    ) -> tuple[list[list[Array]], bool]:
        """Make flat arrays readable to the others until this process arrives again.

        Arrays outside the bucket are copied into it if `copy` is True and there is room. For each
        array, return the arrays of all processes; or none, unless all processes have it in their
        buckets. Also return whether the others read arrays to which the caller may write.
        """
        segment, free, end = self._segment, _WHOLE, _WHOLE + WHOLE_BYTES
        segment.wait(call)  # Wait until no process reads the earlier data.
        segment.begin(call)
        offsets = []
        with span("pack", call.title):
            for array in arrays:
                place = segment.place_of(array)
                if place is None and copy and free + array.nbytes <= end:
                    place, free = free, free + padded(array.nbytes)
                    segment.view(self.rank, place, array.dtype, array.size)[...] = array
                offsets.append(-1 if place is None else place)
        everyone: list[list[Array]] = []
        for array, *places in zip(arrays, *self._exchange(call, offsets), strict=True):
            shown = []
            if min(places) >= 0:
                key = array.dtype, array.size
                shown = [segment.view(rank, place, *key) for rank, place in enumerate(places)]
                shown[self.rank] = array  # Not from shared memory: half the time for 1 MiB.
            everyone.append(shown)
        return everyone, max(offsets, default=0) >= end

    def _sum(self, call: Call, inputs: Arrays, op: ReduceOp) -> list[Array]:
        """Return the reduced inputs, in arrays that the next call will overwrite."""
        totals = self._totals(tuple(map(_key, inputs)))
        self.all_reduce(call, inputs, totals, op)
        return totals

    def _exchange(self, call: Call, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of each process."""
        sent = np.array(numbers, np.int64)
        received: list[list[int]] = [[] for _ in range(self.size)]
        for chunk in self._chunks((_key(sent),), self._window):
            self._show(call, call.title, chunk, [sent])
            for _, _, everyone in chunk:
                for numbers_of_one, theirs in zip(received, everyone, strict=True):
                    numbers_of_one.extend(theirs.tolist())
        return received

    def _add_slices(self, call: Call, everyone: Sequence[Sequence[Array]], op: ReduceOp) -> None:
        """Add all processes' parts of this process's slice, and write the sum to all processes."""
        sizes = tuple([terms[0].size for terms in everyone])
        with span("reduce", call.title):
            for leaf, start, stop in owned_ranges(sizes, self.size, self.rank):
                block = BLOCK_BYTES // everyone[leaf][0].itemsize
                for first, last in blocks(start, stop, block):
                    parts = [term[first:last] for term in everyone[leaf]]
                    # The first array is read first, so only it may be written to while others are
                    # read.
                    total = reduce_arrays(op, parts, out=parts[0])
                    for part in parts[1:]:
                        part[...] = total
            self._segment.arrive()
        self._segment.wait(call)


def cut(leaves: Sequence[LeafKey], limit: int) -> list[list[tuple[int, int, int, int]]]:
    """Concatenate leaves and cut them into chunks of at most `limit` bytes, a multiple of 64.

    A chunk is a list of tuples: a leaf, the start and stop of a range in it, and the range's offset
    in the chunk in bytes. If all leaves are empty, there is one empty chunk.

    >>> f4 = np.dtype(np.float32)
    >>> cut(((f4, 20), (f4, 40)), limit=128)
    [[(0, 0, 20, 0)], [(1, 0, 32, 0)], [(1, 32, 40, 0)]]
    """
    chunks: list[list[tuple[int, int, int, int]]] = [[]]
    used = 0
    for leaf, (dtype, size) in enumerate(leaves):
        start = 0
        while start < size:
            room = (limit - used) // dtype.itemsize
            # Do not split small leaves.
            if room < min(size - start, limit // 2 // dtype.itemsize):
                chunks.append([])
                used = 0
                continue
            stop = min(size, start + room)
            chunks[-1].append((leaf, start, stop, used))
            used += padded((stop - start) * dtype.itemsize)
            start = stop
    return chunks


def _nbytes(arrays: Arrays) -> int:
    return sum([array.nbytes for array in arrays])


def _bytes_of(array: Array) -> Array:
    """Return the bytes of an array, flat: for copies, items may have any length."""
    if array.dtype.hasobject:
        raise TypeError("Python objects cannot be shared between processes.")
    return array.reshape(-1).view(np.uint8)
