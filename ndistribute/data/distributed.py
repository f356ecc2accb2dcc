"""Distributed datasets: each step has one part of the global batch for every replica.

A dataset is divided among the workers in the same way in all epochs. An epoch can be interrupted
and resumed at any step: its iterator counts the steps that the consumer received, not those that a
background thread has prepared. If only each worker knows when its own data ends, a worker without
data takes part with empty batches until all workers have finished.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from ndistribute import tree
from ndistribute.context import current_frame
from ndistribute.data import pipeline
from ndistribute.data.agreement import begin, choose_sharding, compared, joint
from ndistribute.data.combining import in_rounds
from ndistribute.data.dataset import as_dataset
from ndistribute.data.iterator import TensorFlowIterator
from ndistribute.data.loaders import as_yielded, check_division
from ndistribute.data.options import InputContext, InputOptions, Sharding, Topology
from ndistribute.data.pipeline import Epoch, LeafSpec, Node, describe, upstream
from ndistribute.data.prefetch import Ahead, Threads
from ndistribute.data.sources import has_state
from ndistribute.data.steps import BATCH_IT, PipelineStep, Position, Progress, Reading, steps_of
from ndistribute.devices import Device
from ndistribute.timeline import recorded


def distribute(
    dataset: Any, topology: Topology, options: InputOptions | None = None
) -> DistributedDataset:
    """Return a dataset that divides each global batch among the replicas.

    Args:
        dataset: a `Dataset`, or any object that can be iterated over repeatedly and yields batches
            of the global batch size. All workers pass an equal one.
        topology: the replicas of this worker, and those of the other workers.
        options: None uses the options of the dataset, or the defaults if it has none.

    Raises:
        ValueError: the dataset is known to be unbatched, can be iterated over only once, or cannot
            be divided by the policy of the options.

    >>> from ndistribute.data import Dataset
    >>> topology = Topology((Device("cpu:0"), Device("cpu:1")), (2,))
    >>> dataset = distribute(Dataset.range(5).batch(4), topology)
    >>> [[piece.tolist() for piece in step.values] for step in dataset]
    [[[0, 1], [2, 3]], [[4], []]]
    """
    if isinstance(dataset, DistributedDataset):
        raise ValueError("distribute_dataset got a dataset that is already distributed.")
    _check_options(options, "distribute_dataset")
    node = as_dataset(dataset)._node
    if node.spec.batched is False:
        raise ValueError(f"distribute_dataset got an unbatched dataset. {BATCH_IT}")
    chosen = options or _options_of(node)
    if chosen.per_replica:
        raise ValueError(
            "distribute_dataset: experimental_replication_mode PER_REPLICA is for "
            "distribute_datasets_from_function only."
        )
    check_division((step.loader for step in upstream(node)), 1, 0)
    can_agree = topology.workers is not None
    sharding = choose_sharding(node, chosen.auto_shard_policy, topology.num_workers, can_agree)
    return DistributedDataset(Pipelines(lambda *_: node, topology), topology, sharding, chosen)


def distribute_from_function(
    fn: Callable[[InputContext], Any], topology: Topology, options: InputOptions | None = None
) -> DistributedDataset:
    """Return a dataset whose steps give each replica the next batch of a function's dataset.

    Args:
        fn: a function that returns a `Dataset`, or any object that can be iterated over repeatedly
            and yields batches of the per-replica size. It is called once, or once for each replica
            with PER_REPLICA in the options.
        topology: the replicas of all workers. With a process group, a worker whose dataset ends
            early takes part with empty batches; without a group, all workers need equally many
            steps.
        options: None uses the options of the dataset, or the defaults if it has none.

    Raises:
        ValueError: `fn` does not return a dataset.

    >>> from ndistribute.data import Dataset
    >>> topology = Topology((Device("cpu:0"), Device("cpu:1")), (2,))
    >>> dataset = distribute_from_function(lambda context: Dataset.range(3).batch(1), topology)
    >>> [[piece.tolist() for piece in step.values] for step in dataset]
    [[[0], [1]], [[2], []]]
    """
    _check_options(options, "distribute_datasets_from_function")
    if not callable(fn):
        raise TypeError(
            f"distribute_datasets_from_function needs a function, got {fn!r}. Pass one that takes "
            "an InputContext and returns a dataset, or call distribute_dataset."
        )
    per_replica = options is not None and options.per_replica

    def make(shard: int, counts: tuple[int, ...]) -> Node:
        every, first = sum(counts), sum(counts[:shard])
        many = every if per_replica else len(counts)
        numbers = range(first, first + counts[shard]) if per_replica else (shard,)
        nodes = tuple(as_dataset(fn(InputContext(many, number, every)))._node for number in numbers)
        for node, number in zip(nodes, numbers, strict=True):
            check_division((step.loader for step in upstream(node)), many, number)
        return in_rounds(nodes) if per_replica else nodes[0]

    pipelines = Pipelines(make, topology)
    chosen = options or _options_of(pipelines.first)
    return DistributedDataset(pipelines, topology, Sharding.FUNCTION, chosen)


class Pipelines:
    """The pipelines of a dataset: one that all workers share, or those that a function returns.

    Args:
        make: returns the pipeline of a worker, from the worker's index and all workers' replica
            counts.
        topology: the replicas; it determines the first pipeline.
    """

    def __init__(self, make: Callable[[int, tuple[int, ...]], Node], topology: Topology) -> None:
        self._make = make
        # Workers that joined later may read parts that others began, so several divisions are in
        # use.
        self._made: dict[Any, Node] = {}
        self.first = self.of(topology.worker_index, topology.replica_counts)
        # The number of epochs that were begun; the seeds of the shuffles depend on it.
        self.epochs = 0

    def of(self, shard: int, counts: tuple[int, ...]) -> Node:
        """Return the pipeline of a worker; the last 16 pipelines are kept and returned again."""
        made = self._made.get((shard, counts)) or self._make(shard, counts)
        self._made = dict([*self._made.items(), ((shard, counts), made)][-16:])
        return made


class DistributedDataset:
    """An iterable over steps: nests of `PerReplica` with a component for each local replica.

    Strategies create it. Iterations are independent and can be resumed: see `DistributedIterator`.

    >>> from ndistribute.data import Dataset
    >>> distribute(Dataset.range(9).batch(4), Topology((Device("cpu:0"),), (1,))).cardinality()
    3
    """

    def __init__(
        self,
        pipelines: Pipelines,
        topology: Topology,
        sharding: Sharding,
        options: InputOptions,
        scale: Fraction | None = None,
    ):
        if not options.to_device:
            hosts = (Device("cpu:0"),) * len(topology.devices)
            topology = replace(topology, devices=hosts)
        self._pipelines = pipelines
        self._topology = topology
        self._sharding = sharding
        self._options = options
        self._scale = scale or Fraction(1)
        self._anew = scale is not None

    @property
    def _node(self) -> Node:
        return self._pipelines.of(self._topology.worker_index, self._topology.replica_counts)

    def cardinality(self) -> int:
        """Return the number of steps, `INFINITE_CARDINALITY` or `UNKNOWN_CARDINALITY`.

        If each worker has its own data, this is the number of steps for which this worker has data.
        This worker also takes part, with empty batches, in the steps of workers that have more
        data.
        """
        known = self._node.spec.cardinality
        if known < 0:
            return known
        by_function, devices = self._sharding is Sharding.FUNCTION, len(self._topology.devices)
        if self._sharding is Sharding.FILE or (self._scale != 1 and not by_function):
            return pipeline.UNKNOWN_CARDINALITY
        pieces = {Sharding.DATA: devices, Sharding.OFF: self._topology.num_replicas}
        return -(-known * pieces.get(self._sharding, 1) // devices)

    def __repr__(self) -> str:
        """Return the pipeline, the known properties of its elements, and this worker's devices.

        >>> import ndistribute as nd
        >>> nd.get_strategy().distribute_dataset(nd.Dataset.range(9).batch(4))
        <DistributedDataset range(0, 9).batch(4): 3 batches of 4, int64[None], on cpu:0>
        """
        devices = ", ".join(map(str, self._topology.devices))
        return f"<DistributedDataset {describe(self._node)}: {self._node.spec}, on {devices}>"

    @property
    def element_spec(self) -> Any:
        """The dtypes and shapes of a step: a nest of `PerReplicaSpec`; see `Dataset.element_spec`.

        >>> import ndistribute as nd
        >>> with nd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        ...     strategy.distribute_dataset(nd.Dataset.range(9).batch(4)).element_spec
        PerReplicaSpec(int64[None], int64[None])
        """
        return _spec_of_steps(self, self._sharding)

    def divided_among(self, topology: Topology, scale: Fraction | float = 1) -> DistributedDataset:
        """Return the same input, divided among other replicas or other workers.

        An iterator over it can continue from the state of an iterator over this dataset. Later
        epochs are divided as if the dataset had been distributed among these workers. A function
        of `distribute_datasets_from_function` is called when an epoch needs it.

        Args:
            topology: the replicas that receive the input from now on.
            scale: the part of a global batch that a step takes; batches of a dataset function keep
                their size.

        Raises:
            ValueError: these workers cannot divide the input; see
                `DistributedIterator.check_can_go_back`.
        """
        sharding = self._sharding_for(topology.num_workers, topology.workers is not None)
        part = Fraction(scale).limit_denominator(1 << 16)
        return DistributedDataset(self._pipelines, topology, sharding, self._options, part)

    def _sharding_for(self, num_workers: int, can_agree: bool) -> Sharding:
        """Return how workers that joined later divide this input."""
        if self._sharding is Sharding.FUNCTION:
            return self._sharding
        policy = self._options.auto_shard_policy
        return choose_sharding(self._node, policy, num_workers, can_agree, anew=True)

    def __iter__(self) -> DistributedIterator:
        return DistributedIterator(self)


class PerReplicaSpec:
    """The dtypes and shapes of the components of a `PerReplica`."""

    def __init__(self, *specs: LeafSpec) -> None:
        self.value_specs = specs

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PerReplicaSpec) and self.value_specs == other.value_specs

    def __hash__(self) -> int:
        return hash(self.value_specs)

    def __repr__(self) -> str:
        return f"PerReplicaSpec({', '.join(map(repr, self.value_specs))})"


def _spec_of_steps(dataset: DistributedDataset, sharding: Sharding) -> Any:
    """Return the spec of this worker's steps of a pipeline that is divided among all replicas.

    A part of a batch has a known length if all batches, and so all parts, have the same length.
    """
    topology, whole_batches = dataset._topology, dataset._scale == 1

    def part(leaf: LeafSpec) -> PerReplicaSpec:
        if sharding is not Sharding.FUNCTION and leaf.shape:
            whole, rest = divmod(leaf.shape[0] or 0, topology.num_replicas)
            leaf = leaf.row().led_by(whole if whole and not rest and whole_batches else None)
        return PerReplicaSpec(*[leaf] * len(topology.devices))

    return tree.map_leaves(part, dataset._node.element_like)


class DistributedIterator(TensorFlowIterator):
    """An iterator over a `DistributedDataset`, whose state can be saved and restored.

    >>> import numpy as np
    >>> import ndistribute as nd
    >>> dataset = nd.Dataset.range(6).shuffle(6, seed=1).batch(2)
    >>> dataset = nd.get_strategy().distribute_dataset(dataset)
    >>> iterator = iter(dataset)
    >>> _ = next(iterator)
    >>> state = iterator.state_dict()
    >>> resumed = iter(dataset)
    >>> resumed.load_state_dict(state)
    >>> all(np.array_equal(a, b) for a, b in zip(iterator, resumed, strict=True))
    True
    """

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset
        self._topology = dataset._topology
        self._progress: Progress | None = None
        # The position of each shard where the iteration begins.
        self._readings: dict[int, Reading] = {}
        self._threads = Threads()
        self._loader: Any = None
        # The loader's state after the consumer's step, if the loader is ahead of it.
        self._loader_state: Any = None
        self._over = self._failed = False
        self._used_up = threading.Event()  # The input of this worker has ended.
        # Created at the first step, so that loading a state before it costs nothing.
        self._source: Iterator[PipelineStep] | None = None
        if not (dataset._anew and dataset._sharding is Sharding.FUNCTION):
            self._begun()

    def _begun(self) -> Progress:
        """Return the progress in the epoch, which begins here unless a state was loaded before."""
        if (progress := self._progress) is None:
            dataset, topology = self._dataset, self._topology
            node, least = dataset._node, dataset._pipelines.epochs if dataset._anew else 0
            epoch, progress = begin(node, topology, dataset._sharding, least)
            self._read(progress, {progress.shards_of(topology)[0]: (node, epoch)})
        return progress

    @property
    def _nodes(self) -> list[Node]:
        return [reading.node for reading in self._readings.values()]

    def _read(
        self, progress: Progress, parts: Mapping[int, tuple[Node, Epoch]], loaded: bool = False
    ) -> None:
        """Set what this worker reads, from a position on; a loader may have `loaded` it."""
        self._progress, self._threads, self._readings = progress, Threads(), {}
        self._steps = 0
        self._dataset._pipelines.epochs = progress.following
        by_file = progress.sharding is Sharding.FILE
        for shard, (node, epoch) in parts.items():
            at, part = progress.positions[shard], (shard, len(progress.positions))
            changed = {"shard": part} if by_file else {"loaded": at.batches if loaded else 0}
            begun = replace(epoch, threads=self._threads, **changed)
            until = None if progress.until is None else progress.until[shard]
            self._readings[shard] = Reading(node, begun, at, until)
        self._loader = next(map(loader_of, self._nodes), None)

    @recorded(lambda *_: ("input", ""))
    def __next__(self) -> Any:
        if current_frame().replica is not None:
            raise RuntimeError(
                "next was called on a distributed dataset inside a replica, where each replica "
                "would take another batch. Take it outside, batch = next(iterator), and pass it: "
                "strategy.run(step, args=(batch,))."
            )
        if self._over:
            raise pipeline.ended_with_error() if self._failed else StopIteration
        try:
            if self._source is None:
                self._source = self._open()
            step = next(self._source, None)
            if step is None:
                raise StopIteration
        except BaseException as error:
            self.close()
            self._failed = not isinstance(error, StopIteration)
            raise
        progress, self._steps = self._begun(), self._steps + 1
        progress.until = None
        for shard, position in step.reached.items():
            progress.positions[shard] = position
        self._loader_state = step.loader_state
        node = next(iter(self._nodes), self._dataset._pipelines.first)
        return as_yielded(step.value, node.tensors)

    @property
    def element_spec(self) -> Any:
        """The dtypes and shapes of each step; see `DistributedDataset.element_spec`."""
        return _spec_of_steps(self._dataset, self._begun().sharding)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the consumer, as plain values.

        Returns:
            The kind of sharding, and for each shard its position and the seeds of its shuffles. All
            workers of a process group get the same result. If the input is a loader with its own
            `state_dict`, the result contains the loader's state.

        Raises:
            ValueError: the input is a loader without a `state_dict`, or the position is inside a
                batch of a loader.
        """
        progress = self._begun()
        pipeline.check_resumable(self._nodes, self._loader, "state_dict")
        state = progress.state_dict()
        if self._loader is not None:
            if progress.positions[next(iter(self._readings))].rows:
                raise ValueError(
                    "state_dict: some parts of the loader's current batch are not consumed yet. "
                    f"Take the state after all {self._topology.num_replicas} parts of a batch."
                )
            over, alike = self._used_up.is_set(), progress.sharding is Sharding.DATA
            worker = 0 if alike else self._topology.worker_index
            ahead = self._loader_state is not None and not over
            loader_state = self._loader_state if ahead else self._loader.state_dict()
            state["loader"] = {"worker": worker, "state": loader_state, "over": over}
        return state

    def mark(self) -> Any:
        """Return the position of the consumer for `state_at`; None if no epoch has begun.

        It takes less than a microsecond, but for a loader with a state it copies that state.
        """
        if self._progress is None:
            return None
        state = {} if self._loader is None else copy.deepcopy(self.state_dict())
        return self._progress, tuple(self._progress.positions), self._steps, state

    def state_at(self, mark: Any) -> dict[str, Any] | None:
        """Return what `state_dict` would have returned when `mark` was called.

        It also works after an error has ended this iterator. If the iterator has given a step since
        `mark`, the resumed iterator gives that step again with the same rows, whichever workers
        divide them. If no epoch had begun, this returns None.
        """
        if self._progress is None:
            return None
        start: Any = self._progress, [Position()] * len(self._progress.positions), 0, {}
        progress, positions, steps, state = mark or start
        since = self._steps - steps if progress is self._progress else -1
        until = {0: progress.until, 1: progress.positions}.get(since)
        marked = replace(progress, positions=list(positions), until=until)
        return {**state, **marked.state_dict()}

    def check_can_go_back(self, scaled: bool = False) -> None:
        """Raise an error if there is a step at which other workers could not continue this input.

        Args:
            scaled: whether these workers would take another part of a global batch at a step.

        Raises:
            ValueError: the input is a loader whose position cannot be restored, or only on the
                worker that has it; or this job has too few workers to show that the files cannot be
                divided. The message says what to do.
        """
        loader = loader_of(self._dataset._pipelines.first)
        pipeline.check_resumable((self._dataset._pipelines.first,), loader, "an elastic loop")
        # Other workers may join later, even if this is the only worker now.
        sharding = self._dataset._sharding_for(max(2, self._topology.num_workers), True)
        if loader is not None and (scaled or sharding is not Sharding.DATA):
            raise ValueError(
                f"an elastic loop: the {type(loader).__name__} keeps its own position, so it can "
                "go back only to whole batches that are equal on all workers. Pass it to "
                "distribute_dataset with AutoShardPolicy.DATA, and pass batch='constant' to "
                "Elastic; or use a Dataset."
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of an iterator over an equal pipeline: the remaining rows follow.

        The numbers of workers and of replicas may differ. All workers load the same state, and the
        rest of the epoch keeps its kind of sharding. Later epochs continue after the resumed one.

        Args:
            state: the result of `state_dict`, from this process or another.

        Raises:
            ValueError: the state belongs to another pipeline, or to input that other workers cannot
                divide again, or the input is a loader without a `load_state_dict`.
        """
        dataset, topology = self._dataset, self._topology
        progress = Progress.of_state(state)
        shards, counts = progress.shards_of(topology), progress.replica_counts
        nodes = {shard: dataset._pipelines.of(shard, counts) for shard in shards}
        progress.check_fits(dataset._sharding, nodes)
        loader: Any = next(map(loader_of, nodes.values()), None)
        pipeline.check_resumable(nodes.values(), loader, "load_state_dict")
        loaded = state.get("loader")
        self._check_shared_alike(progress, loaded, loader)
        self.close()
        parts = {at: (node, Epoch.resume(node, progress.seeds[at])) for at, node in nodes.items()}
        self._read(progress, parts, loaded is not None)
        self._source = self._loader_state = None
        self._over = self._failed = False
        self._used_up.clear()
        if loaded is not None:
            loader.load_state_dict(loaded["state"])
            # Other workers may have steps left, and this worker takes part in them.
            if loaded["over"]:
                self._used_up.set()

    def close(self) -> None:
        """End the iteration, and stop its threads.

        If a thread reads ahead in a loader with a state, wait until that thread has stopped
        reading.
        """
        self._threads.close(wait=self._loader is not None)
        self._over = True

    def _open(self) -> Iterator[PipelineStep]:
        sharding, topology = self._begun().sharding, self._topology
        workers, readings = topology.workers, {} if self._used_up.is_set() else self._readings
        nodes = [step for node in self._nodes for step in upstream(node)]
        depth = self._dataset._options.prefetch
        depth = _default_depth(nodes, topology.devices) if depth is None else depth
        source = steps_of(topology, sharding, readings, self._dataset._scale)
        if depth and self._loader is not None:
            source = _with_states(source, self._loader)
        if depth:
            source = Ahead(source, depth, self._threads)
        if self._loader is not None:
            source = _noting_the_end(source, self._used_up)
        if sharding is Sharding.DATA:
            # The workers compare the input that user code produces.
            waits = any(node.runs_user_code or node.loader is not None for node in nodes)
            if workers is None or topology.num_workers == 1 or not waits:
                return source
            return compared(source, workers)
        if workers is not None:
            return joint(source, workers, topology.devices)
        if sharding is Sharding.FILE or topology.num_workers == 1:
            return source
        # The positions of the other workers are unknown: assume that they are equal.
        every = range(topology.num_workers)
        return (
            step._replace(reached=dict.fromkeys(every, *step.reached.values())) for step in source
        )

    def _check_shared_alike(
        self, progress: Progress, loaded: Mapping[str, Any] | None, loader: Any
    ) -> None:
        """Raise an error if this worker cannot continue its part of a saved state."""
        number, workers = self._topology.worker_index, self._topology.num_workers
        apart = progress.sharding is not Sharding.DATA
        anew = apart and len(progress.positions) != workers
        by_file = progress.sharding is Sharding.FILE
        if (by_file or anew) and workers > 1 and self._topology.workers is None:
            raise ValueError(
                "load_state_dict: in the saved state, workers share shards, so they must agree on "
                "the end of each shard: pass their communicator as workers."
            )
        if (loaded is None) is not (loader is None):
            raise ValueError(
                "load_state_dict: only one of the saved input and this input is a loader that "
                "keeps its own state. Distribute the same input as when the state was saved."
            )
        if loaded is not None and apart and (anew or loaded["worker"] != number):
            raise ValueError(
                f"load_state_dict: worker {loaded['worker']} of {len(progress.positions)} saved "
                f"this state of its loader, but this is worker {number} of {workers}. Each worker "
                "has its own loader: save a state on every worker, and load the state of the same "
                "worker."
            )


def loader_of(node: Node) -> Any:
    """Return the loader if a pipeline consists of one that has a state; None otherwise."""
    while node.options is not None:
        (node,) = node.inputs
    return node.loader if has_state(node.loader) else None


def _with_states(steps: Iterator[PipelineStep], loader: Any) -> Iterator[PipelineStep]:
    """Yield steps, each with a copy of the loader's state after it."""
    for step in steps:
        yield step._replace(loader_state=copy.deepcopy(loader.state_dict()))


def _noting_the_end(steps: Iterator[PipelineStep], end: threading.Event) -> Iterator[PipelineStep]:
    """Yield steps, and set an event after the last one."""
    yield from steps
    end.set()


def _check_options(options: Any, what: str) -> None:
    if options is not None and not isinstance(options, InputOptions):
        raise TypeError(f"{what}: options must be InputOptions(...) or None, got {options!r}.")


def _options_of(node: Node) -> InputOptions:
    """Return the options of the last `with_options`, or the defaults."""
    said = (step.options for step in reversed(upstream(node)))
    return next((options for options in said if options is not None), InputOptions())


def _default_depth(nodes: Sequence[Node], devices: Sequence[Device]) -> int:
    """Return the default number of steps to prepare ahead.

    Measured on 2 cores with batches of 256 x 784 float32, a thread changes the time of a step. If
    the consumer waits (for a GPU or a network), its steps take 10 to 28 % less time; if it computes
    on both cores, 0 to 10 % more. Reading arrays on the CPU never waits, so it uses no thread; a
    user's function may read files.
    """
    if any(has_state(node.loader) for node in nodes):
        # If a thread read ahead, it would have to copy the loader's state after every batch.
        return 0
    waits = any(node.runs_user_code for node in nodes)
    return 2 if waits or any(device.kind != "cpu" for device in devices) else 0
