"""A dataset as the replicas see it: at each step one piece of the global batch for every replica.

The iterator counts batches as the consumer gets them, so what a background thread has made ahead
never enters its state, and a state fits any number of replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ndistribute.context import current_frame
from ndistribute.data.dataset import as_dataset
from ndistribute.data.options import AutoShardPolicy, InputContext, InputOptions
from ndistribute.data.pipeline import Draw, Node, Pass, seeds_of, upstream
from ndistribute.data.prefetch import Prefetched
from ndistribute.data.steps import BATCH_IT, CutBatches, DealBatches
from ndistribute.device import Device

__all__ = ["DistributedDataset", "DistributedIterator", "distribute", "distribute_from_function"]


def distribute(
    dataset: Any,
    devices: Sequence[Device],
    options: InputOptions | None = None,
    num_workers: int = 1,
    worker_index: int = 0,
) -> DistributedDataset:
    """Cut each global batch of a dataset over the replicas of a worker.

    Args:
        dataset: a `Dataset` or any re-iterable, of batches of the global batch size.
        devices: where each replica of this worker computes.
        options: None for those of the dataset, else the defaults.
        num_workers: workers of the job; each must have an equal dataset and as many replicas.
        worker_index: this worker.

    Raises:
        ValueError: the dataset is known to be unbatched, or can not be iterated again.

    >>> from ndistribute.data import Dataset
    >>> dataset = distribute(Dataset.range(5).batch(4), [Device("cpu:0"), Device("cpu:1")])
    >>> [[piece.tolist() for piece in step.values] for step in dataset]
    [[[0, 1], [2, 3]], [[4], []]]
    """
    if isinstance(dataset, DistributedDataset):
        raise ValueError("distribute_dataset got a dataset that is distributed already.")
    node = as_dataset(dataset).node
    if node.batched is False:
        raise ValueError(f"distribute_dataset got an unbatched dataset. {BATCH_IT}")
    chosen = options or _options_of(node)
    if chosen.auto_shard_policy is AutoShardPolicy.FILE and num_workers > 1:
        raise ValueError(
            "AutoShardPolicy.FILE needs a dataset of files, and this one reads none. Use DATA, or "
            "distribute_datasets_from_function and give each worker its own files."
        )
    spread = num_workers if chosen.auto_shard_policy is AutoShardPolicy.OFF else 1
    return DistributedDataset(
        node, CutBatches(tuple(devices), num_workers, worker_index, spread), chosen
    )


def distribute_from_function(
    fn: Callable[[InputContext], Any],
    devices: Sequence[Device],
    options: InputOptions | None = None,
    num_workers: int = 1,
    worker_index: int = 0,
) -> DistributedDataset:
    """Give the replicas of a worker one batch each at every step, in order.

    Args:
        fn: called once; returns a `Dataset` or any re-iterable, of batches of one replica's size.
        devices: where each replica of this worker computes.
        options: None for those of the dataset, else the defaults.
        num_workers: workers of the job.
        worker_index: this worker.

    Raises:
        ValueError: `fn` does not return a dataset.

    >>> from ndistribute.data import Dataset
    >>> devices = [Device("cpu:0"), Device("cpu:1")]
    >>> dataset = distribute_from_function(lambda context: Dataset.range(3).batch(1), devices)
    >>> [[piece.tolist() for piece in step.values] for step in dataset]
    [[[0], [1]], [[2], []]]
    """
    context = InputContext(num_workers, worker_index, num_workers * len(devices))
    node = as_dataset(fn(context)).node
    return DistributedDataset(node, DealBatches(tuple(devices)), options or _options_of(node))


class DistributedDataset:
    """Yield nests of `PerReplica`, one component for each replica, in their order.

    Made by a strategy. Each iteration is independent and can be resumed, see `DistributedIterator`.

    >>> from ndistribute.data import Dataset
    >>> distribute(Dataset.range(9).batch(4), [Device("cpu:0")]).cardinality()
    3
    """

    def __init__(self, node: Node, steps: CutBatches | DealBatches, options: InputOptions):
        self._node = node
        self._steps = steps
        self._depth = (
            _default_depth(node, steps.devices) if options.prefetch is None else options.prefetch
        )

    def cardinality(self) -> int:
        """Return the number of steps, `INFINITE_CARDINALITY` or `UNKNOWN_CARDINALITY`."""
        known = self._node.cardinality
        return known if known < 0 else self._steps.count(known)

    def __iter__(self) -> DistributedIterator:
        return DistributedIterator(self._node, self._steps, self._depth)


class DistributedIterator(Iterator[Any]):
    """Iterate over a `DistributedDataset` once, from any step on.

    >>> import numpy as np
    >>> from ndistribute.data import Dataset
    >>> dataset = distribute(Dataset.range(6).shuffle(6, seed=1).batch(2), [Device("cpu:0")])
    >>> iterator = iter(dataset)
    >>> _ = next(iterator)
    >>> state = iterator.state_dict()
    >>> resumed = iter(dataset)
    >>> resumed.load_state_dict(state)
    >>> all(np.array_equal(a, b) for a, b in zip(iterator, resumed, strict=True))
    True
    """

    def __init__(self, node: Node, steps: CutBatches | DealBatches, depth: int) -> None:
        self._node = node
        self._steps = steps
        self._depth = depth
        self._pass = Pass.begin(node)
        self._batches = 0
        # Made when the first step is asked for, so that a state can be loaded at no cost.
        self._source: Iterator[Any] | None = None

    def __next__(self) -> Any:
        if current_frame().replica is not None:
            raise RuntimeError(
                "next was called on a distributed dataset inside a replica, where each replica "
                "would take another batch. Take it outside, batch = next(iterator), and pass it: "
                "strategy.run(step, args=(batch,))."
            )
        if self._source is None:
            self._source = self._open()
        try:
            step = next(self._source)
        except BaseException:
            self.close()
            raise
        self._batches += self._steps.per_step
        return step

    def state_dict(self) -> dict[str, Any]:
        """Return where the consumer is, as plain numbers.

        Returns:
            ``batches``, the batches taken in this epoch, and ``shuffles``, what each shuffle drew.
        """
        return {
            "batches": self._batches,
            "shuffles": [list(self._pass.draws[seeds]) for seeds in seeds_of(self._node)],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where an iterator over an equal pipeline was, with exactly the batches it had left.

        Later iterations of the dataset follow on the resumed one.

        Args:
            state: what `state_dict` returned, in this process or another.

        Raises:
            ValueError: the state is of another pipeline.
        """
        draws = _draws_of(state, len(seeds_of(self._node)))
        self.close()
        self._pass = Pass.resume(self._node, draws)
        self._batches = int(state["batches"])
        self._source = None

    def close(self) -> None:
        """End the iteration and its threads."""
        self._pass.threads.close()
        self._source = iter(())

    def _open(self) -> Iterator[Any]:
        source = self._steps.iterate(self._node, self._pass, self._batches)
        if self._depth == 0:
            return source
        ahead = Prefetched(source, self._depth)
        self._pass.threads.add(ahead.queue)
        return ahead


