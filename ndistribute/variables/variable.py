"""`Variable`: an array that a strategy keeps consistent over its replicas.

This file has the parts that all kinds of variables share: NumPy's array protocols, creation and
checks. A kind defines where its components are stored and what a write does. The current strategy
chooses the kind. Each use as an array reads a snapshot, which a gradient tape records.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn, Self

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from ndistribute import context, tree
from ndistribute.context import current_frame
from ndistribute.devices import (
    Array,
    array_namespace,
    as_array,
    device_of,
    is_device_array,
    to_host,
)
from ndistribute.dtypes import kind_of, native
from ndistribute.errors import CollectiveMismatchError
from ndistribute.indexed_slices import IndexedSlices
from ndistribute.numpy_functions import written_to
from ndistribute.stream import working_on
from ndistribute.values import DistributedValues
from ndistribute.variables.policy import (
    VariableAggregation,
    VariablePolicy,
    VariableSynchronization,
    Write,
    cast,
)


def _operator(function: Callable[[Any, Any], Any]) -> tuple[Callable[..., Any], ...]:
    # NumPy's protocol costs 1.5 us per call, and computes squares by `np.power`.
    def of_left(self: ArrayLike, other: Any) -> Any:
        return function(self.tracked_value(), _read(other))

    def of_right(self: ArrayLike, other: Any) -> Any:
        return function(_read(other), self.tracked_value())

    return of_left, of_right


def _conversion(function: Callable[[Any], Any]) -> Callable[[ArrayLike], Any]:
    return lambda self: function(self.tracked_value())


class ArrayLike(NDArrayOperatorsMixin):
    """An object that behaves like the array that its `component` returns."""

    __array_priority__ = 1000.0

    def component(self) -> Array:
        """Return the untracked array; on a GPU it is a view, which the caller must not write to."""
        raise NotImplementedError(f"{type(self).__name__} does not define component.")

    def raw_array(self) -> Array:
        """Return the array, untracked, for `ndistribute.devices.as_array`."""
        return self.component()

    def tracked_value(self) -> Any:
        """Return the array to compute with, tracked by the tape that watches this variable."""
        recorder = current_frame().recorder
        array = self.component()
        return array if recorder is None else recorder.read(self, array)

    def read_value(self) -> Any:
        """Return a snapshot that never changes, tracked by the tape that watches this variable."""
        recorder = current_frame().recorder
        array = detached(self.component())
        return array if recorder is None else recorder.read(self, array)

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return a copy as a NumPy array, which the caller owns."""
        return np.array(to_host(self.component()))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        # If a tape watches this variable, its tracked array raises, as the gradient would be lost.
        return np.array(to_host(self.tracked_value()), dtype=dtype, copy=copy)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        values = map(_read, inputs)
        if method == "__call__" and not kwargs:
            # CuPy's arrays support the operator, but not the generalised ufunc.
            return operator.matmul(*values) if ufunc is np.matmul else ufunc(*values)
        function, name = getattr(ufunc, method), f"np.{ufunc.__name__}"
        self._refuse_writes(function, f"{name}.at" if method == "at" else name, inputs, kwargs)
        return function(*values, **tree.map_leaves(_read, kwargs))

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        self._refuse_writes(function, f"np.{function.__name__}", args, kwargs)
        result = function(*tree.map_leaves(_read, args), **tree.map_leaves(_read, kwargs))
        return result if type(result) is np.ndarray else tree.map_leaves(detached, result)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(np.ndarray, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.read_value(), name)

    def __getitem__(self, index: Any) -> Any:
        return detached(self.tracked_value()[_read(index)])

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        self._refuse_in_place("variable[...] = value")

    def __contains__(self, item: Any) -> bool:
        return _read(item) in self.component()

    def __iter__(self) -> Any:
        return iter(self.read_value())

    def __index__(self) -> int:
        return operator.index(to_host(self.component())[()])

    def __format__(self, spec: str) -> str:
        return format(to_host(self.component())[()], spec) if spec else str(self)

    __hash__ = object.__hash__
    __len__ = _conversion(len)
    __bool__ = _conversion(bool)
    __float__ = _conversion(float)
    __int__ = _conversion(int)
    __complex__ = _conversion(complex)
    __add__, __radd__ = _operator(operator.add)
    __sub__, __rsub__ = _operator(operator.sub)
    __mul__, __rmul__ = _operator(operator.mul)
    __truediv__, __rtruediv__ = _operator(operator.truediv)
    __matmul__, __rmatmul__ = _operator(operator.matmul)
    __pow__, __rpow__ = _operator(operator.pow)

    def _refuse_writes(self, function: Any, name: str, args: Any, kwargs: Any) -> None:
        for how, array in written_to(function, args, kwargs):
            if isinstance(array, ArrayLike):
                is_output = how == "out="
                call = "(..., out=variable), for example by +=," if is_output else "(variable, ...)"
                self._refuse_in_place(f"{name}{call}")

    def _refuse_in_place(self, what: str) -> NoReturn:
        raise TypeError(
            f"{what} cannot change a variable: use assign, assign_add, assign_sub or "
            "scatter_update, which change all its copies."
        )


