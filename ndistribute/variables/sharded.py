"""Variables of which each replica stores one shard, for layers that are divided among replicas."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np

from ndistribute.devices import Array, Device, array_namespace, copy_to
from ndistribute.stream import working_on
from ndistribute.values import PerReplica
from ndistribute.variables.mirrored import Cell, MirroredVariable
from ndistribute.variables.policy import VariablePolicy, Write
from ndistribute.variables.variable import Variable, create_variable


class ShardedVariable(MirroredVariable):
    """A variable that is cut along an axis, with one contiguous shard on each replica.

    Inside a replica it is that replica's shard; outside replicas it is the whole, gathered from
    all. An optimizer updates each shard by its replica's own gradient, without an all-reduce.
    """

    def _set_up(self, strategy: Any, array: Array, policy: VariablePolicy) -> None:
        Variable._set_up(self, strategy, array, policy)
        count, axis = strategy.num_replicas_in_sync, policy.shard_axis or 0
        if not 0 <= axis < array.ndim or array.shape[axis] < count:
            raise ValueError(
                f"variable {policy.name!r} of shape {array.shape} cannot be cut along axis {axis} "
                f"into a shard for each of {count} replicas: pass an axis, counted from 0, that is "
                "at least so long, or do not shard it."
            )
        contexts = strategy.replica_contexts
        self.home_of = list(range(len(contexts)))
        self._cuts = [self.cut(context.replica_id_in_sync_group) for context in contexts]
        self._cells = [
            Cell(array[cut], context.device)
            for cut, context in zip(self._cuts, contexts, strict=True)
        ]

    def cut(self, rank: int) -> tuple[slice, ...]:
        """Return the index of a replica's shard in the whole."""
        axis = self._policy.shard_axis or 0
        count, length = self._strategy.num_replicas_in_sync, self._shape[axis]
        part = slice(length * rank // count, length * (rank + 1) // count)
        return (slice(None),) * axis + (part,)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value that a read returns here: the shard's inside a replica."""
        replica = self.replica("read")
        return self._shape if replica is None else self._cell_of(replica).array.shape

    def component(self) -> Array:
        """Return this replica's shard, or the whole outside replicas."""
        replica = self.replica("read")
        if replica is not None:
            return self._cell_of(replica).read()
        if self._strategy.num_replicas_in_sync == 1:
            return self._cells[0].read()
        shards = self._strategy.across_workers(PerReplica(self.values)).values
        home: Device = self._cells[0].device
        with working_on(home):
            moved = [copy_to(shard, home) for shard in shards]
            whole = array_namespace(*moved).concatenate(moved, axis=self._policy.shard_axis)
        if isinstance(whole, np.ndarray):
            whole.flags.writeable = False
        return whole

    def _cell_of(self, replica: Any) -> Cell:
        cell: Cell = self._cells[replica.local_replica_id]
        return cell

    def _checked_write(self, how: str, value: Any) -> Self:
        if self.replica("write") is not None:
            raise RuntimeError(
                f"{how} to the sharded variable {self.name!r} inside run: assign the whole value "
                "outside run, or let an optimizer update it."
            )
        return super()._checked_write(how, value)

    def _checked_scatter(self, how: str, indices: Any, values: Any) -> Self:
        raise ValueError(
            f"a scatter to the sharded variable {self.name!r}: assign the whole value."
        )

    def _apply(self, write: Write) -> None:
        for cell, cut in zip(self._cells, self._cuts, strict=True):
            cell.apply(Write(write.how, write.value[cut]))


def sharded_variable(
    initial_value: Any, axis: int, *, name: str | None = None, dtype: Any = None
) -> Variable:
    """Return a trainable variable of which each replica stores one shard.

    Inside a step of `run` the variable is this replica's shard. Elsewhere it is the whole, so
    checkpoints do not depend on the number of replicas.

    Args:
        initial_value: the whole, or a function that returns it.
        axis: the axis to cut, from 0; its length is at least the number of replicas.
        name: as for `Variable`.
        dtype: as for `Variable`.

    Raises:
        ValueError: the strategy keeps its variables on servers, or the axis is too short.

    >>> import ndistribute as nd
    >>> with nd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
    ...     w = sharded_variable(np.arange(6.0), axis=0)
    ...     strategy.local_results(strategy.run(lambda: w + 0)), w.numpy()
    ((array([0., 1., 2.]), array([3., 4., 5.])), array([0., 1., 2., 3., 4., 5.]))
    """
    policy = replace(
        VariablePolicy.parse(name, True, "auto", "none"), shard_axis=operator.index(axis)
    )
    made: Variable = create_variable(initial_value, dtype, policy)
    return made


def divided(variables: Sequence[Any]) -> list[int]:
    """Return which variables are divided among replicas: each replica has its shard's gradient."""
    return [
        index
        for index, variable in enumerate(variables)
        if isinstance(variable, ShardedVariable)
        and variable.distribute_strategy.num_replicas_in_sync > 1
    ]
