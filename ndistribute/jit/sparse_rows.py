"""Sparse rows in compiled steps, where the number of distinct rows is not known.

The number of rows stays the same: one row for each distinct index, and rows that stand for no row.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ndistribute.autodiff.diagnostics import user_line
from ndistribute.context import current_trace
from ndistribute.indexed_slices import IndexedSlices
from ndistribute.jit.box import namespace

# The index that stands for no row: XLA drops values that are written there.
NO_ROW = 2**31 - 1


def rows_once(rows: IndexedSlices, last: bool) -> tuple[Any, Any]:
    """Return values and indices; each index except `NO_ROW` occurs once.

    Args:
        rows: rows of an array; several of them may have the same index.
        last: True keeps the last row of each index; False adds the rows of each index.
    """
    values: Any = namespace.asarray(rows.values)
    indices: Any = namespace.asarray(rows.indices)
    if not len(indices):
        return values, indices
    if not indices.is_checked:
        _check(indices, rows.dense_shape[0])
    indices = indices.astype(np.int64)
    order = np.argsort(indices[::-1] if last else indices, kind="stable")
    order = _checked(len(indices) - 1 - order if last else order)
    indices, values = indices[order], values[order]
    begins = namespace.ones(len(indices), bool)
    begins[1:] = indices[1:] != indices[:-1]
    if not last:
        first = np.where(begins, np.arange(len(indices)), 0)
        sums = np.zeros_like(values)
        np.add.at(sums, _checked(np.maximum.accumulate(first)), values)
        values = sums
    return values, _checked(np.where(begins, indices, NO_ROW))


def _check(indices: Any, length: int) -> None:
    where = user_line()
    current_trace().check(
        ((indices >= 0) & (indices < length)) | (indices == NO_ROW),
        lambda: IndexError(f"rows at {where} have an index that is not in [0, {length})."),
    )


def _checked(indices: Any) -> Any:
    indices.is_checked = True
    return indices


namespace.rows_once = rows_once  # type: ignore[attr-defined]
