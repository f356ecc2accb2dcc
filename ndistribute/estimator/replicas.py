"""The graphs of an estimator's replicas, and the sessions that run them side by side.

Each replica has a graph of its own, made by the same model function, and a session with its own
copies of the variables, which begin equal. A step runs all sessions, each on its replica's thread;
gradients meet there, so the variables stay equal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ndistribute import tree
from ndistribute.context import get_replica_context
from ndistribute.data import Dataset, InputContext
from ndistribute.data.dataset import as_dataset
from ndistribute.devices import to_host
from ndistribute.estimator.spec import EstimatorSpec
from ndistribute.graph.graph import Graph, Tensor, as_tensor
from ndistribute.graph.iterators import iterator_of
from ndistribute.graph.metrics import METRIC_VARIABLES
from ndistribute.graph.operations import placeholder
from ndistribute.graph.ops import op_named
from ndistribute.graph.partition import pruned
from ndistribute.graph.session import Session
from ndistribute.graph.variables import (
    GLOBAL_VARIABLES,
    get_or_create_global_step,
    global_variables,
    local_variables,
    variables_initializer,
)
from ndistribute.models.checkpoint import on_any_worker

BuildModel = Callable[[Any, Any], EstimatorSpec]


@dataclass
class Replica:
    """The graph of a replica, and its session once it is open."""

    graph: Graph
    inputs: Sequence[Tensor]
    spec: EstimatorSpec
    fetches: Any = None  # What each step computes.
    results: Any = None  # What the last one has computed: the metrics of an evaluation.
    session: Any = None
    raw: Any = None  # The session without hooks.

    def run(self, batch: Any) -> Any:
        """Return what the session computes, on the host, for a batch."""
        values = map(to_host, _arrays(batch))
        return self.session.run(self.fetches, dict(zip(self.inputs, values, strict=True)))


def build(
    make: BuildModel, batch: Any, *, seed: int | None = None, rank: int = 0, device: Any = None
) -> Replica:
    """Return the graph of a model, with placeholders for features and labels like those of a batch.

    Args:
        make: the model as a function of features and labels.
        batch: features, or features and labels.
        seed: the seed of the graph; None: a new one for each random operation.
        rank: the number of the replica; each draws other random numbers.
        device: where operations are placed, see `Graph.device`.
    """
    graph = Graph()
    if seed is not None:
        numbers = np.random.SeedSequence([seed, rank]).generate_state(1)
        graph.seed = int(numbers[0]) if rank else seed
    with graph.as_default(), graph.device(device):
        get_or_create_global_step()
        features, labels = _split(batch)
        features = tree.map_leaves(_input, features)
        labels = None if labels is None else tree.map_leaves(_input, labels)
        return Replica(graph, _arrays((features, labels)), make(features, labels))


@dataclass(frozen=True)
class Replicas:
    """The replicas of this process under a strategy."""

    strategy: Any
    all: Sequence[Replica]

    @property
    def first(self) -> Replica:
        """The replica whose session has the hooks and writes the checkpoints."""
        return self.all[0]

    def current(self) -> Replica:
        """Return the replica of this thread."""
        context = get_replica_context()
        return self.all[0 if context is None else context.local_replica_id]

    def open(self, stack: contextlib.ExitStack, session: Any) -> None:
        """Open the sessions, until the stack is closed, with the values of the very first.

        Args:
            stack: closes the sessions.
            session: the session of the first replica, with its hooks.
        """
        first = self.first
        first.session = stack.enter_context(session)
        first.raw = session.run_step_fn(lambda context: context.session)
        for replica in self.all[1:]:
            with replica.graph.as_default():
                initializer = variables_initializer([*global_variables(), *local_variables()])
                replica.session = replica.raw = stack.enter_context(contextlib.closing(Session()))
            replica.session.run(initializer)
        self._exchange(
            GLOBAL_VARIABLES, lambda values, context: context.communicator.broadcast(values)
        )

    def run(self, batches: Iterable[Any], after_step: Callable[[], None] = lambda: None) -> None:
        """Make a step with each batch until a hook asks to stop, which it may have done before."""

        def step(part: Any) -> None:
            if not is_empty(part):
                self.current().run(part)

        session, batches = self.first.session, iter(batches)
        while not session.should_stop() and (batch := next(batches, None)) is not None:
            self.strategy.run(step, (batch,))
            after_step()

    def sum_up_metrics(self) -> None:
        """Give the variables of metrics the sums of their values over all replicas."""
        self._exchange(METRIC_VARIABLES, lambda values, context: context.all_reduce("sum", values))

    def _exchange(self, collection: str, exchange: Callable[[Any, Any], Any]) -> None:
        """Give variables what a collective of the replicas returns for their values."""

        def step() -> None:
            replica, context = self.current(), get_replica_context()
            variables = replica.graph.get_collection(collection)
            values = exchange(replica.raw.run(variables), context)
            for variable, value in zip(variables, values, strict=True):
                variable.load(value, replica.raw)

        if self.strategy.num_replicas_in_sync > 1:
            self.strategy.run(step)


class Batches:
    """The batches of an input function for the replicas of this process.

    Args:
        strategy: the strategy of the replicas.
        source: called with an `InputContext`; returns the dataset of the batches of replicas.
    """

    def __init__(self, strategy: Any, source: Callable[[InputContext], Dataset]) -> None:
        self._strategy = strategy
        self._iterator = iter(strategy.distribute_datasets_from_function(source))
        self._next = next(self._iterator, None)
        if self._next is None:
            self.close()
            raise ValueError("input_fn gave no batch: its dataset is empty.")

    def example(self, rank: int) -> Any:
        """Return a batch of a replica, for its dtypes and shapes."""
        return self._strategy.local_results(self._next)[rank]

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of each step, with a component for each replica."""
        while self._next is not None:
            yield self._next
            self._next = next(self._iterator, None)

    def full(self) -> Iterator[Any]:
        """Yield the batches of the steps for which each replica of all workers has examples."""
        for batch in self:
            empty = any(is_empty(part) for part in self._strategy.local_results(batch))
            if on_any_worker(self._strategy, empty):
                return
            yield batch

    def close(self) -> None:
        """End the iteration."""
        self._iterator.close()