def detached(value: Any) -> Any:
    """Return an array whose changes do not affect a variable."""
    # A snapshot on a CPU is read-only. CuPy has no such flag, so a view on a GPU is copied.
    if type(value) is np.ndarray or not is_device_array(value) or value.base is None:
        return value
    with working_on(device_of(value)):
        return value.copy()


def _read(value: Any) -> Any:
    return value.tracked_value() if isinstance(value, ArrayLike) else value


class Variable(ArrayLike):
    """An array that keeps its value between steps and that all replicas share.

    The current strategy determines where it is stored. `assign`, `assign_add` and `assign_sub`
    change the value; `scatter_update` and its relatives change rows of it.

    Args:
        initial_value: an array, a number, or a callable that returns one. It is copied.
        trainable: whether tapes watch the variable; None: True, but False with the synchronization
            ON_READ, where each replica has its own value.
        name: the name in messages and on servers; None: ``Variable``, ``Variable_1`` and so on.
        dtype: the variable's dtype; None means that of the initial value.
        synchronization: a `VariableSynchronization` or its value.
        aggregation: a `VariableAggregation` or its value.

    Raises:
        TypeError: `name` is not a string, or `trainable` is a string.
        ValueError: an argument is invalid or does not fit the dtype, or replicas disagree.

    >>> v = Variable([1.0, 2.0])
    >>> v.assign_add([1.0, 1.0]).numpy()
    array([2., 3.])
    >>> v * 2
    array([4., 6.])
    """

    _internal = frozenset(
        "begin_update component home_of is_distributed_variable join_cells make raw_array "
        "replica tracked_value".split()
    )
    is_distributed_variable = True

    def __new__(
        cls,
        initial_value: Any,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: Any = None,
        synchronization: VariableSynchronization | str = "auto",
        aggregation: VariableAggregation | str = "none",
    ) -> Variable:
        policy = VariablePolicy.parse(name, trainable, synchronization, aggregation)
        made: Variable = create_variable(initial_value, dtype, policy)
        return made

    @classmethod
    def make(cls, strategy: Any, array: Array, policy: VariablePolicy) -> Self:
        """Return a new variable of this kind; ``Variable(...)`` chooses the kind and calls this."""
        made = object.__new__(cls)
        made._set_up(strategy, array, policy)
        strategy.note_variable(made)
        return made

    def _set_up(self, strategy: Any, array: Array, policy: VariablePolicy) -> None:
        """Allocate the components; a kind extends this."""
        self._strategy = strategy
        self._shape = tuple(array.shape)
        self._dtype: np.dtype[Any] = np.dtype(array.dtype)
        self._policy = policy

    def create_slot(self, name: str, value: complex = 0.0, dtype: Any = None) -> Variable:
        """Return a new variable with the shape and the storage of this one, for an optimizer.

        Args:
            name: appended to this variable's name; on servers, all workers share the slot.
            value: the initial value of all elements.
            dtype: the slot's dtype; None means this variable's.

        Raises:
            ValueError: the variable's aggregation is undefined for the dtype.
            RuntimeError: called inside a replica, where each replica would create its own slot.

        >>> Variable([1.0, 2.0], name="w").create_slot("adam/m")
        <MirroredVariable 'w/adam/m' float64(2,) [0. 0.]>
        """
        replica = self.replica("create_slot")
        # An optimizer's call creates slots once for all replicas, and sets `part_of` meanwhile.
        if replica is not None and replica.communicator.part_of is None:
            raise RuntimeError(
                f"create_slot of variable {self.name!r} was called inside a replica: call it "
                "outside run, or in a merge_call, so that all replicas use the same slot."
            )
        array = np.broadcast_to(np.array(value, dtype or self._dtype), self._shape)
        policy = replace(self._policy, name=f"{self.name}/{name}", trainable=False)
        policy.check_dtype(array.dtype)
        return self._make_beside(name, array, policy)

    def join_cells(self) -> None:
        """Let compiled steps for several devices hold the components in one array."""

    def _make_beside(self, name: str, array: Array, policy: VariablePolicy) -> Variable:
        return type(self).make(self._strategy, array, policy)

    @property
    def values(self) -> tuple[Array, ...]:
        """Snapshots of the components in this process: one, unless a kind has more."""
        return (detached(self.component()),)

    def _apply(self, write: Write) -> None:
        """Carry out a checked write once for all replicas of this process, which wait meanwhile."""
        raise NotImplementedError(f"{type(self).__name__} does not define writes.")

    def _apply_own(self, write: Write, replica: Any) -> None:
        """Carry out one replica's checked write to a variable that is synchronized on read."""
        self._apply(write)

    @property
    def value(self) -> Any:
        """A snapshot of the value, tracked by the tape that watches this variable."""
        return self.read_value()

    @property
    def distribute_strategy(self) -> Any:
        """The strategy that the variable belongs to."""
        return self._strategy

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return self._shape

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self._shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype, which never changes."""
        return self._dtype

    @property
    def name(self) -> str:
        """The name, which messages and servers use."""
        return self._policy.name

    @property
    def trainable(self) -> bool:
        """True if tapes watch the variable."""
        return self._policy.trainable

    @property
    def synchronization(self) -> VariableSynchronization:
        """When the replicas' values are combined."""
        return self._policy.synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """How the replicas' values are combined."""
        return self._policy.aggregation

    def assign(self, value: Any) -> Self:
        """Set the value; inside `run`, set it to the aggregate of the replicas' values.

        Args:
            value: an array or number of the variable's shape; its dtype must fit the variable's.

        Returns:
            The variable.

        Raises:
            ValueError: the shape or dtype does not fit, or the variable has no aggregation. The
                variable is unchanged.
        """
        return self._checked_write("assign", value)

    def assign_add(self, value: Any) -> Self:
        """Add an array or number of the variable's shape to the value; see `assign`."""
        return self._checked_write("assign_add", value)

    def assign_sub(self, value: Any) -> Self:
        """Subtract an array or number of the variable's shape from the value; see `assign`."""
        return self._checked_write("assign_sub", value)

    def scatter_add(self, indices: Any, values: Any = None) -> Self:
        """Add values to the rows at some indices, and return the variable.

        Args:
            indices: an array of k integers, or an `IndexedSlices` without `values`.
            values: the rows, broadcast to shape ``(k, *shape[1:])``; rows of equal indices add up.

        Raises:
            ValueError: an index is out of range, or a shape or dtype does not fit.
        """
        return self._checked_scatter("assign_add", indices, values)

    def scatter_sub(self, indices: Any, values: Any = None) -> Self:
        """Subtract values from the rows at some indices; see `scatter_add`."""
        return self._checked_scatter("assign_sub", indices, values)

    def scatter_update(self, indices: Any, values: Any = None) -> Self:
        """Set the rows at some indices; of equal indices the last row counts; see `scatter_add`."""
        return self._checked_scatter("assign", indices, values)

    def replica(self, what: str) -> Any:
        """Return the context of this thread's replica; None outside replicas or if it is alone."""
        frame = current_frame()
        current = frame.strategy
        if current is None:
            if what == "update" and self._strategy.running_on is not None:
                context.refuse_beside_a_step("apply_gradients", self._strategy)
            return None
        if current is self._strategy:
            alone = frame.replica is not None and frame.replica.num_replicas_in_sync == 1
            return None if alone else frame.replica
        plain = self._strategy.is_default
        if plain and (what == "read" or frame.replica is None):
            return None
        raise RuntimeError(
            f"{what} of variable {self.name!r} under {current!r}, but "
            f"{context.told_apart(self._strategy, current)} made it: create variables and "
            "optimizers inside the scope of the strategy that uses them."
        )

    def _write(self, write: Write) -> None:
        """Carry out a checked write according to the variable's synchronization and aggregation."""
        replica = self.replica("write")
        if replica is None:
            self._apply(write)
        elif self.synchronization is VariableSynchronization.ON_READ:
            self._apply_own(write, replica)
        elif self.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"{write.how} to variable {self.name!r} inside run: each replica passes its own "
                "value. Create the variable with aggregation='sum', 'mean' or "
                "'only_first_replica', which combines them."
            )
        else:
            self._write_together(write, replica.communicator)

    def _write_together(self, write: Write, communicator: Any) -> None:
        """Combine the writes of all replicas, and carry the result out once in each process."""

        def apply_once(writes: Sequence[tuple[Variable, Write]]) -> None:
            written, whole = writes[0]
            for rank, (other, _) in enumerate(writes):
                if other is not written:
                    raise CollectiveMismatchError(
                        f"{write.how} #{communicator.calls_made}: replica {rank} wrote to variable "
                        f"{other.name!r}, replica 0 to {written.name!r}. Every replica must write "
                        "to the same variables in the same order.",
                        rank=rank,
                        op=write.how,
                        sequence=communicator.calls_made,
                    )
            written._apply(whole)

        communicator.purpose = f"{write.how} to {self.name!r}"
        try:
            combined = write.aggregated(self.aggregation, communicator)
        finally:
            communicator.purpose = ""
        communicator.merge(write.how, (self, combined), apply_once, writes=True)

    def _checked_write(self, how: str, value: Any) -> Self:
        array = self._cast(how, value)
        if array.shape != self._shape:
            raise ValueError(
                f"{how} of an array of shape {array.shape} to variable {self.name!r} of shape "
                f"{self._shape}: the shapes must be equal. Nothing has changed."
            )
        self._write(Write(how, array))
        return self

    def _checked_scatter(self, how: str, indices: Any, values: Any) -> Self:
        if isinstance(indices, IndexedSlices):
            indices, values = indices.indices, indices.values
        where = f"scatter ({how}) on variable {self.name!r} of shape {self._shape}"
        if not self._shape:
            raise ValueError(f"{where}: a variable without axes has no rows. Nothing has changed.")
        rows = as_array(indices)
        is_traced = hasattr(rows, "on_device")  # In a compiled step the indices have no values.
        rows = native(np.atleast_1d(rows if is_traced else to_host(rows)))
        if rows.size == 0:
            rows = rows.astype(np.int64)
        if rows.dtype.kind not in "iu" or rows.ndim != 1:
            raise ValueError(
                f"{where}: indices must be integers of one axis, got {rows.dtype} of shape "
                f"{rows.shape}. Nothing has changed."
            )
        inside = (rows >= 0) & (rows < self._shape[0])
        if is_traced:
            wrong = f"{where}: an index is not in [0, {self._shape[0]}). Nothing has changed."
            context.current_trace().check(inside, lambda: ValueError(wrong))
        elif (outside := rows[~inside]).size:
            raise ValueError(
                f"{where}: index {outside[0]} is not in [0, {self._shape[0]}). Nothing has changed."
            )
        array = self._cast(how, values)
        expected = (len(rows), *self._shape[1:])
        try:
            array = array_namespace(array).broadcast_to(array, expected)
        except ValueError:
            raise ValueError(
                f"{where}: {len(rows)} indices need values of shape {expected}, got {array.shape}. "
                "Nothing has changed."
            ) from None
        self._write(Write(how, IndexedSlices(array, rows, self._shape)))
        return self

    def _cast(self, how: str, value: Any) -> Array:
        """Return a value to write, as an array of the variable's dtype."""
        if isinstance(value, DistributedValues):
            raise ValueError(
                f"{how} of a {type(value).__name__} to variable {self.name!r}: across replicas a "
                "variable takes one value. Combine it first with strategy.reduce(op, value), or "
                "assign inside run."
            )
        return cast(value, self._dtype, f"{how} to variable {self.name!r}")

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in self._internal]

    def __reduce__(self) -> Any:
        raise TypeError(
            f"variable {self.name!r} cannot be copied or pickled, because it belongs to "
            f"{self._strategy!r}. Copy or send variable.numpy(), and create a variable from it."
        )

    def __repr__(self) -> str:
        try:
            shown = np.array2string(to_host(self.component()), threshold=20)
        except (ValueError, RuntimeError) as error:
            shown = f"<not readable here: {error}>"
        return f"<{type(self).__name__} {self.name!r} {self._dtype.name}{self._shape} {shown}>"


