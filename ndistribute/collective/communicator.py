"""`Communicator`: the collectives as a replica calls them, and `CommunicationOptions`.

It takes nests of arrays and numbers, checks them, numbers the calls, and passes flat contiguous
buffers to its backend. No other code calls a backend. A group of one replica is handled here.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ndistribute import tree
from ndistribute.collective.backend import Arrays, Backend, Call, Combine, Signature, T, Update
from ndistribute.collective.reduce_op import ReduceOp, reduce_rows, result_dtype
from ndistribute.collective.step_tracker import StepTracker
from ndistribute.context import current_trace
from ndistribute.devices import Array, array_namespace, as_array, copy_to, device_of
from ndistribute.dtypes import native
from ndistribute.errors import DistributeError
from ndistribute.indexed_slices import IndexedSlices, refuse_rows
from ndistribute.transport.buffers import ReusedMemory

# The allocator already reuses the memory of smaller results.
SMALL_BYTES = 128 * 1024
_KEPT_BYTES = 1 << 30


class CommunicationImplementation(enum.Enum):
    """The transport between workers.

    >>> CommunicationImplementation("ring").name
    'RING'
    """

    AUTO = "auto"
    RING = "ring"
    MPI = "mpi"
    NCCL = "nccl"


@dataclass(frozen=True, slots=True)
class CommunicationOptions:
    """The settings of a strategy's collectives; a single call uses only their timeout.

    Args:
        bytes_per_pack: the maximum size in bytes of a bucket of gradients and of a message; 0 means
            the default of the transport. Collectives in shared memory and through NCCL ignore it.
        timeout_seconds: how many seconds a replica waits for the others; None means 600.
        implementation: the transport between workers, a `CommunicationImplementation` or its value.
            Strategies of one process ignore it.
        wire_dtype: ``"float16"`` or ``"bfloat16"`` sends float32 between hosts in half the bytes,
            and adds in float32; None sends arrays unchanged. All replicas still get the same bits.

    Raises:
        ValueError: `bytes_per_pack` is negative, `timeout_seconds` is not above 0, or
            another value is unknown.

    >>> CommunicationOptions(timeout_seconds=5).timeout
    5.0
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO
    wire_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.bytes_per_pack < 0:
            raise ValueError(f"bytes_per_pack must be 0 or more, got {self.bytes_per_pack}.")
        if self.timeout_seconds is not None and self.timeout_seconds <= 0:
            raise ValueError(f"timeout_seconds must be above 0, got {self.timeout_seconds}.")
        if self.wire_dtype not in (None, "float16", "bfloat16"):
            what = f"wire_dtype must be 'float16', 'bfloat16' or None, got {self.wire_dtype!r}."
            raise ValueError(what)
        if not isinstance(self.implementation, CommunicationImplementation):
            name = str(self.implementation).lower()
            known = [member.value for member in CommunicationImplementation]
            if name not in known:
                raise ValueError(f"implementation must be one of {known}, got {name!r}.")
            object.__setattr__(self, "implementation", CommunicationImplementation(name))

    @property
    def timeout(self) -> float:
        """The timeout in seconds, with the default applied."""
        # A replica may load data or compile for minutes before a call. The failure detector reports
        # lost processes at once, so the deadline serves only for calls that would never end.
        return 600.0 if self.timeout_seconds is None else float(self.timeout_seconds)


