"""Strategies and the contexts of replicas whose results are tensors.

They are those of this package, with the methods that TensorFlow has under other names.
"""

from __future__ import annotations

from typing import Any

import ndistribute as nd
from ndistribute.compat.signatures import subclass, tensor_if_array
from ndistribute.compat.tensors import device_name
from ndistribute.strategies.local import DefaultStrategy
from ndistribute.tree import map_leaves
from ndistribute.values import DistributedValues


class StrategyExtended:
    """`strategy.extended`: what libraries use of a strategy, by its public methods."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self.call_for_each_replica = strategy.run
        self.worker_devices = self.parameter_devices = tuple(map(device_name, strategy.devices))

    def reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any = None) -> Any:
        """Return a value reduced over all replicas, which all destinations can read."""
        return self._strategy.reduce(reduce_op, value, axis=None)

    def batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any) -> Any:
        """Return the result of `reduce_to` for each pair."""
        return [self.reduce_to(reduce_op, *pair) for pair in value_destination_pairs]

    def update(self, var: Any, fn: Any, args: Any = (), kwargs: Any = None, group: Any = 1) -> Any:
        """Call a function with a variable, outside of replicas; all its copies change."""
        result = fn(var, *args, **(kwargs or {}))
        return None if group else result

    def read_var(self, v: Any) -> Any:
        """Return the value of a variable."""
        return v.read_value()


def strategy(kind: Any) -> Any:
    """Return a strategy whose results are tensors; those of one replica are no `PerReplica`."""

    def tensors_of(value: Any) -> Any:
        if not isinstance(value, DistributedValues):
            return tensor_if_array(value)
        return type(value)(map_leaves(tensor_if_array, each) for each in value.values)

    def shown(value: Any) -> Any:
        value = tensors_of(value)
        alone = isinstance(value, DistributedValues) and len(value.values) == 1
        return value.values[0] if alone else value

    def run(self: Any, fn: Any, args: Any = (), *more: Any, **options: Any) -> Any:
        if self.devices[0].kind != "tpu":  # A compiled step gets what its program takes.
            args = map_leaves(lambda x: tensors_of(x) if isinstance(x, kept) else x, args)
        return map_leaves(shown, kind.run(self, fn, args, *more, **options))

    kept = DistributedValues, nd.Variable

    def across(self: Any, value: Any) -> Any:
        """Return what `run` returned on one replica as what differs between workers."""
        if len(self.devices) > 1:
            return value
        return map_leaves(lambda x: x if isinstance(x, kept) else nd.PerReplica([x]), value)

    def reduce(self: Any, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        return map_leaves(tensor_if_array, kind.reduce(self, reduce_op, across(self, value), axis))

    def gather(self: Any, value: Any, axis: int) -> Any:
        return map_leaves(tensor_if_array, kind.gather(self, across(self, value), axis))

    def local_results(self: Any, value: Any) -> Any:
        return map_leaves(tensor_if_array, kind.local_results(self, value))

    return subclass(
        kind,
        run=run,
        reduce=reduce,
        gather=gather,
        local_results=local_results,
        experimental_run_v2=run,
        experimental_distribute_datasets_from_function=kind.distribute_datasets_from_function,
        extended=property(StrategyExtended),
        **dict.fromkeys(_IN_GRAPHS, refused_in_graphs),
    )


_IN_GRAPHS = "make_dataset_iterator", "make_input_fn_iterator", "experimental_run"


def refused_in_graphs(strategy: Any, *args: Any) -> Any:
    """Refuse what makes operations of a graph for each replica."""
    raise NotImplementedError(
        "a strategy runs steps at once, also for TensorFlow 1: write strategy.run(step, "
        "args=(next(iterator),)) with iterator = iter(strategy.experimental_distribute_dataset("
        "dataset)), or pass tf.estimator.RunConfig(train_distribute=strategy) to an Estimator."
    )


_default = strategy(DefaultStrategy)()


def get_strategy() -> Any:
    """Return the current strategy; the results of the default one are tensors, too."""
    current = nd.get_strategy()
    return _default if current.is_default else current


def by_communication(kind: Any) -> Any:
    """Return a strategy of workers whose first argument is how they communicate."""

    def init(
        self: Any, communication: Any = "auto", cluster_resolver: Any = None, **kw: Any
    ) -> None:
        options = nd.CommunicationOptions(implementation=communication)
        kind.__init__(self, cluster_resolver, **{"communication_options": options, **kw})

    return subclass(kind, __init__=init)


class ReplicaTensors:
    """The context of a replica, whose collectives return tensors."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def all_reduce(self, *args: Any, **options: Any) -> Any:
        """Return what all replicas' values give together."""
        return map_leaves(tensor_if_array, self._context.all_reduce(*args, **options))

    def all_gather(self, *args: Any, **options: Any) -> Any:
        """Return all replicas' values, joined."""
        return map_leaves(tensor_if_array, self._context.all_gather(*args, **options))


def get_replica_context() -> Any:
    """Return the context of this thread's replica; None outside of replicas."""
    context = nd.get_replica_context()
    return None if context is None else ReplicaTensors(context)
