"""The public face of the collectives: one object for each replica.

It takes nests of arrays and numbers, checks them, numbers the calls, and hands flat contiguous
buffers to its backend. Nobody else sees a backend. A group of one replica is handled here, once.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from ndistribute import tree
from ndistribute.collective.backend import Backend, Call, Signature, Update
from ndistribute.collective.indexed_slices import IndexedSlices
from ndistribute.collective.options import CommunicationOptions
from ndistribute.collective.outputs import Outputs
from ndistribute.collective.reduce_op import ReduceOp, result_dtype
from ndistribute.collective.step_tracker import StepTracker
from ndistribute.device import Array, array_namespace, as_array, copy_to, device_of
from ndistribute.dtypes import native
from ndistribute.errors import DistributeError

__all__ = ["Communicator"]

T = TypeVar("T")

GradientMemory = Callable[[np.dtype[Any], tuple[int, ...]], Array | None]

_DEFAULT_OPTIONS = CommunicationOptions()
_HISTORY = 8


class Communicator:
    """Let a replica reduce, gather, broadcast and meet with the others of its group.

    Arrays in another byte order than this machine's count as the same numbers in its own, which is
    also what results have.

    Args:
        backend: what carries the bytes.
        options: for calls that bring none of their own.
        local: the backend among the replicas of this process, where there are several processes.
        where: is told which calls are over, where there are several processes.

    Attributes:
        gradient_memory: if not None, called with a dtype and a shape it returns an array that
            `reduce_update` need not copy, or None.

    >>> import numpy as np
    >>> from ndistribute.collective.select import make_group
    >>> from ndistribute.device import Device
    >>> alone = make_group([Device("cpu:0")]).communicators[0]
    >>> alone.all_reduce("mean", {"loss": np.array([1, 2])})
    {'loss': array([1., 2.])}
    """

    def __init__(
        self,
        backend: Backend,
        options: CommunicationOptions = _DEFAULT_OPTIONS,
        local: Backend | None = None,
        where: StepTracker | None = None,
    ) -> None:
        self.rank = backend.rank
        self.size = backend.size
        self.purpose = ""  # What the next calls are for, compared like all else.
        self.part_of: int | None = None  # The call that the next ones are parts of.
        self._backend = backend
        self._local = local or backend
        self._timeout = options.timeout
        self._outputs = Outputs()
        self.gradient_memory: GradientMemory | None = getattr(backend, "gradient_memory", None)
        self._on_gpu = backend.device.kind == "gpu"
        self._sequence = 0
        self._guard = _Guard(backend.rank, where)

    @property
    def local_rank(self) -> int:
        """Return which of the replicas of this process this one is."""
        return self._local.rank

    @property
    def local_size(self) -> int:
        """Return how many replicas this process has."""
        return self._local.size

    @property
    def calls_made(self) -> int:
        """Return how many calls this replica made in the current step."""
        return self._sequence

    def begin(self) -> None:
        """Start a step: calls are numbered from 1 again."""
        self._sequence = 0
        self._guard.history.clear()

    def all_reduce(self, op: Any, value: Any, options: CommunicationOptions | None = None) -> Any:
        """Reduce a nest over all replicas; see `ReplicaContext.all_reduce`."""
        op = ReduceOp.parse(op)
        leaves = tree.flatten(value)
        if IndexedSlices in map(type, leaves):
            return tree.unflatten(value, [self._reduce_leaf(op, leaf, options) for leaf in leaves])
        arrays, inputs, signature = self._taken(leaves, op)
        if self.size == 1:
            outputs = [flat.copy() for flat in inputs]
        else:
            outputs = self._outputs.like(inputs)
            timeout = self._timeout if options is None else options.timeout
            call = self._call("all_reduce", op.name, signature)
            with self._guard:
                self._backend.all_reduce(call, inputs, outputs, op, timeout)
        return self._returned(value, arrays, outputs)

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Concatenate a nest over all replicas; see `ReplicaContext.all_gather`."""
        arrays = [native(as_array(leaf)) for leaf in tree.flatten(value)]
        moved = [_rows_first(array, axis) for array in arrays]
        if self.size == 1:
            return tree.unflatten(value, [array.copy() for array in arrays])
        placed = [copy_to(rows, self._backend.device) for rows in moved] if self._on_gpu else moved
        inputs = [rows.reshape(len(rows), math.prod(rows.shape[1:])) for rows in placed]
        timeout = self._timeout if options is None else options.timeout
        # A star stands for the number of rows, which may differ.
        signature = tuple((rows.dtype, ("*", *rows.shape[1:])) for rows in moved)
        call = self._call("all_gather", f"axis={axis}", signature)
        with self._guard:
            joined = self._backend.all_gather(call, inputs, timeout)
        results = []
        for matrix, rows, array in zip(joined, moved, arrays, strict=True):
            whole = matrix.reshape(len(matrix), *rows.shape[1:])
            xp = array_namespace(whole)
            whole = xp.ascontiguousarray(xp.moveaxis(whole, 0, axis))
            results.append(copy_to(whole, device_of(array)) if self._on_gpu else whole)
        return tree.unflatten(value, results)

    def broadcast(
        self, value: Any, root: int = 0, options: CommunicationOptions | None = None
    ) -> Any:
        """Return the nest that one replica passed; the others pass one of the same shapes."""
        arrays, inputs, signature = self._taken(tree.flatten(value))
        buffers = [flat.copy() for flat in inputs]
        if self.size > 1:
            timeout = self._timeout if options is None else options.timeout
            # Who sends hears nothing of who receives.
            call = self._call("broadcast", f"root={root}", signature, meets=False)
            with self._guard:
                self._backend.broadcast(call, buffers, root, timeout)
        return self._returned(value, arrays, buffers)

    def merge(
        self,
        kind: str,
        value: Any,
        combine: Callable[[Sequence[Any]], T],
        options: CommunicationOptions | None = None,
    ) -> T:
        """Run a function once over the values of all replicas of this process.

        Args:
            kind: what the replicas are doing; compared between them.
            value: what this replica brings.
            combine: called with the values in replica order, while every replica waits.
            options: how long to wait.

        Returns:
            What `combine` returned, the same object on every replica.
        """
        if self.size == 1:
            return combine([value])
        timeout = self._timeout if options is None else options.timeout
        call = self._call(kind, None, (), meets=False)
        with self._guard:
            return self._backend.merge(call, value, combine, timeout)

    def reduce_update(
        self,
        op: Any,
        arrays: Sequence[Array],
        prepare: Callable[[], Any],
        update: Update,
        options: CommunicationOptions | None = None,
        *,
        everywhere: bool = True,
    ) -> Any:
        """Reduce arrays and update with the result, each replica the part that it owns.

        The gather half of an all-reduce is never done: it would only copy what the owner can use
        where it is.

        Args:
            op: the reduction.
            arrays: the same shapes and dtypes on every replica.
            prepare: run once in each process before the first update.
            update: called as ``update(prepared, leaf, start, stop, total)`` with ranges of the
                flattened array number `leaf`; it may change `total`.
            options: how long to wait.
            everywhere: whether over all replicas; else over those of this process alone.

        Returns:
            What `prepare` returned.
        """
        op = ReduceOp.parse(op)
        _, inputs, signature = self._taken(arrays, op)
        timeout = self._timeout if options is None else options.timeout
        backend = self._backend if everywhere else self._local
        call = self._call("reduce_update", op.name, signature, meets=everywhere)
        with self._guard:
            return backend.reduce_update(call, inputs, op, prepare, update, timeout)

    def owned_part(self, count: int) -> slice:
        """Return which of `count` rows this replica updates for the replicas of its memory."""
        owner, owners = self._backend.owner, self._backend.owners
        return slice(count * owner // owners, count * (owner + 1) // owners)

    def abort(self, cause: BaseException) -> None:
        """Release every replica that waits in a collective, with the reason."""
        self._backend.abort(cause)

    def _reduce_leaf(self, op: ReduceOp, leaf: Any, options: CommunicationOptions | None) -> Any:
        if not isinstance(leaf, IndexedSlices):
            return self.all_reduce(op, leaf, options)
        gather = functools.partial(self.all_gather, axis=0, options=options)
        return leaf.reduced(op, self.size, gather)

    def _taken(
        self, leaves: Sequence[Any], op: ReduceOp | None = None
    ) -> tuple[list[Array], list[Array], Signature]:
        """Return leaves as arrays, the elements of each in a row for the backend, and a signature.

        Where there is an op, the arrays are of the dtype of its result.
        """
        arrays, inputs, signature = [], [], []
        for leaf in leaves:
            array = leaf if type(leaf) is np.ndarray else as_array(leaf)
            if op is not None and array.dtype.kind in "OSUMm":
                raise TypeError(
                    f"{op.name} of {type(leaf).__name__} is not defined: pass arrays of numbers, "
                    "or a nest of them."
                )
            if op is ReduceOp.MEAN:
                array = array.astype(result_dtype(op, array.dtype), copy=False)
            if not array.dtype.isnative:
                array = native(array)
            arrays.append(array)
            signature.append((array.dtype, array.shape))
            # Row by row, and a copy only where the array is not laid out so.
            placed = copy_to(array, self._backend.device) if self._on_gpu else array
            inputs.append(placed.ravel())
        return arrays, inputs, tuple(signature)

    def _returned(self, value: Any, arrays: Sequence[Array], flat: Sequence[Array]) -> Any:
        """Build a nest of results, each where the replica had its array: maybe on the host."""
        results = []
        for array, result in zip(arrays, flat, strict=True):
            here = copy_to(result, device_of(array)) if self._on_gpu else result
            results.append(here.reshape(array.shape)[()])
        return tree.unflatten(value, results)

    def _call(self, kind: str, op: str | None, signature: Signature, *, meets: bool = True) -> Call:
        """Number and describe the call around which the guard comes next.

        Args:
            kind: the method's name.
            op: the reduction's name, or another argument that has to be the same everywhere.
            signature: dtype and shape of each array.
            meets: whether each replica hears of all others before it returns.
        """
        if self.part_of is None:
            self._sequence += 1
        call = Call(self.part_of or self._sequence, kind, op, signature, self.purpose)
        guard = self._guard
        guard.history.append(call)
        guard.is_part, guard.meets = self.part_of is not None, meets
        return call


class _Guard:
    """Note that the call which was begun last is over, or what led to its failure."""

    def __init__(self, rank: int, where: StepTracker | None) -> None:
        self.history: deque[Call] = deque(maxlen=_HISTORY)
        self.is_part = False
        self.meets = True
        self._rank = rank
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, DistributeError):
            earlier = ", ".join(f"#{past.sequence} {past}" for past in self.history)
            error.add_note(f"the last calls of replica {self._rank}: {earlier}")
        if error is None and self._where is not None and not self.is_part:
            self._where.finished = self.history[-1].sequence
            if self.meets:
                self._where.exchanged = self._where.finished


def _rows_first(array: Array, axis: int) -> Array:
    """Return an array with an axis moved to the front, where rows lie end to end.

    Raises:
        ValueError: the array has no such axis.
    """
    if not -array.ndim <= axis < array.ndim:
        raise ValueError(
            f"all_gather along axis {axis} of an array of shape {array.shape}: the axis must be in "
            f"[{-array.ndim}, {array.ndim}). A number has no axis: pass np.reshape(x, (1,))."
        )
    xp = array_namespace(array)
    return xp.ascontiguousarray(xp.moveaxis(array, axis, 0))
