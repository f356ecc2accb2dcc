"""A dataset as the replicas see it: at each step one piece of the global batch for every replica.

Which dataset goes where and how several workers divide it is settled once for all epochs. An epoch
can be left and taken up at any step: its iterator counts what the consumer got, never what a
background thread has made ahead. Where only each worker knows when its own data ends, a worker that
has run out takes part with empty pieces until all have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ndistribute.collective.objects import ProcessGroup
from ndistribute.context import current_frame
from ndistribute.data.agreement import (
    EMPTY,
    FAILED,
    OVER,
    STEP,
    agree,
    begin,
    choose_sharding,
    compare,
    share_template,
    tell_failure,
)
from ndistribute.data.dataset import as_dataset
from ndistribute.data.elements import Element
from ndistribute.data.options import InputContext, InputOptions, Sharding, Topology
from ndistribute.data.pipeline import UNKNOWN_CARDINALITY, Epoch, Node, upstream
from ndistribute.data.prefetch import Ahead
from ndistribute.data.sources import has_state
from ndistribute.data.steps import (
    BATCH_IT,
    Progress,
    Step,
    count_steps,
    empty_step,
    steps_of,
    template_of,
)
from ndistribute.device import Device
from ndistribute.timeline import recorded


def distribute(
    dataset: Any, topology: Topology, options: InputOptions | None = None
) -> DistributedDataset:
    """Cut each global batch of a dataset over the replicas of a worker.

    Args:
        dataset: a `Dataset` or any re-iterable, of batches of the global batch size; each worker
            must have an equal one.
        topology: the replicas, and those of the other workers.
        options: None for those of the dataset, else the defaults.

    Raises:
        ValueError: the dataset is known to be unbatched, can not be iterated again, or can not be
            divided as the options say.

    >>> from ndistribute.data import Dataset
    >>> topology = Topology((Device("cpu:0"), Device("cpu:1")), (2,))
    >>> dataset = distribute(Dataset.range(5).batch(4), topology)
    >>> [[piece.tolist() for piece in step.values] for step in dataset]
    [[[0, 1], [2, 3]], [[4], []]]
    """
    if isinstance(dataset, DistributedDataset):
        raise ValueError("distribute_dataset got a dataset that is distributed already.")
    _check_options(options, "distribute_dataset")
    node = as_dataset(dataset).node
    if node.spec.batched is False:
        raise ValueError(f"distribute_dataset got an unbatched dataset. {BATCH_IT}")
    chosen = options or _options_of(node)
    can_agree = topology.workers is not None
    sharding = choose_sharding(node, chosen.auto_shard_policy, topology.num_workers, can_agree)
    return DistributedDataset(node, topology, sharding, chosen)


def distribute_from_function(
    fn: Callable[[InputContext], Any], topology: Topology, options: InputOptions | None = None
) -> DistributedDataset:
    """Give the replicas of a worker one batch each at every step, in order.

    Args:
        fn: called once; returns a `Dataset` or any re-iterable, of batches of one replica's size.
        topology: the replicas, and those of the other workers. If it says how these meet, one whose
            dataset ends early takes part with empty pieces; else all must have as many steps.
        options: None for those of the dataset, else the defaults.

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
    context = InputContext(topology.num_workers, topology.worker_index, topology.num_replicas)
    node = as_dataset(fn(context)).node
    return DistributedDataset(node, topology, Sharding.FUNCTION, options or _options_of(node))


class DistributedDataset:
    """Yield nests of `PerReplica`, one component for each replica, in their order.

    Made by a strategy. Each iteration is independent and can be resumed, see `DistributedIterator`.

    >>> from ndistribute.data import Dataset
    >>> distribute(Dataset.range(9).batch(4), Topology((Device("cpu:0"),), (1,))).cardinality()
    3
    """

    def __init__(self, node: Node, topology: Topology, sharding: Sharding, options: InputOptions):
        self._node = node
        self._topology = topology
        self._sharding = sharding
        given = options.prefetch
        self._depth = _default_depth(node, topology.devices) if given is None else given
        if any(has_state(step.loader) for step in upstream(node)):
            self._depth = 0  # Its state is to be where the consumer is, and it prefetches itself.

    def cardinality(self) -> int:
        """Return the number of steps, `INFINITE_CARDINALITY` or `UNKNOWN_CARDINALITY`.

        Where each worker has its own data, they are the steps of this worker's; others may have
        more, which it takes part in.
        """
        known = self._node.spec.cardinality
        if self._sharding is Sharding.FILE:
            return UNKNOWN_CARDINALITY
        return known if known < 0 else count_steps(self._topology, self._sharding, known)

    def __iter__(self) -> DistributedIterator:
        return DistributedIterator(self._node, self._topology, self._sharding, self._depth)