class Communicator:
    """The collectives of one replica.

    Arrays in another byte order are converted: results have the byte order of this machine.

    Args:
        backend: the backend of this replica.
        options: the options of calls that pass no options.
        local: the backend among the replicas of this process; None means `backend`.
        where: the step tracker of this process; None if there are no other processes.

    Attributes:
        rank: the index of this replica among `size` replicas.
        local_rank: its index among the `local_size` replicas of this process.
        calls_made: the number of calls of this replica in the current step.
        purpose: what the next calls are for; it must be the same on all replicas.
        part_of: the number of the call that the next calls are parts of, or None.
        guard: the context of a call; it records which calls of the step have completed.
        has_written: whether a call has begun to write variables since this was last set to False.
        waited_since: whether a call after that write involved other processes.
        gradient_memory: the backend's `gradient_memory`.

    >>> import numpy as np
    >>> from ndistribute.collective.select import make_group
    >>> from ndistribute.devices import Device
    >>> alone = make_group([Device("cpu:0")]).communicators[0]
    >>> alone.all_reduce("mean", {"loss": np.array([1, 2])})
    {'loss': array([1., 2.])}
    """

    def __init__(
        self,
        backend: Backend,
        options: CommunicationOptions | None = None,
        local: Backend | None = None,
        where: StepTracker | None = None,
    ) -> None:
        self._backend = backend
        self._local = local or backend
        self.rank, self.size = backend.rank, backend.size
        self.local_rank, self.local_size = self._local.rank, self._local.size
        self.calls_made = 0
        self.purpose = ""
        self.part_of: int | None = None
        self.has_written = self.waited_since = False
        self._timeout = (options or CommunicationOptions()).timeout
        self._outputs = Outputs()
        self.gradient_memory = backend.gradient_memory
        self._on_gpu = backend.device.kind == "gpu"
        self.guard = _Guard(backend.rank, where)

    def begin(self) -> None:
        """Start a step, in which calls are numbered from 1."""
        self.calls_made = 0
        self.guard.history.clear()

    def all_reduce(self, op: Any, value: Any, options: CommunicationOptions | None = None) -> Any:
        """Reduce a nest over all replicas; see `ReplicaContext.all_reduce`."""
        op = ReduceOp.parse(op)
        leaves = tree.flatten(value)
        if IndexedSlices in map(type, leaves):
            gather = functools.partial(self.all_gather, axis=0, options=options)
            results = [
                reduce_rows(leaf, op, self.size, gather)
                if isinstance(leaf, IndexedSlices)
                else self.all_reduce(op, leaf, options)
                for leaf in leaves
            ]
            return tree.unflatten(value, results)
        arrays, inputs, signature = self._taken(leaves, op)
        if self.size == 1:
            outputs = [flat.copy() for flat in inputs]
        else:
            outputs = self._outputs.like(inputs)
            wait = self._timeout_of(options)
            with self._numbered("all_reduce", op.name, signature, wait) as call:
                self._backend.all_reduce(call, inputs, outputs, op)
        return self._returned(value, arrays, outputs)

    def _timeout_of(self, options: CommunicationOptions | None) -> float:
        """Return how many seconds a call with these options waits."""
        if options is not None and options.wire_dtype is not None:
            raise ValueError("wire_dtype has no effect in a call: pass it to the strategy.")
        return self._timeout if options is None or not options.timeout_seconds else options.timeout

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Concatenate a nest over all replicas; see `ReplicaContext.all_gather`."""
        leaves = tree.flatten(value)
        refuse_rows("all_gather", leaves)
        arrays = [native(as_array(leaf)) for leaf in leaves]
        moved = [_rows_first(array, axis) for array in arrays]
        if self.size == 1:
            return tree.unflatten(value, [array.copy() for array in arrays])
        placed = [copy_to(rows, self._backend.device) for rows in moved] if self._on_gpu else moved
        inputs = [rows.reshape(len(rows), math.prod(rows.shape[1:])) for rows in placed]
        # "*" stands for the number of rows, which may differ.
        signature = tuple((rows.dtype, ("*", *rows.shape[1:])) for rows in moved)
        wait = self._timeout_of(options)
        with self._numbered("all_gather", f"axis={axis}", signature, wait) as call:
            joined = self._backend.all_gather(call, inputs)
        results = []
        for matrix, rows, array in zip(joined, moved, arrays, strict=True):
            whole = matrix.reshape(len(matrix), *rows.shape[1:])
            xp = array_namespace(whole)
            whole = xp.ascontiguousarray(xp.moveaxis(whole, 0, axis))
            results.append(copy_to(whole, device_of(array)) if self._on_gpu else whole)
        return tree.unflatten(value, results)

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """Return the nest that replica `root` passed; all pass the same shapes and dtypes."""
        arrays, inputs, signature = self._taken(tree.flatten(value))
        buffers = [flat.copy() for flat in inputs]
        if self.size > 1:
            # The sender gets no reply from the receivers.
            with self._numbered("broadcast", f"root={root}", signature, counts=False) as call:
                self._backend.broadcast(call, buffers, root)
        return self._returned(value, arrays, buffers)

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Count calls of a block as parts of the last call: other processes may not make them."""
        before = self.part_of
        self.part_of = self.calls_made if before is None else before
        try:
            yield
        finally:
            self.part_of = before

    def merge(self, kind: str, value: Any, combine: Combine[T], *, writes: bool = False) -> T:
        """Run a function once on the values of all replicas of this process.

        Args:
            kind: the name of the operation, which must be the same on all replicas.
            value: the value of this replica.
            combine: called with the values in replica order, while all replicas wait.
            writes: True if the function writes variables, in all processes.

        Returns:
            The result of `combine`, the same object on all replicas.
        """
        if self.size == 1:
            return combine([value])
        with self._numbered(kind, None, (), counts=writes, waits=False) as call:
            self.has_written |= writes
            return self._backend.merge(call, value, combine)

    def reduce_update(
        self, op: Any, arrays: Arrays, update: Update, *, everywhere: bool = True
    ) -> Any:
        """Reduce arrays, and apply an update to the ranges of the totals that this replica owns.

        Unlike an all-reduce, it does not copy the totals to all replicas.

        Args:
            op: the reduction.
            arrays: arrays of the same shapes and dtypes on all replicas.
            update: applied to the totals of ranges of the flattened arrays.
            everywhere: True reduces over all replicas, False over those of this process.

        Returns:
            The result of the update's `begin`.
        """
        op = ReduceOp.parse(op)
        _, inputs, signature = self._taken(arrays, op)
        backend = self._backend if everywhere else self._local

        def begin() -> Any:
            self.has_written = True
            return update.begin()

        # Error messages name the method that users call.
        with self._numbered("apply_gradients", op.name, signature) as call:
            return backend.reduce_update(call, inputs, op, Update(begin, update.apply))

    def owned_part(self, count: int) -> slice:
        """Return which of `count` rows this replica, of those that share its memory, updates."""
        owner, owners = self._backend.owner, self._backend.owners
        return slice(count * owner // owners, count * (owner + 1) // owners)

    def abort(self, cause: BaseException) -> None:
        """Make the collective in which other replicas wait raise because of `cause`."""
        self._backend.abort(cause)

    def _taken(
        self, leaves: Sequence[Any], op: ReduceOp | None = None
    ) -> tuple[list[Array], list[Array], Signature]:
        """Return leaves as arrays, the same arrays flattened for the backend, and their signature.

        If `op` is not None, the arrays have the dtype of its result.
        """
        arrays, inputs, signature = [], [], []
        for leaf in leaves:
            array = leaf if type(leaf) is np.ndarray else as_array(leaf)
            if op is not None and array.dtype.kind in "OSUMm":
                what = f"{op.name} of {type(leaf).__name__} is not defined:"
                raise TypeError(f"{what} pass numbers, arrays of numbers, or a nest of them.")
            if op is ReduceOp.MEAN:
                array = array.astype(result_dtype(op, array.dtype), copy=False)
            if not array.dtype.isnative:
                array = native(array)
            arrays.append(array)
            signature.append((array.dtype, array.shape))
            # In C order; this copies only arrays that are not contiguous.
            placed = copy_to(array, self._backend.device) if self._on_gpu else array
            inputs.append(placed.ravel())
        return arrays, inputs, tuple(signature)

    def _returned(self, value: Any, arrays: Arrays, flat: Arrays) -> Any:
        """Return a nest of results, each on the device of its input or in host memory."""
        results = []
        for array, result in zip(arrays, flat, strict=True):
            here = copy_to(result, device_of(array)) if self._on_gpu else result
            results.append(here.reshape(array.shape)[()])
        return tree.unflatten(value, results)

    def _numbered(
        self,
        kind: str,
        op: str | None,
        signature: Signature,
        wait: float = 0,
        counts: bool = True,
        waits: bool = True,
    ) -> _Guard:
        """Return a context that yields the next call; its waits last at most `wait` seconds.

        If `counts`, recovery compares whether the call was completed. It counts if every replica
        receives from all others in it, or if it writes variables. A call that `waits` involves
        other processes.
        """
        self.waited_since |= waits and self.has_written
        if current_trace() is not None and not self._backend.is_traced:
            raise TypeError(
                f"{kind} was called in a compiled function, which each of {self.size} replicas "
                "calls separately. Compile code without collectives, such as the loss and its "
                "gradients, and call apply_gradients or all_reduce after it. Under "
                "nd.TPUStrategy the whole step is compiled."
            )
        if self.part_of is None:
            self.calls_made += 1
        guard = self.guard
        guard.is_part, guard.counts = self.part_of is not None, counts
        number, wait = self.part_of or self.calls_made, wait or self._timeout
        guard.history.append(Call(number, kind, op, signature, self.purpose, wait))
        return guard


class _Guard:
    """The context of a call: it yields the call, and records its end or adds notes to its error."""

    def __init__(self, rank: int, where: StepTracker | None) -> None:
        self.history: deque[Call] = deque(maxlen=8)
        self.is_part, self.counts = False, True
        self._rank = rank
        self._where = where

    def __enter__(self) -> Call:
        return self.history[-1]

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, DistributeError):
            earlier = ", ".join(f"#{past.sequence} {past}" for past in self.history)
            error.add_note(f"the last calls of replica {self._rank}: {earlier}")
        if error is None and self._where is not None and not self.is_part:
            self._where.finished = self.history[-1].sequence
            if self.counts:
                self._where.exchanged = self._where.finished


def _rows_first(array: Array, axis: int) -> Array:
    """Return a contiguous array in which `axis` is the first axis.

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


class Outputs:
    """Provides arrays for results; the memory of large arrays is reused."""

    def __init__(self) -> None:
        self._memory = ReusedMemory(_KEPT_BYTES)

    def like(self, inputs: Arrays) -> list[Array]:
        """Return uninitialised arrays of the same sizes and dtypes."""
        made = []
        for array in inputs:
            if type(array) is not np.ndarray:
                made.append(array_namespace(array).empty(array.size, array.dtype))
            elif array.nbytes < SMALL_BYTES:
                made.append(np.empty(array.size, array.dtype))
            else:
                memory = self._memory.take(array.nbytes)
                made.append(np.ndarray(array.size, array.dtype, memory))
        return made