def dataset_of(given: Any, *, repeated: bool) -> Dataset:
    """Return what an input function returned as a dataset of batches.

    Args:
        given: a dataset, another re-iterable of batches, the tensors of a `DatasetIterator`, or one
            batch: an array, a dict of arrays, or a tuple of features and labels.
        repeated: whether one batch is given again and again.
    """
    if any(isinstance(leaf, Tensor) for leaf in tree.flatten(given)):
        return _dataset_behind(given, repeated)
    if not isinstance(given, tuple | dict) and not hasattr(given, "dtype"):
        return as_dataset(given)
    one = given[0] if isinstance(given, tuple) and len(given) == 2 and given[1] is None else given
    dataset = Dataset.from_tensors(tree.map_leaves(np.asarray, one))
    return dataset.repeat() if repeated else dataset


def _dataset_behind(nest: Any, repeated: bool) -> Dataset:
    """Return the dataset of batches like a nest of tensors: of an iterator, or of constants."""
    leaves = tree.flatten(nest)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    sources = {iterator_of(leaf) for leaf in tensors}
    iterator = sources.pop()
    if iterator is None or sources or len(tensors) < len(leaves):
        graph = tensors[0].graph
        definitions = {op.name: op.definition for op in graph.get_operations()}
        needed = pruned(definitions, [one.name for one in tensors], [], [])
        if not all(op_named(op.kind).pure for op in needed):
            raise ValueError(
                "input_fn returned tensors that are neither constant nor the results of one "
                "get_next(): compute with them in the model function, or with arrays in "
                "dataset.map()."
            )
        with graph.as_default(), contextlib.closing(Session()) as session:
            return dataset_of(session.run(tree.map_leaves(as_tensor, nest)), repeated=repeated)

    def like_nest(*batch: Any) -> Any:
        arrays = tree.flatten(batch)
        return tree.unflatten(nest, [arrays[leaf.index] for leaf in leaves])

    return as_dataset(iterator.dataset).map(like_nest)


def is_empty(batch: Any) -> bool:
    """Return True if a batch has no examples."""
    return any(np.ndim(one) and not len(one) for one in _arrays(batch))


def _split(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, tuple):
        return batch, None
    if len(batch) != 2:
        raise ValueError(
            f"a batch of input_fn is a tuple of {len(batch)} parts: it must be features, or a "
            "tuple of features and labels."
        )
    return batch[0], batch[1]


def _arrays(batch: Any) -> list[Any]:
    features, labels = _split(batch)
    return [*tree.flatten(features), *([] if labels is None else tree.flatten(labels))]


def _input(example: Any) -> Tensor:
    """Return the placeholder for batches like an example."""
    array = example if hasattr(example, "dtype") else np.asarray(example)
    dtype = np.dtype(object) if array.dtype.kind in "US" else array.dtype
    shape = (None, *array.shape[1:]) if array.ndim else ()
    return placeholder(dtype, shape, name="input")
