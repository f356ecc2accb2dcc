"""`Strategy`: who runs what where.

The base class holds everything that users call. A strategy says which devices it has, how their
replicas meet, and which kind of variable a policy means.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from ndistribute import context, tree
from ndistribute.autodiff import untrack
from ndistribute.collective.reduce_op import ReduceOp
from ndistribute.collective.replica_group import ReplicaGroup
from ndistribute.collective.select import make_group
from ndistribute.context import Frame, chosen, current_frame, entered
from ndistribute.data import distribute, distribute_from_function
from ndistribute.device import Array, Device
from ndistribute.replica_context import ReplicaContext
from ndistribute.strategies.components import ValueContext, components_of
from ndistribute.strategies.frames import cross_replica_frame
from ndistribute.strategies.generators import ReplicaGenerators
from ndistribute.strategies.reductions import gather_value, reduce_value
from ndistribute.strategies.replicas import ReplicaPool
from ndistribute.strategies.turn import Turn
from ndistribute.values import PerReplica
from ndistribute.variables.mirrored import MirroredVariable
from ndistribute.variables.policy import VariablePolicy, VariableSynchronization
from ndistribute.variables.sync_on_read import SyncOnReadVariable
from ndistribute.variables.variable import Variable

__all__ = ["Strategy"]

S = TypeVar("S", bound="Strategy")


class Strategy:
    """Run a step on every replica of a set of devices, and bring their values together.

    Args:
        devices: one for each replica.

    >>> import ndistribute as nd
    >>> isinstance(nd.MirroredStrategy(["cpu:0"]), nd.Strategy)
    True
    """

    is_default = False

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = tuple(devices)
        self._closed = False
        self._turn = Turn()
        self._generators = ReplicaGenerators(self._devices)
        self._build()

    # What a strategy may override.

    def make_group(self) -> ReplicaGroup:
        """Make the communicators of the replicas."""
        return make_group(self._devices)

    def variable_kind(self, synchronization: VariableSynchronization) -> type[Variable]:
        """Return the class of variables with this synchronization."""
        if synchronization is VariableSynchronization.ON_READ:
            return SyncOnReadVariable
        return MirroredVariable

    def make_variable(self, array: Array, policy: VariablePolicy) -> Variable:
        """Make the variable that a policy means, with an initial value."""
        return self.variable_kind(policy.synchronization).make(self, array, policy)

    def across_workers(self, value: Any) -> Any:
        """Return a nest with the components of all processes' replicas in each `PerReplica`."""
        return value

    def agree_on(self, initial_value: Any, what: str) -> Any:
        """Return the array with which a new variable starts, the same on all processes.

        `what` describes the variable, in the same words everywhere.
        """
        return initial_value

    # What users call.

    @property
    def devices(self) -> tuple[Device, ...]:
        """Return the device of each replica of this process."""
        return self._devices

    @property
    def num_replicas_in_sync(self) -> int:
        """Return the number of replicas that reduce together."""
        return self._group.communicators[0].size

    @property
    def cluster_resolver(self) -> Any:
        """Return who else is in the job: None for a strategy of one process."""
        return None

    @property
    def replica_contexts(self) -> tuple[ReplicaContext, ...]:
        """Return the contexts of this process's replicas."""
        return self._contexts

    @contextlib.contextmanager
    def scope(self: S) -> Iterator[S]:
        """Make this strategy current for a ``with`` block: variables created there are its own.

        Raises:
            RuntimeError: inside a replica, or in the scope of another strategy.
        """
        frame = cross_replica_frame(self, "scope")
        with entered(Frame(chosen(self), None, frame.recorder, frame.merging)):
            yield self

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Call a function on every replica, all at once.

        Args:
            fn: the step. Inside it `get_replica_context` gives the replica.
            args: a list or tuple; of a `PerReplica` anywhere in it each replica gets its own
                component, everything else passes as it is.
            kwargs: likewise.
            options: taken for compatibility; there is nothing to choose.

        Returns:
            What `fn` returned, with a `PerReplica` at each leaf; None where every replica
            returned None.

        Raises:
            ValueError: `args` is neither list nor tuple, a `PerReplica` has another number of
                components, or the replicas returned different structures.
            RuntimeError: called inside a replica or a merge_call.
            BaseException: whatever a replica raised, with a note that names the replica.
        """
        if not isinstance(args, list | tuple):
            raise ValueError(
                f"args must be a list or tuple, got {type(args).__name__}: write "
                "strategy.run(step, args=(x,))."
            )
        frame = cross_replica_frame(self, "run")
        if frame.merging:
            raise RuntimeError(
                "run was called inside merge_call: the replicas are waiting there. Return the "
                "value and call run outside."
            )
        size = len(self._devices)
        named = dict(kwargs or {})
        calls = [
            (tree.select(args, rank, size), tree.select(named, rank, size)) for rank in range(size)
        ]

        def step(rank: int) -> Any:
            own_args, own_named = calls[rank]
            return untrack(fn(*own_args, **own_named))

        return tree.regroup(self._run_on_all(step), context.join_leaf)

    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        """Combine a value over replicas.

        Args:
            reduce_op: a `ReduceOp` or its name.
            value: a nest of `PerReplica`; a plain leaf counts as the same on every replica.
            axis: None, or the axes that are reduced inside each replica too; a mean then divides
                by the true number of elements.

        Returns:
            The nest, with one combined array or number at each leaf.

        Raises:
            ValueError: the op is unknown, shapes differ, or an axis is out of range.
            RuntimeError: called inside a replica.
        """
        cross_replica_frame(self, "reduce")
        op = ReduceOp.parse(reduce_op)
        value = self.across_workers(value)
        return reduce_value(op, value, axis, self._devices[0], self.num_replicas_in_sync)

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenate a value over replicas, in replica order.

        Args:
            value: a nest of `PerReplica`; lengths along `axis` may differ.
            axis: the axis to join along.

        Raises:
            ValueError: a component has no such axis, or other lengths differ.
            RuntimeError: called inside a replica.
        """
        cross_replica_frame(self, "gather", instead="all_gather")
        value = self.across_workers(value)
        return gather_value(value, axis, self._devices[0], self.num_replicas_in_sync)

    def distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        """Cut each batch of a dataset into one piece per replica.

        Args:
            dataset: batched by the global batch size.
            options: `InputOptions`.

        Returns:
            A re-iterable of nests of `PerReplica`.
        """
        return distribute(dataset, self._devices, options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[Any], Any], options: Any = None
    ) -> Any:
        """Feed the replicas from a dataset of per-replica batches.

        Args:
            dataset_fn: called with an `InputContext`, returns the dataset.
            options: `InputOptions`.
        """
        return distribute_from_function(dataset_fn, self._devices, options)

    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Make a value for each replica.

        Args:
            value_fn: called with a `ValueContext` for each replica.

        Returns:
            A `PerReplica`, or a nest of them.
        """
        size = self.num_replicas_in_sync
        made = [value_fn(ValueContext(c.replica_id_in_sync_group, size)) for c in self._contexts]
        return tree.regroup(made, PerReplica)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return this process's components of a value, ``(value,)`` for a plain one.

        >>> import ndistribute as nd
        >>> nd.get_strategy().local_results({"x": nd.PerReplica([1])})
        ({'x': 1},)
        """
        return components_of(value)

    def close(self) -> None:
        """End the replica threads; variables stay readable, `run` does not work any more.

        Raises:
            RuntimeError: called inside a replica or a merge_call of this strategy.
        """
        frame = current_frame()
        if frame.strategy is self and (frame.replica is not None or frame.merging):
            raise RuntimeError(f"close of {self!r} was called inside a step that it runs.")
        with self._turn.taken(self):
            self._closed = True
            self._pool.close()

    experimental_distribute_dataset = distribute_dataset
    experimental_distribute_values_from_function = distribute_values_from_function
    experimental_local_results = local_results
    experimental_run_v2 = run

    def __enter__(self: S) -> S:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, map(str, self._devices)))})"

    def _build(self) -> None:
        """Make the replicas' communicators, contexts and threads."""
        self._group = self.make_group()
        self._contexts = tuple(
            ReplicaContext(self, communicator, device, self._generators.of)
            for communicator, device in zip(self._group.communicators, self._devices, strict=True)
        )
        self._pool = ReplicaPool(self._group, self._contexts, repr(self))

    def _run_on_all(self, step: Callable[[int], Any]) -> list[Any]:
        with self._turn.taken(self):
            if self._closed:
                raise RuntimeError(f"{self!r} was closed: make a new strategy to run steps.")
            try:
                return self._pool.run(step)
            finally:
                if self._pool.abandoned:
                    self._build()