class DistributedIterator(Iterator[Any]):
    """Iterate over a `DistributedDataset` once, from any step on.

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

    def __init__(self, node: Node, topology: Topology, sharding: Sharding, depth: int) -> None:
        self._node = node
        self._topology = topology
        self._depth = depth
        self._epoch, self._progress = begin(node, topology, sharding)
        self._own = self._progress
        self._loader = loader_of(node)
        self._template: Element | None = None
        self._over = False
        self._used_up = False
        # Made when the first step is asked for, so that a state can be loaded at no cost.
        self._source: Iterator[Step] | None = None
        # Under DATA, what a function of the user's makes is compared with the other workers'.
        waits = any(step.runs_user_code or step.loader is not None for step in upstream(node))
        compares = waits and sharding is Sharding.DATA and topology.num_workers > 1
        self._compared_with = topology.workers if compares else None
        self._rows = 0

    @recorded(lambda *_: ("input", ""))
    def __next__(self) -> Any:
        if current_frame().replica is not None:
            raise RuntimeError(
                "next was called on a distributed dataset inside a replica, where each replica "
                "would take another batch. Take it outside, batch = next(iterator), and pass it: "
                "strategy.run(step, args=(batch,))."
            )
        if self._over:
            raise StopIteration
        try:
            if self._source is None:
                self._source = self._open()
            if self._progress.sharding is Sharding.DATA or self._topology.workers is None:
                return self._step(self._source)
            return self._joint_step(self._source, self._topology.workers)
        except BaseException:
            self.close()
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return where the consumer is, as plain values.

        Returns:
            How the input is shared, and for each shard how far it has been consumed and the seeds
            of its shuffles. It is the same on every worker, where the workers can meet. Where the
            input is a loader with a `state_dict` of its own, what that returns is in it.

        Raises:
            ValueError: the input is a loader that can not say where it is.
        """
        _check_resumable(self._node, self._loader, "state_dict")
        state = self._progress.state_dict()
        if self._loader is not None:
            if self._progress.positions[self._first_shard].rows:
                raise ValueError(
                    "state_dict: the loader has given a batch of which parts are still to come. "
                    f"Take the state after {self._topology.num_replicas} pieces of a batch."
                )
            own = {"state": self._loader.state_dict(), "over": self._used_up}
            state["loader"] = {"worker": self._topology.worker_index, **own}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where an iterator over an equal pipeline was, with exactly the batches it had left.

        The number of workers and of replicas may be another. Every worker loads the same state; the
        rest of the epoch is shared as it was begun. Later iterations follow on the resumed one.

        Args:
            state: what `state_dict` returned, in this process or another.

        Raises:
            ValueError: the state is of another pipeline, or of input that can not be dealt anew, or
                the input is a loader that can not be brought to where it was.
        """
        _check_resumable(self._node, self._loader, "load_state_dict")
        progress = Progress.of_state(state).fit(self._own)
        own = state.get("loader")
        self._check_shared_alike(progress, own)
        self.close()
        self._progress = progress
        seeds = progress.seeds[self._first_shard]
        self._epoch = Epoch.resume(self._node, seeds)
        self._source = None
        self._over = False
        self._rows = 0
        if own is not None:
            self._loader.load_state_dict(own["state"])
            batches = progress.positions[self._first_shard].batches
            self._epoch = replace(self._epoch, loaded=batches)
            self._over = self._used_up = own["over"]

    def close(self) -> None:
        """End the iteration and its threads."""
        self._epoch.threads.close()
        self._over = True

    @property
    def _first_shard(self) -> int:
        return next(iter(self._progress.shards_of(self._topology)), 0)

    def _step(self, source: Iterator[Step]) -> Any:
        try:
            step = next(source, None)
        except Exception:
            if self._compared_with is not None and not self._rows:
                tell_failure(self._compared_with)
            raise
        if self._compared_with is not None:
            self._compare(step, self._compared_with)
        if step is None:
            self._used_up = True
            raise StopIteration
        self._progress.advance(step.reached)
        if self._progress.sharding in (Sharding.OFF, Sharding.FUNCTION):
            # Nobody says how far the others are: they are taken to go at the same pace.
            position = step.reached[self._topology.worker_index]
            self._progress.positions[:] = [position] * self._topology.num_workers
        return step.value

    def _compare(self, step: Step | None, workers: ProcessGroup) -> None:
        """Compare the first batch, and the number of rows at the end, with the other workers'."""
        if step is None:
            compare(workers, {"number of rows of the epoch": self._rows})
            return
        self._rows += step.rows
        if step.first is not None:
            compare(workers, step.first)

    def _joint_step(self, source: Iterator[Step], workers: ProcessGroup) -> Any:
        """Take the next step of this worker's, and agree with the others on whether there is one.

        An error takes part too, so that the others do not wait for a worker that has raised.
        """
        step, failure = None, None
        try:
            step = next(source, None)
        except Exception as error:
            failure = error
        if step is not None and self._template is None:
            self._template = template_of(step.value)
        none_left = EMPTY if self._template is None else OVER
        fares = FAILED if failure is not None else none_left if step is None else STEP
        all_fare, reached = agree(workers, fares, {} if step is None else step.reached)
        if failure is not None:
            raise failure
        if STEP not in all_fare:
            self._used_up = True
            raise StopIteration
        if EMPTY in all_fare:
            self._template = share_template(workers, self._template)
        self._progress.advance(reached)
        return empty_step(self._template, self._topology.devices) if step is None else step.value

    def _open(self) -> Iterator[Step]:
        progress, topology = self._progress, self._topology
        shards = progress.shards_of(topology)
        epochs = {shard: (self._part(shard), progress.positions[shard]) for shard in shards}
        source = steps_of(self._node, topology, progress.sharding, epochs)
        return Ahead(source, self._depth, self._epoch.threads) if self._depth else source

    def _part(self, shard: int) -> Epoch:
        if self._progress.sharding is not Sharding.FILE:
            return self._epoch
        return replace(self._epoch, shard=(shard, len(self._progress.positions)))

    def _check_shared_alike(self, progress: Progress, loader: Mapping[str, Any] | None) -> None:
        """Raise an error if this worker can not take over its part of what is saved."""
        several = self._topology.num_workers > 1
        if progress.sharding is Sharding.FILE and several and self._topology.workers is None:
            raise ValueError(
                "load_state_dict: the state is of files that workers shared, so the workers must "
                "tell each other when they end: pass their communicator as workers."
            )
        if (loader is None) is not (self._loader is None):
            raise ValueError(
                "load_state_dict: of the state and this input, one is of a loader with a state of "
                "its own, and the other is not. Distribute the same input as it was saved from."
            )
        own = self._topology.worker_index
        by_worker = progress.sharding is not Sharding.DATA
        if loader is not None and by_worker and loader["worker"] != own:
            raise ValueError(
                f"load_state_dict: the state is of the loader of worker {loader['worker']}, this "
                f"is worker {own}. Each worker has a loader of its own here: save a state on every "
                "worker, and load that."
            )


