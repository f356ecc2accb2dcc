"""Which arrays of a call share a bucket, and which travel from where they are.

Made once for arrays of given dtypes and sizes, with the buffers that they are packed into, so that
a training step allocates nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ndistribute.collective.buckets import BucketSpec, Layout, LeafSpec, pack
from ndistribute.collective.compression import codec_for
from ndistribute.collective.pipeline import Bucket
from ndistribute.collective.reduce_op import ReduceOp, accumulation_dtype
from ndistribute.collective.schedule import Move, Tuning, plan_reduce
from ndistribute.device import Array

__all__ = ["Packing", "Settings"]

# An array that is larger than a pack goes in several messages, but none is cut below this: each
# costs 20 us, in which as many bytes would have gone twenty times.
LEAST_BYTES = 4 * 1024
# Arrays of up to this size share a bucket: copying costs about 0.1 ms a MiB, a message 20 us.
BUCKET_BYTES = 4 * 1024 * 1024
# Up to here a buffer goes whole. Between two ranks that costs no more bytes than a ring and saves a
# step: 63 us against 96 us for 256 KiB. Among more it costs more bytes with each step.
SMALL_BYTES_OF_TWO = 256 * 1024
SMALL_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Settings:
    """Say who communicates, and how.

    Args:
        size: how many ranks there are.
        rank: which one this is.
        block_bytes: how large the wire would have messages.
        bytes_per_pack: the most bytes of a bucket and, from 4096 on, of a message; 0 for the best
            known.
        wire_dtype: how float32 is compressed, or None.

    Raises:
        ValueError: a negative size, or a code that is unknown.

    >>> Settings(size=2, rank=0, block_bytes=1_000_000, bytes_per_pack=10_000).tuning
    Tuning(small_bytes=10000, block_bytes=10000)
    """

    size: int
    rank: int
    block_bytes: int
    bytes_per_pack: int = 0
    wire_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.bytes_per_pack < 0:
            raise ValueError(f"bytes_per_pack must be 0 or more, got {self.bytes_per_pack}.")
        codec_for(self.wire_dtype, np.dtype(np.float32))

    @property
    def tuning(self) -> Tuning:
        """Return how messages are cut."""
        most = self.block_bytes
        if self.bytes_per_pack:
            most = min(most, max(self.bytes_per_pack, LEAST_BYTES))
        small = SMALL_BYTES_OF_TWO if self.size == 2 else SMALL_BYTES
        return Tuning(min(small, most), most)


class Packing:
    """Hold the buckets for arrays of given dtypes and sizes, and this rank's program for them.

    Args:
        settings: who communicates, and how.
        op: a reduction that these dtypes are for; all have the same sums.
        leaves: dtype and number of elements of each array.
    """

    def __init__(
        self, settings: Settings, op: ReduceOp, leaves: Sequence[tuple[np.dtype[Any], int]]
    ) -> None:
        specs = [LeafSpec(accumulation_dtype(op, dtype), size) for dtype, size in leaves]
        self.layout: Layout = pack(specs, settings.bytes_per_pack or BUCKET_BYTES)
        self._members: list[list[int]] = [[] for _ in self.layout.buckets]
        for leaf, slot in enumerate(self.layout.slots):
            if slot.start < slot.stop:
                self._members[slot.bucket].append(leaf)
        self._alone = [
            members[0] if len(members) == 1 and leaves[members[0]][0] == spec.dtype else None
            for members, spec in zip(self._members, self.layout.buckets, strict=True)
        ]
        self._buffers: dict[int, Array] = {}
        self._codecs = [codec_for(settings.wire_dtype, b.dtype) for b in self.layout.buckets]
        # An array that is alone in its bucket goes as it is, without padding for empty ones.
        self._lengths = [
            bucket.size if leaf is None else leaves[leaf][1]
            for bucket, leaf in zip(self.layout.buckets, self._alone, strict=True)
        ]
        lengths = [
            (length, (codec or bucket).dtype.itemsize, codec is not None)
            for length, bucket, codec in zip(
                self._lengths, self.layout.buckets, self._codecs, strict=True
            )
        ]
        self.moves: list[Move] = (
            plan_reduce(settings.size, settings.rank, lengths, settings.tuning)
            if settings.size > 1
            else []
        )

    def buckets(self, inputs: Sequence[Array], outputs: Sequence[Array] | None) -> list[Bucket]:
        """Return the buffers of a call.

        Args:
            inputs: what this rank contributes.
            outputs: where the totals go; None leaves them in the buckets, see `total`.
        """
        made = []
        for index, codec in enumerate(self._codecs):
            leaf = self._alone[index]
            if leaf is not None:
                target = self._buffer(index) if outputs is None else outputs[leaf]
                made.append(Bucket(inputs[leaf], target, codec))
                continue
            buffer = self._buffer(index)
            drain = None if outputs is None else self._mover(index, buffer, outputs, out=True)
            fill = self._mover(index, buffer, inputs, out=False)
            made.append(Bucket(buffer, buffer, codec, fill, drain))
        return made

    def total(self, leaf: int, buckets: Sequence[Bucket]) -> Array:
        """Return the reduced elements of an array, in the dtype in which they were added."""
        slot = self.layout.slots[leaf]
        return buckets[slot.bucket].target[slot.start : slot.stop]

    def _buffer(self, index: int) -> Array:
        """Return a bucket's own buffer. It starts as zeros: what lies between slots is reduced."""
        if index not in self._buffers:
            spec: BucketSpec = self.layout.buckets[index]
            self._buffers[index] = np.zeros(self._lengths[index], spec.dtype)
        return self._buffers[index]

    def _mover(
        self, index: int, buffer: Array, arrays: Sequence[Array], *, out: bool
    ) -> Callable[[], None]:
        parts = [(self.layout.slots[leaf], arrays[leaf]) for leaf in self._members[index]]
        return functools.partial(_unpack if out else _pack, buffer, parts)


def _pack(buffer: Array, parts: Sequence[Any]) -> None:
    for slot, array in parts:
        buffer[slot.start : slot.stop] = array


def _unpack(buffer: Array, parts: Sequence[Any]) -> None:
    for slot, array in parts:
        array[...] = buffer[slot.start : slot.stop]
