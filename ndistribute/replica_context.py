"""`ReplicaContext`: a replica's place among the others, and the calls by which they meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ndistribute import tree
from ndistribute.context import (
    Frame,
    chosen,
    current_frame,
    entered,
    get_replica_context,
    join_leaf,
)

if TYPE_CHECKING:
    from ndistribute.collective.communicator import Communicator
    from ndistribute.device import Device
    from ndistribute.strategies.base import Strategy

__all__ = ["ReplicaContext"]


class ReplicaContext:
    """Give a replica its place among the others, and the calls by which they meet.

    Made by the strategy; reach it with `get_replica_context`.

    >>> import ndistribute as nd
    >>> strategy = nd.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> def step():
    ...     context = nd.get_replica_context()
    ...     return context.all_reduce("sum", context.replica_id_in_sync_group + 1.0)
    >>> [float(total) for total in strategy.run(step).values]
    [3.0, 3.0]
    >>> strategy.close()
    """

    __slots__ = ("_communicator", "_device", "_make_rng", "_strategy")

    def __init__(
        self,
        strategy: Strategy,
        communicator: Communicator,
        device: Device,
        make_rng: Callable[[int, int], Any],
    ) -> None:
        self._strategy = strategy
        self._communicator = communicator
        self._device = device
        self._make_rng = make_rng

    @property
    def replica_id_in_sync_group(self) -> int:
        """Return this replica's number, from 0."""
        return self._communicator.rank

    @property
    def num_replicas_in_sync(self) -> int:
        """Return how many replicas take part in every collective."""
        return self._communicator.size

    @property
    def local_replica_id(self) -> int:
        """Return which of the replicas of this process this one is, from 0."""
        return self._communicator.local_rank

    @property
    def strategy(self) -> Strategy:
        """Return the strategy that runs this replica."""
        return self._strategy

    @property
    def device(self) -> Device:
        """Return where this replica computes."""
        return self._device

    @property
    def communicator(self) -> Communicator:
        """Return the replica's communicator, for code that builds on collectives."""
        return self._communicator

    @property
    def rng(self) -> Any:
        """Return this replica's random generator: its own, the same in every run of a seed."""
        self._frame("rng")
        return self._make_rng(self._communicator.local_rank, self._communicator.rank)

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Reduce a value over all replicas; every replica gets the result.

        Args:
            reduce_op: a `ReduceOp` or its name in any case.
            value: a nest of arrays or numbers, the same shapes and dtypes on every replica.
            options: `CommunicationOptions`.

        Returns:
            The same nest; each replica owns its arrays.

        Raises:
            CollectiveMismatchError: replicas passed different shapes, dtypes or ops, or one made
                another call or none.
            CollectiveTimeoutError: a replica did not come in time.
        """
        recorder = self._frame("all_reduce").recorder
        if recorder is not None:
            return recorder.all_reduce(self._communicator, reduce_op, value, options)
        return self._communicator.all_reduce(reduce_op, value, options)

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Concatenate a value over all replicas, in replica order.

        Args:
            value: a nest of arrays; lengths along `axis` may differ between replicas.
            axis: the axis along which they are joined.
            options: `CommunicationOptions`.

        Returns:
            The same nest of joined arrays, on every replica.

        Raises:
            CollectiveMismatchError: ranks, dtypes or other axes' lengths differ.
        """
        recorder = self._frame("all_gather").recorder
        if recorder is not None:
            return recorder.all_gather(self._communicator, value, axis, options)
        return self._communicator.all_gather(value, axis, options)

    def merge_call(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function once for all replicas, in the cross-replica context.

        Args:
            fn: called as ``fn(strategy, *args, **kwargs)``; the leaves of its arguments are
                `PerReplica`, variables pass as themselves.
            args: this replica's arguments.
            kwargs: this replica's keyword arguments.

        Returns:
            What `fn` returned; of a `PerReplica` leaf, this replica's component.

        Raises:
            CollectiveMismatchError: not every replica called `merge_call`.
        """
        self._frame("merge_call")
        strategy = self._strategy

        def merged(calls: Sequence[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> Any:
            joined_args = tree.regroup([call[1] for call in calls], join_leaf)
            joined_kwargs = tree.regroup([call[2] for call in calls], join_leaf)
            with entered(Frame(chosen(strategy), None, merging=True)):
                return calls[0][0](strategy, *joined_args, **joined_kwargs)

        call = (fn, tuple(args), dict(kwargs or {}))
        result = self._communicator.merge("merge_call", call, merged)
        return tree.select(result, self._communicator.local_rank, self._communicator.local_size)

    def _frame(self, method: str) -> Frame:
        """Return the thread's frame, having checked that it is this replica's own."""
        frame = current_frame()
        if frame.replica is self or (frame.replica is None and get_replica_context() is self):
            return frame
        raise RuntimeError(
            f"{method} of the context of replica {self.replica_id_in_sync_group} was used outside "
            "that replica. Call get_replica_context() inside the function that "
            "strategy.run executes, and do not keep it."
        )

    def __repr__(self) -> str:
        return (
            f"ReplicaContext({self.replica_id_in_sync_group} of {self.num_replicas_in_sync}, "
            f"{self._device})"
        )