def _draws_of(state: Mapping[str, Any], shuffles: int) -> list[Draw]:
    if not {"batches", "shuffles"} <= state.keys():
        raise ValueError(
            "load_state_dict needs what state_dict returned, with 'batches' and 'shuffles'; got "
            f"{sorted(state)}."
        )
    draws = [Draw(int(entropy), int(iteration)) for entropy, iteration in state["shuffles"]]
    if len(draws) != shuffles:
        raise ValueError(
            f"load_state_dict: the state is of a pipeline with {len(draws)} shuffle(s), this one "
            f"has {shuffles}. Build the pipeline as it was when the state was saved."
        )
    return draws


def _options_of(node: Node) -> InputOptions:
    """Return what `with_options` said last."""
    said = (step.options for step in reversed(upstream(node)))
    return next((options for options in said if options is not None), InputOptions())


def _default_depth(node: Node, devices: Sequence[Device]) -> int:
    """Say how many steps to prepare ahead where the user did not.

    Measured on 2 cores, batches of 256 x 784 float32, with a thread against without: a consumer
    that waits (for a GPU, a network) takes 10 to 28 % less per step; one that computes on both
    cores 0 to 10 % more. Arrays on the CPU never wait, so they go without; a user's function may
    well read files.
    """
    waits = any(step.runs_user_code for step in upstream(node))
    return 2 if waits or any(device.kind != "cpu" for device in devices) else 0
