"""The backend inside a compiled step: the collectives of XLA among all replicas of the program.

A program has one trace for all replicas, so nobody waits and nothing can differ: replicas make the
same calls because they run the same program.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ndistribute.collective.backend import Arrays, Backend, Call, Update
from ndistribute.collective.reduce_op import ReduceOp
from ndistribute.devices import Array, Device, jax_module
from ndistribute.jit.box import Box, value_of


class TracedBackend(Backend):
    """The collectives of the replicas along an axis of a program.

    Args:
        axis: the name of the axis; None: this replica alone.
        size: the number of replicas.
    """

    is_traced = True
    device = Device("tpu:0")

    def __init__(self, axis: str | None, size: int) -> None:
        self._axis, self.size = axis, size
        if axis is None:
            self.rank: Any = 0
        else:
            self.rank = Box(jax_module().lax.axis_index(axis).astype(np.int64))
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
        return [Box(gather(value_of(array), self._axis, axis=0, tiled=True)) for array in inputs]

    def broadcast(self, call: Call, buffers: Any, root: int) -> None:
        gather = jax_module().lax.all_gather
        buffers[:] = [Box(gather(value_of(buffer), self._axis)[root]) for buffer in buffers]

    def abort(self, cause: BaseException) -> None:
        """Do nothing, because nobody waits while a step is traced."""

    def _reduced(self, array: Array, op: ReduceOp) -> Box:
        """Return an array reduced over the replicas; 16-bit floats are added in float32."""
        lax, value = jax_module().lax, value_of(array)
        if self._axis is None:
            return Box(value)
        dtype = value.dtype
        wide = value.astype(np.float32) if dtype.itemsize == 2 and dtype.kind in "fV" else value
        if op is ReduceOp.PROD:
            total = lax.all_gather(wide, self._axis).prod(0)
        else:
            sums = {ReduceOp.MIN: lax.pmin, ReduceOp.MAX: lax.pmax}
            total = sums.get(op, lax.psum)(wide, self._axis)
        if op is ReduceOp.MEAN:
            total = total / self.size
        return Box(total.astype(dtype))