def create_variable(initial_value: Any, dtype: Any, policy: VariablePolicy) -> Any:
    """Return a new variable; inside `run`, all replicas call this, and get the same object."""
    if isinstance(initial_value, DistributedValues):
        raise ValueError(
            "the initial value of a variable must be the same on every replica, got a "
            f"{type(initial_value).__name__}: pass one component of it."
        )
    strategy, replica = context.get_strategy(), context.get_replica_context()
    if (trace := context.current_trace()) is not None:
        trace.created += 1
        with context.tracing(None):  # Its value is plain, and the same in all traces.
            return _create(strategy, _initial_array(initial_value, dtype), policy)
    if replica is None or replica.num_replicas_in_sync == 1:
        return _create(strategy, _initial_array(initial_value, dtype), policy)
    array = None
    if replica is strategy.replica_contexts[0]:
        # On this replica's thread, because a callable may use the replica's generator.
        array = _initial_array(initial_value, dtype)

    def create(requests: Sequence[tuple[str, VariablePolicy, Array]]) -> Any:
        wanted, first_policy, first_array = requests[0]
        for rank, (described, _, _) in enumerate(requests):
            if described != wanted:
                raise ValueError(
                    f"replica {rank} created a variable with {described}, replica 0 with {wanted}. "
                    "Replicas must create the same variables in the same order inside run."
                )
        return _create(strategy, first_array, first_policy)

    request = (_described(initial_value, dtype, policy), policy, array)
    with replica.communicator.uncounted():  # A worker that joins creates it later than others.
        return replica.communicator.merge("Variable", request, create)


