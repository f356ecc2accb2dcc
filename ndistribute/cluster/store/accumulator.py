"""`Accumulator`: gradients of one step, summed until enough are there.

As TensorFlow's conditional accumulators: a gradient that was computed for an earlier step is
dropped, so a worker that is late does no harm, and a take moves the accumulator on by a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ndistribute.cluster.protocol.replies import Taken
from ndistribute.cluster.protocol.requests import Dense, Gradient, Rows
from ndistribute.cluster.store.refusal import Refused
from ndistribute.cluster.store.rows import check_rows, summed
from ndistribute.cluster.wire.tensors import Array

__all__ = ["Accumulator", "is_float"]

# Rows of so many gradients are kept before those that repeat are added up.
_ROWS_KEPT = 16


@dataclass
class Accumulator:
    """Sum gradients.

    Args:
        step: for which gradients are taken.
        count: how many are in the sum.
        dtype: of the gradients, once there was one.
        row_shape: of the gradients, or of their rows if `sparse`.
        sparse: whether gradients are rows.
        total: the sum of dense gradients; while there is none, memory to use again.
        rows: gradients that are rows; their sum is what counts.
    """

    step: int = 0
    count: int = 0
    dtype: np.dtype[np.generic] | None = None
    row_shape: tuple[int, ...] = ()
    sparse: bool = False
    total: Array | None = None
    rows: list[Rows] = field(default_factory=list)

    def check(self, gradient: Gradient, name: str) -> None:
        """Check that a gradient can be added.

        Raises:
            Refused: it can not.
        """
        sparse, values = isinstance(gradient, Rows), gradient.values
        if not is_float(values.dtype):
            raise Refused("mismatch", f"a gradient for {name!r} has dtype {values.dtype}.")
        if isinstance(gradient, Rows):
            # How many rows there are is nowhere known.
            check_rows(gradient.indices, values, (np.iinfo(np.int64).max, *values.shape[1:]), name)
        shape = values.shape[1:] if sparse else values.shape
        got, expected = (
            (sparse, shape, values.dtype),
            (self.sparse, self.row_shape, self.dtype),
        )
        if self.dtype is not None and got != expected:
            what = ("dense", "rows")
            raise Refused(
                "mismatch",
                f"accumulator {name!r} sums gradients {what[self.sparse]} {self.row_shape} "
                f"{self.dtype}, got {what[sparse]} {shape} {values.dtype}.",
            )

    def adopt(self, gradient: Gradient) -> None:
        """Take from now on what is like the first gradient."""
        values = gradient.values
        self.sparse = isinstance(gradient, Rows)
        self.dtype = values.dtype.newbyteorder("=")
        self.row_shape = values.shape[1:] if self.sparse else values.shape

    def add(self, gradient: Gradient) -> None:
        """Add a gradient that was checked."""
        values, wide = gradient.values, _wide(gradient.values.dtype)
        self.count += 1
        if isinstance(gradient, Rows):
            self.rows.append(Rows(gradient.indices.astype(np.int64), values.astype(wide)))
            if len(self.rows) >= _ROWS_KEPT:
                self.rows = [summed(_joined(self.rows))]
        elif self.count > 1 and self.total is not None:
            self.total += values
        elif self.total is not None and (self.total.shape, self.total.dtype) == (
            values.shape,
            wide,
        ):
            np.copyto(self.total, values)
        else:
            self.total = values.astype(wide)  # A copy: the sum is ours to change.

    def take(self) -> Taken:
        """Return the mean of what is there, which is the taker's, and start the next step."""
        count, mean = self.count, self.finish()
        mean.values.flags.writeable = False  # It is remembered, for a call that comes again.
        self.total = None
        return Taken(self.step, count, mean)

    def finish(self) -> Gradient:
        """Return the mean of what is there, valid until the next `add`; start the next step."""
        mean: Gradient
        if self.sparse:
            once = summed(_joined(self.rows))
            mean = Rows(once.indices, self._mean(once.values))
        else:
            mean = Dense(self._mean(self.total))
        self.step, self.count, self.rows = self.step + 1, 0, []
        return mean

    def _mean(self, total: Array | None) -> Array:
        if total is None or self.dtype is None or not self.count:
            raise Refused("mismatch", "the mean of no gradients.")
        if self.count > 1:
            total /= self.count
        return total.astype(self.dtype, copy=False)


def is_float(dtype: np.dtype[np.generic]) -> bool:
    """Return whether a gradient may have a dtype."""
    return dtype.kind in "fc" or dtype.name == "bfloat16"


def _wide(dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
    return np.dtype(np.float32) if dtype.itemsize == 2 else dtype.newbyteorder("=")


def _joined(rows: list[Rows]) -> Rows:
    return Rows(
        np.concatenate([part.indices for part in rows]),
        np.concatenate([part.values for part in rows]),
    )
