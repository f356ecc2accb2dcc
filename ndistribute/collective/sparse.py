"""How rows of a table are summed over processes: gathered, or as the whole table if that is less.

The choice is about the wire alone. Whichever is taken, every rank takes the same, and the result is
the rows that somebody passed, each once. Replicas of one process share memory and move nothing, so
they need no choice.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ndistribute.collective.indexed_slices import IndexedSlices
from ndistribute.collective.options import CommunicationOptions
from ndistribute.collective.reduce_op import ReduceOp, accumulation_dtype, finish, result_dtype
from ndistribute.device import array_namespace

if TYPE_CHECKING:
    from ndistribute.collective.communicator import Communicator

__all__ = ["gathers_fewer_bytes", "must_count", "reduce_rows"]

# Beside each row of a table that travels whole: by how many ranks it was passed.
_PASSED = np.dtype(np.float32)

# To ask how many rows there are costs a message. It is not asked where gathering can cost at most
# this many bytes, which travel in about the time of the question, or this much more than the table.
_SMALL_BYTES = 1 << 16
_TOLERATED = 1.25


def gathers_fewer_bytes(
    rows_total: int, row_bytes: int, index_bytes: int, dense_bytes: int, size: int
) -> bool:
    """Say whether gathering rows moves no more bytes than reducing the whole table.

    Each rank receives the rows of the others once; of a table, a ring moves its parts twice.

    Args:
        rows_total: rows over all ranks.
        row_bytes: of a row.
        index_bytes: of a row's index.
        dense_bytes: of the whole table.
        size: ranks.

    >>> gathers_fewer_bytes(100, 256, 8, 1_000_000, size=4)
    True
    >>> gathers_fewer_bytes(10_000, 256, 8, 1_000_000, size=4)
    False
    """
    gathered = rows_total * (row_bytes + index_bytes) * (size - 1)
    return gathered <= 2 * dense_bytes * (size - 1)


def must_count(length: int, row_bytes: int, index_bytes: int, dense_bytes: int, size: int) -> bool:
    """Say whether ranks need to know how many rows there are to choose well.

    A rank passes each row of the table at most once, which bounds what gathering can cost by
    numbers that all ranks know. Two ranks gather at most a few percent more than they would reduce.

    Args:
        length: rows of the table.
        row_bytes: of a row.
        index_bytes: of a row's index.
        dense_bytes: of the whole table.
        size: ranks.

    >>> must_count(10_000, 256, 8, 2_560_000, size=2), must_count(10_000, 256, 8, 2_560_000, size=3)
    (False, True)
    """
    most = size * length * (row_bytes + index_bytes)
    return most > _SMALL_BYTES and most > 2 * dense_bytes * _TOLERATED


def reduce_rows(
    communicator: Communicator,
    op: Any,
    slices: IndexedSlices,
    options: CommunicationOptions | None = None,
    *,
    one_memory: bool = False,
) -> IndexedSlices:
    """Reduce rows over all ranks.

    A rank's own duplicates are summed first, then the ranks' sums in the order of the ranks.

    Args:
        communicator: of the ranks; all of them call.
        op: SUM or MEAN; a rank that did not pass a row counts as zeros.
        slices: this rank's rows, of a table of the same shape on every rank.
        options: how to communicate.
        one_memory: whether all ranks share one memory, where gathering moves nothing.

    Returns:
        The rows that any rank passed, each once, in rising order of their indices.

    Raises:
        ValueError: another reduction; rows that were not passed have no value for it.

    >>> from ndistribute.collective.select import make_group
    >>> from ndistribute.device import Device
    >>> alone = make_group([Device("cpu:0")]).communicators[0]
    >>> reduce_rows(alone, "sum", IndexedSlices(np.ones((2, 1)), np.array([4, 4]), (5, 1))).values
    array([[2.]])
    """
    op = ReduceOp.parse(op)
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise ValueError(
            f"IndexedSlices are reduced by SUM or MEAN, got {op.name}: rows that no replica "
            "passed count as zeros. Call to_dense() first."
        )
    wide = slices.values.astype(accumulation_dtype(op, slices.dtype), copy=False)
    own = IndexedSlices(wide, slices.indices, slices.dense_shape).summed()
    gathers = one_memory or _gathers(communicator, own, options)
    total = (_gathered if gathers else _whole)(communicator, own, options)
    finish(op, total.values, communicator.size)
    total.values = total.values.astype(result_dtype(op, slices.dtype), copy=False)
    return total


def _gathers(
    communicator: Communicator, own: IndexedSlices, options: CommunicationOptions | None
) -> bool:
    """Choose as every rank does: by what all of them know, and where need be by a count."""
    length, *row_shape = own.dense_shape
    row_bytes = prod(row_shape) * own.dtype.itemsize
    index_bytes = own.indices.dtype.itemsize
    dense_bytes = length * (row_bytes + _PASSED.itemsize)
    size = communicator.size
    if size == 1 or not must_count(length, row_bytes, index_bytes, dense_bytes, size):
        return True
    rows_total = int(communicator.all_reduce("sum", np.int64(len(own.indices)), options))
    return gathers_fewer_bytes(rows_total, row_bytes, index_bytes, dense_bytes, size)


def _gathered(
    communicator: Communicator, own: IndexedSlices, options: CommunicationOptions | None
) -> IndexedSlices:
    xp = array_namespace(own.values)
    # No row of tables: it moves nothing, and lets the ranks see that they mean the same table.
    table = xp.empty((0, *own.dense_shape), own.dtype)
    leaves = (own.values, own.indices, table)
    values, indices, _ = communicator.all_gather(leaves, 0, options)
    return IndexedSlices(values, indices, own.dense_shape).summed()


def _whole(
    communicator: Communicator, own: IndexedSlices, options: CommunicationOptions | None
) -> IndexedSlices:
    xp = array_namespace(own.values)
    table = xp.zeros(own.dense_shape, own.dtype)
    passed = xp.zeros(own.dense_shape[0], _PASSED)
    table[own.indices] = own.values
    passed[own.indices] = 1
    table, passed = communicator.all_reduce("sum", (table, passed), options)
    rows = xp.flatnonzero(passed)
    return IndexedSlices(table[rows], rows.astype(own.indices.dtype, copy=False), own.dense_shape)