def _create(strategy: Any, array: Array, policy: VariablePolicy) -> Any:
    number = None if policy.name else next(strategy.numbers)
    if number is not None:
        policy = replace(policy, name=f"Variable_{number}" if number else "Variable")
    try:
        array = strategy.agree_on(array, policy)
    except BaseException:
        if number is not None:  # Some workers may not have the value yet, and try again with it.
            strategy.numbers = itertools.count(number)
        raise
    policy.check_dtype(array.dtype)
    return strategy.make_variable(array, policy)


def _initial_array(initial_value: Any, dtype: Any) -> Array:
    value = initial_value() if callable(initial_value) else initial_value
    array = as_array(value)
    wanted = np.dtype(array.dtype if dtype is None else dtype)
    for each in (array.dtype, wanted):
        if kind_of(each) not in "biufc":
            raise ValueError(f"a variable holds numbers, not {each}, got {value!r}.")
    return cast(value, wanted.newbyteorder("="), "the initial value of a variable")


def _described(value: Any, dtype: Any, policy: VariablePolicy) -> str:
    """Return a text of the arguments that must be the same on all replicas."""
    wanted, shown = None if dtype is None else np.dtype(dtype), "a callable initial value"
    if not callable(value):
        array = as_array(value)
        shown, wanted = f"shape {array.shape}", wanted or np.dtype(array.dtype)
    return f"{shown}, dtype {wanted}, {policy}"