def loader_of(node: Node) -> Any:
    """Return the loader that a pipeline is, if it keeps a state of its own; else None."""
    while node.options is not None:
        (node,) = node.inputs
    return node.loader if has_state(node.loader) else None


def _check_resumable(node: Node, loader: Any, what: str) -> None:
    """Raise an error if nobody can tell which batches of a loader come after some of them."""
    for step in upstream(node):
        if step.loader is loader or isinstance(step.loader, Sequence | None):
            continue
        kind = type(step.loader).__name__
        raise ValueError(
            f"{what}: the input is a {kind}, and nobody can tell which batches come after those "
            "that it gave: it has no state_dict and load_state_dict, or is a part of a dataset. "
            "Distribute a loader that has both as it is; or, if this one gives the same batches "
            "each time, write Dataset.from_generator(lambda: iter(loader))."
        )


def _check_options(options: Any, what: str) -> None:
    if options is not None and not isinstance(options, InputOptions):
        raise TypeError(f"{what}: options must be InputOptions(...) or None, got {options!r}.")


def _options_of(node: Node) -> InputOptions:
    """Return what `with_options` said last."""
    said = (step.options for step in reversed(upstream(node)))
    return next((options for options in said if options is not None), InputOptions())


def _default_depth(node: Node, devices: Sequence[Device]) -> int:
    """Return how many steps to prepare ahead where the user did not say.

    Measured on 2 cores, batches of 256 x 784 float32, with a thread against without: a consumer
    that waits (for a GPU, a network) takes 10 to 28 % less per step; one that computes on both
    cores 0 to 10 % more. Arrays on the CPU never wait, so they go without; a user's function may
    well read files.
    """
    waits = any(step.runs_user_code for step in upstream(node))
    return 2 if waits or any(device.kind != "cpu" for device in devices) else 0
