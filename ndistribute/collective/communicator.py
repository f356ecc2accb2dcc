"""The public face of the collectives: one object for each replica.

It takes nests of arrays and numbers, checks them, numbers the calls, and hands flat contiguous
buffers to its backend. Nobody else sees a backend. A group of one replica is handled here, once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from ndistribute import tree
from ndistribute.collective.backend import Backend, Call, Signature, Update
from ndistribute.collective.indexed_slices import IndexedSlices
from ndistribute.collective.leaves import flattened, reducible, rows_first, signature
from ndistribute.collective.options import CommunicationOptions
from ndistribute.collective.outputs import Outputs
from ndistribute.collective.reduce_op import ReduceOp
from ndistribute.collective.sparse import reduce_rows
from ndistribute.collective.whereabouts import Whereabouts
from ndistribute.device import Array, array_namespace, as_array, copy_to, device_of
from ndistribute.errors import DistributeError

__all__ = ["Communicator"]

T = TypeVar("T")

GradientMemory = Callable[[np.dtype[Any], tuple[int, ...]], Array | None]

_DEFAULT_OPTIONS = CommunicationOptions()
_HISTORY = 8


class Communicator:
    """Let a replica reduce, gather, broadcast and meet with the others of its group.

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
        where: Whereabouts | None = None,
    ) -> None:
        self._options = options
        self._where = where
        self._outputs = Outputs()
        self._local = local or backend
        self.rank = backend.rank
        self.size = backend.size
        self._backend = backend
        self.purpose = ""  # What the next calls are for, compared like all else.
        self.part_of: int | None = None  # The call that the next ones are parts of.
        self.gradient_memory: GradientMemory | None = getattr(backend, "gradient_memory", None)
        self._on_gpu = backend.device.kind == "gpu"
        self._sequence = 0
        self._history: deque[Call] = deque(maxlen=_HISTORY)

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
        self._history.clear()

    def all_reduce(self, op: Any, value: Any, options: CommunicationOptions | None = None) -> Any:
        """Reduce a nest over all replicas; see `ReplicaContext.all_reduce`."""
        op = ReduceOp.parse(op)
        alone = type(value) is np.ndarray  # The most frequent of all nests.
        leaves = [value] if alone else tree.flatten(value)
        if IndexedSlices in map(type, leaves):
            return tree.unflatten(value, [self._reduce_leaf(op, leaf, options) for leaf in leaves])
        arrays, inputs, described = [], [], []
        for leaf in leaves:
            array = reducible(op, leaf)
            arrays.append(array)
            described.append((array.dtype, array.shape))
            inputs.append((copy_to(array, self._backend.device) if self._on_gpu else array).ravel())
        if self.size == 1:
            outputs = [flat.copy() for flat in inputs]
        else:
            outputs = self._outputs.like(inputs)
            call = self._call("all_reduce", op.name, tuple(described))
            self._run(self._backend.all_reduce, call, inputs, outputs, op, options=options)
        results = [out.reshape(a.shape)[()] for out, a in zip(outputs, arrays, strict=True)]
        if self._on_gpu:
            results = self._returned(results, arrays)
        return results[0] if alone else tree.unflatten(value, results)

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Concatenate a nest over all replicas; see `ReplicaContext.all_gather`."""
        leaves = [as_array(leaf) for leaf in tree.flatten(value)]
        return tree.unflatten(value, self._gather(leaves, axis, f"axis={axis}", options))

    def broadcast(
        self, value: Any, root: int = 0, options: CommunicationOptions | None = None
    ) -> Any:
        """Return the nest that one replica passed; the others pass one of the same shapes."""
        arrays = [as_array(leaf) for leaf in tree.flatten(value)]
        buffers = [flattened(array).copy() for array in self._placed(arrays)]
        if self.size > 1:
            call = self._call("broadcast", f"root={root}", signature(arrays))
            method = self._backend.broadcast  # Who sends hears nothing of who receives.
            self._run(method, call, buffers, root, options=options, meets=False)
        results = [flat.reshape(a.shape)[()] for flat, a in zip(buffers, arrays, strict=True)]
        return tree.unflatten(value, self._returned(results, arrays))

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
        call = self._call(kind, None, ())
        method = self._backend.merge
        return self._run(method, call, value, combine, options=options, meets=False)  # type: ignore[no-any-return]

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
        checked = [reducible(op, array) for array in arrays]
        inputs = [flattened(array) for array in self._placed(checked)]
        call = self._call("reduce_update", op.name, signature(checked))
        backend = self._backend if everywhere else self._local
        method, rest = backend.reduce_update, (inputs, op, prepare, update)
        return self._run(method, call, *rest, options=options, meets=everywhere)

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
        if op not in (ReduceOp.SUM, ReduceOp.MEAN):
            raise ValueError(
                f"IndexedSlices are reduced by SUM or MEAN, got {op.name}: rows that no replica "
                "passed count as zeros. Call to_dense() first."
            )
        return reduce_rows(self, op, leaf, options, one_memory=self.local_size == self.size)

    def _gather(
        self,
        leaves: Sequence[Array],
        axis: int,
        title: str,
        options: CommunicationOptions | None,
    ) -> list[Array]:
        moved = [rows_first(leaf, axis) for leaf in leaves]
        if self.size == 1:
            return [leaf.copy() for leaf in leaves]
        inputs = [
            array.reshape(len(array), math.prod(array.shape[1:])) for array in self._placed(moved)
        ]
        call = self._call("all_gather", title, signature(moved, ragged=True))
        joined = self._run(self._backend.all_gather, call, inputs, options=options)
        results = []
        for rows, array in zip(joined, moved, strict=True):
            whole = rows.reshape(len(rows), *array.shape[1:])
            xp = array_namespace(whole)
            results.append(xp.ascontiguousarray(xp.moveaxis(whole, 0, axis)))
        return self._returned(results, leaves)

    def _placed(self, arrays: list[Array]) -> list[Array]:
        """Return arrays in the memory of the replica's GPU, where a backend wants them."""
        if not self._on_gpu:
            return arrays
        return [copy_to(array, self._backend.device) for array in arrays]

    def _returned(self, results: list[Array], arrays: Sequence[Array]) -> list[Array]:
        """Bring each result to where the replica had its array: losses may well be on the host."""
        if not self._on_gpu:
            return results
        return [
            copy_to(result, device_of(array))[()]
            for result, array in zip(results, arrays, strict=True)
        ]

    def _call(self, kind: str, op: str | None, signature: Signature) -> Call:
        if self.part_of is None:
            self._sequence += 1
        call = Call(self.part_of or self._sequence, kind, op, signature, self.purpose)
        self._history.append(call)
        return call

    def _run(
        self,
        method: Callable[..., Any],
        call: Call,
        *arguments: Any,
        options: CommunicationOptions | None,
        meets: bool = True,
    ) -> Any:
        try:
            result = method(call, *arguments, timeout=(options or self._options).timeout)
        except DistributeError as error:
            earlier = ", ".join(f"#{past.sequence} {past}" for past in self._history)
            error.add_note(f"the last calls of replica {self.rank}: {earlier}")
            raise
        if self._where is not None and self.part_of is None:
            self._where.finished = call.sequence
            if meets:
                self._where.exchanged = call.sequence
        return result
