"""The backend inside a compiled step: the collectives of XLA among all replicas of the program.

A program has one trace for all replicas. So no replica waits, and all replicas make the same calls,
because they run the same program.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from ndistribute.collective.backend import Arrays, Backend, Call, Update
from ndistribute.collective.reduce_op import ReduceOp
from ndistribute.devices import Array, Device, jax_module
from ndistribute.jit.box import Box, value_of

AXIS = "replica"
"""The name of the axis of a program along which its replicas are."""


class TracedBackend(Backend):
    """The collectives of all replicas of a program, or of this one alone.

    Args:
        size: the number of replicas.
    """

    is_traced = True
    device = Device("tpu:0")

    def __init__(self, size: int) -> None:
        self.size, self.rank = size, cast(Any, 0)
        if size > 1:
            self.rank = Box(jax_module().lax.axis_index(AXIS).astype(np.int64))
            self.rank.is_checked = True

    def all_reduce(self, call: Call, inputs: Arrays, outputs: Any, op: ReduceOp) -> None:
        outputs[:] = [self._reduced(array, op) for array in inputs]

    def reduce_update(self, call: Call, inputs: Arrays, op: ReduceOp, update: Update) -> Any:
        opened = update.begin()
        for leaf, array in enumerate(inputs):
            update.apply(opened, leaf, 0, array.size, self._reduced(array, op))
        return opened

    def all_gather(self, call: Call, inputs: Arrays) -> list[Array]:
        gather = jax_module().lax.all_gather
        return [Box(gather(value_of(array), AXIS, axis=0, tiled=True)) for array in inputs]

    def broadcast(self, call: Call, buffers: Any, root: int) -> None:
        gather = jax_module().lax.all_gather
        buffers[:] = [Box(gather(value_of(buffer), AXIS)[root]) for buffer in buffers]

    def abort(self, cause: BaseException) -> None:
        """Do nothing, because no replica waits while a step is traced."""

    def _reduced(self, array: Array, op: ReduceOp) -> Box:
        """Return an array reduced over the replicas; 16-bit floats are added in float32."""
        lax, value = jax_module().lax, value_of(array)
        if self.size == 1:
            return Box(value)
        dtype = value.dtype
        wide = value.astype(np.float32) if dtype.itemsize == 2 and dtype.kind in "fV" else value
        if op is ReduceOp.PROD:
            total = lax.all_gather(wide, AXIS).prod(0)
        else:
            sums = {ReduceOp.MIN: lax.pmin, ReduceOp.MAX: lax.pmax}
            total = sums.get(op, lax.psum)(wide, AXIS)
        if op is ReduceOp.MEAN:
            total = total / self.size
        return Box(total.astype(dtype))
