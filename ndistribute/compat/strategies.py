"""Strategies with TensorFlow's methods, which return tensors, and the contexts of replicas."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import ndistribute as nd
from ndistribute import tree
from ndistribute.compat.signatures import subclass, tensor_if_array
from ndistribute.compat.tensors import device_name
from ndistribute.graph.graph import Symbolic, in_default_of_a_block
from ndistribute.strategies.local import DefaultStrategy
from ndistribute.strategies.parameter_server import ParameterServerStrategy
from ndistribute.tree import map_leaves
from ndistribute.values import DistributedValues, Mirrored


def _refuse_in_graphs(*nest: Any) -> Any:
    """Return the result of a step, unless it made operations of a graph."""
    if in_default_of_a_block() or any(isinstance(leaf, Symbolic) for leaf in tree.flatten(nest)):
        raise NotImplementedError(
            "a strategy runs steps at once, also for TensorFlow 1: write strategy.run(step, args=("
            "next(iterator),)) with iterator = iter(strategy.experimental_distribute_dataset("
            "dataset)), or pass tf.estimator.RunConfig(train_distribute=strategy) to an Estimator."
        )
    return nest[0] if nest else None


class InputIterator:
    """An iterator over a distributed dataset that `initialize` sets to its beginning."""

    def __init__(self, dataset: Any) -> None:
        _refuse_in_graphs()
        self._dataset = dataset
        self.initialize()

    def initialize(self) -> None:
        """Start again at the beginning of the input."""
        self._iterator = iter(self._dataset)

    def get_next(self) -> Any:
        """Return the next element; raise `OutOfRangeError` at the end."""
        return next(self._iterator)

    __next__ = get_next
    initializer = property(initialize)


class StepsContext:
    """The outputs that steps of `experimental_run_steps_on_iterator` pass to their caller."""

    run_op = None

    def __init__(self, strategy: Any, initial: Any) -> None:
        self._strategy = strategy
        self.last_step_outputs = dict(initial or {})
        self.non_tensor_outputs: dict[str, Any] = {}

    def set_last_step_output(self, name: str, output: Any, reduce_op: Any = None) -> None:
        """Keep an output of the last step, reduced over replicas if a reduction is passed."""
        if reduce_op is not None:
            output = self._strategy.reduce(reduce_op, output, axis=None)
        self.last_step_outputs[name] = output

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Keep an output that is not a tensor."""
        self.non_tensor_outputs[name] = output


class StrategyExtended:
    """`strategy.extended`: the methods of a strategy that libraries use."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self.call_for_each_replica = strategy.run
        self.worker_devices = self.parameter_devices = tuple(map(device_name, strategy.devices))
        self.experimental_require_static_shapes = strategy.needs_equal_parts
        self.experimental_make_numpy_dataset = strategy.experimental_make_numpy_dataset

    def reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any = None) -> Any:
        """Return a value reduced over all replicas, which all destinations can read."""
        return self._strategy.reduce(reduce_op, value, axis=None)

    def batch_reduce_to(
        self, reduce_op: Any, value_destination_pairs: Any, options: Any = None
    ) -> Any:
        """Return the result of `reduce_to` for each pair."""
        return [self.reduce_to(reduce_op, *pair) for pair in value_destination_pairs]

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Return a tensor as a value that is the same on every replica."""
        return Mirrored([tensor] * len(self._strategy.devices))

    def update(self, var: Any, fn: Any, args: Any = (), kwargs: Any = None, group: Any = 1) -> Any:
        """Call a function with a variable, outside of replicas; all its copies change.

        If each replica has its own value, the function is called on each replica.
        """
        strategy, named = self._strategy, dict(kwargs or {})
        if var.synchronization is nd.VariableSynchronization.ON_READ:
            result = strategy.run(fn, (var, *args), named)
        else:
            args, named = tree.select((tuple(args), named), 0, len(strategy.devices))
            result = self.update_non_slot(var, fn, (var, *args), named, group=False)
        return None if group else result

    def update_non_slot(
        self, colocate_with: Any, fn: Any, args: Any = (), kwargs: Any = None, group: Any = 1
    ) -> Any:
        """Call a function once, outside of replicas."""
        with self._strategy.scope():
            result = fn(*args, **(kwargs or {}))
        return None if group else result

    def non_slot_devices(self, var_list: Any) -> Any:
        """Return the devices for state that is not a slot of a variable."""
        return self.parameter_devices

    def read_var(self, v: Any) -> Any:
        """Return the value of a variable."""
        return v.read_value()

    def value_container(self, value: Any) -> Any:
        """Return the variable itself, which contains all its copies."""
        return value

    def variable_created_in_scope(self, v: Any) -> bool:
        """Return whether a variable belongs to the strategy."""
        return v.distribute_strategy is self._strategy

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """Return a context manager that creates variables on another variable's devices."""
        if isinstance(self._strategy, ParameterServerStrategy):
            raise NotImplementedError(
                "colocate_vars_with: variables go to the servers in turns, and an optimizer keeps "
                "its slots beside their variable: leave it out."
            )
        if not self.variable_created_in_scope(colocate_with_variable):
            raise ValueError(f"{colocate_with_variable!r} is not a variable of {self._strategy!r}.")
        yield

    def experimental_run_steps_on_iterator(
        self, fn: Any, iterator: Any, iterations: int = 1, initial_loop_values: Any = None
    ) -> StepsContext:
        """Call a function with a context and the next inputs, and return the context."""
        with self._strategy.scope():
            context = StepsContext(self._strategy, initial_loop_values)
            for _ in range(iterations):
                fn(context, next(iterator))
        return context


def _tensors_of(value: Any) -> Any:
    if not isinstance(value, DistributedValues):
        return tensor_if_array(value)
    return type(value)(map_leaves(tensor_if_array, each) for each in value.values)


def _shown(value: Any) -> Any:
    """Return a result with tensors; with one replica, it is not a `PerReplica`."""
    value = _tensors_of(value)
    alone = isinstance(value, DistributedValues) and len(value.values) == 1
    return value.values[0] if alone else value


def _of_tensors(function: Any) -> Any:
    """Return a function whose results are tensors."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        return map_leaves(tensor_if_array, function(*args, **options))

    return call


_DISTRIBUTED = DistributedValues, nd.Variable


class OfTensorFlow(nd.Strategy):
    """The additions to strategies of this package: more methods, and results that are tensors.

    With one replica, results are not `PerReplica`.
    """

    extended = property(StrategyExtended)

    def run(self, fn: Any, args: Any = (), *more: Any, **options: Any) -> Any:
        if self.devices[0].kind != "tpu":  # A compiled step gets what its program takes.
            convert = lambda x: _tensors_of(x) if isinstance(x, _DISTRIBUTED) else x  # noqa: E731
            args = map_leaves(convert, args)
        return map_leaves(_shown, super().run(fn, args, *more, **options))

    def _across(self, value: Any) -> Any:
        """Return a single replica's result of `run` as a value that differs between workers."""
        if len(self.devices) > 1:
            return value
        return map_leaves(lambda x: x if isinstance(x, _DISTRIBUTED) else nd.PerReplica([x]), value)

    @_of_tensors
    def reduce(self, reduce_op: Any, value: Any, axis: Any = None) -> Any:
        return super().reduce(reduce_op, self._across(value), axis)

    @_of_tensors
    def gather(self, value: Any, axis: int) -> Any:
        return super().gather(self._across(value), axis)

    @_of_tensors
    def local_results(self, value: Any) -> Any:
        return super().local_results(value)

    unwrap = nd.Strategy.experimental_local_results

    def distribute_dataset(self, dataset: Any, options: Any = None) -> Any:
        known = getattr(dataset, "_node", None)
        if known and known.spec.batched is False and self.num_replicas_in_sync == 1:
            return super().distribute_datasets_from_function(lambda _: dataset, options)
        return super().distribute_dataset(dataset, options)

    def experimental_distribute_datasets_from_function(self, *args: Any, **options: Any) -> Any:
        """Return the inputs of a function; see `distribute_datasets_from_function`."""
        return self.distribute_datasets_from_function(*args, **options)

    def make_dataset_iterator(self, dataset: Any) -> Any:
        """Return an iterator over a distributed dataset."""
        with self.scope():
            return InputIterator(self.distribute_dataset(dataset))

    def make_input_fn_iterator(self, input_fn: Any, replication_mode: Any = None) -> Any:
        """Return an iterator over a function's dataset, or over calls of a returned function."""

        def dataset_fn(context: Any) -> Any:
            made = input_fn(context)
            if not callable(made):
                return made
            return nd.Dataset.from_generator(lambda: iter(made, object()))

        with self.scope():
            return InputIterator(self.distribute_datasets_from_function(dataset_fn))

    def experimental_run(self, fn: Any, input_iterator: Any = None) -> Any:
        """Run a step on the next inputs."""
        args = () if input_iterator is None else (next(input_iterator),)
        return _refuse_in_graphs(self.run(fn, args))

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: Any = None) -> Any:
        """Return a dataset of the rows of arrays."""
        with self.scope():
            data: Any = sys.modules["ndistribute.compat.tf.data"]  # Its own method calls this one.
            return data.Dataset.from_tensor_slices(numpy_input)

    def group(self, value: Any, name: Any = None) -> None:
        """Do nothing, because the grouped operations have already run."""

    def configure(self, session_config: Any = None, **cluster: Any) -> None:
        """Do nothing, but refuse a cluster other than the constructor's."""
        if any(value is not None for value in cluster.values()):
            raise ValueError("configure: pass the cluster to the constructor, as cluster_resolver.")

    def update_config_proto(self, config_proto: Any) -> Any:
        """Return the configuration unchanged."""
        return config_proto


def strategy(kind: Any) -> Any:
    """Return a strategy of this package as one of `OfTensorFlow`."""
    return type(kind.__name__, (OfTensorFlow, kind), {"__doc__": kind.__doc__})


_default = strategy(DefaultStrategy)()


def _of_tensorflow(current: Any) -> Any:
    """Return a strategy; the results of the default strategy are tensors too."""
    return _default if current.is_default else current


def get_strategy() -> Any:
    """Return the current strategy; the results of the default strategy are tensors too."""
    return _of_tensorflow(nd.get_strategy())


def by_communication(kind: Any) -> Any:
    """Return a strategy of workers whose first argument is the way they communicate."""

    def init(
        self: Any, communication: Any = "auto", cluster_resolver: Any = None, **kw: Any
    ) -> None:
        options = nd.CommunicationOptions(implementation=communication)
        kind.__init__(self, cluster_resolver, **{"communication_options": options, **kw})

    return subclass(kind, __init__=init)


class ReplicaTensors:
    """The context of a replica; its collectives return tensors."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.strategy = _of_tensorflow(context.strategy)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._context, name)
        return _of_tensors(value) if name in ("all_reduce", "all_gather") else value

    def merge_call(self, merge_fn: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function once for all replicas; see `nd.ReplicaContext.merge_call`."""

        def merged(strategy: Any, *args: Any, **options: Any) -> Any:
            return merge_fn(_of_tensorflow(strategy), *args, **options)

        return _of_tensors(self._context.merge_call)(merged, args, kwargs)


def get_replica_context() -> Any:
    """Return the context of this thread's replica; None outside of replicas."""
    context = nd.get_replica_context()
    return None if context is None else ReplicaTensors(context)
