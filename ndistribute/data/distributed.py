"""A dataset as the replicas see it: at each step one piece of the global batch for every replica.

What is settled here, once for all epochs, is which dataset goes where and how several workers
divide it; an epoch itself is the iterator's affair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ndistribute.data.dataset import as_dataset
from ndistribute.data.iterator import DistributedIterator, steps_of
from ndistribute.data.options import InputContext, InputOptions
from ndistribute.data.pipeline import UNKNOWN_CARDINALITY, Node, upstream
from ndistribute.data.places import Place
from ndistribute.data.policies import Sharding, choose_sharding
from ndistribute.data.steps import BATCH_IT
from ndistribute.device import Device

__all__ = ["DistributedDataset", "distribute", "distribute_from_function"]


def distribute(
    dataset: Any, place: Place, options: InputOptions | None = None
) -> DistributedDataset:
    """Cut each global batch of a dataset over the replicas of a worker.

    Args:
        dataset: a `Dataset` or any re-iterable, of batches of the global batch size; each worker
            must have an equal one.
        place: the replicas, and those of the other workers.
        options: None for those of the dataset, else the defaults.

    Raises:
        ValueError: the dataset is known to be unbatched, can not be iterated again, or can not be
            divided as the options say.

    >>> from ndistribute.data import Dataset
    >>> place = Place((Device("cpu:0"), Device("cpu:1")), (2,))
    >>> dataset = distribute(Dataset.range(5).batch(4), place)
    >>> [[piece.tolist() for piece in step.values] for step in dataset]
    [[[0, 1], [2, 3]], [[4], []]]
    """
    if isinstance(dataset, DistributedDataset):
        raise ValueError("distribute_dataset got a dataset that is distributed already.")
    _check_options(options, "distribute_dataset")
    node = as_dataset(dataset).node
    if node.batched is False:
        raise ValueError(f"distribute_dataset got an unbatched dataset. {BATCH_IT}")
    chosen = options or _options_of(node)
    can_agree = place.workers is not None
    sharding = choose_sharding(node, chosen.auto_shard_policy, place.num_workers, can_agree)
    return DistributedDataset(node, place, sharding, chosen)


def distribute_from_function(
    fn: Callable[[InputContext], Any], place: Place, options: InputOptions | None = None
) -> DistributedDataset:
    """Give the replicas of a worker one batch each at every step, in order.

    Args:
        fn: called once; returns a `Dataset` or any re-iterable, of batches of one replica's size.
        place: the replicas, and those of the other workers. If it says how these meet, one whose
            dataset ends early takes part with empty pieces; else all must have as many steps.
        options: None for those of the dataset, else the defaults.

    Raises:
        ValueError: `fn` does not return a dataset.

    >>> from ndistribute.data import Dataset
    >>> place = Place((Device("cpu:0"), Device("cpu:1")), (2,))
    >>> dataset = distribute_from_function(lambda context: Dataset.range(3).batch(1), place)
    >>> [[piece.tolist() for piece in step.values] for step in dataset]
    [[[0], [1]], [[2], []]]
    """
    _check_options(options, "distribute_datasets_from_function")
    if not callable(fn):
        raise TypeError(
            f"distribute_datasets_from_function needs a function, got {fn!r}. Pass one that takes "
            "an InputContext and returns a dataset, or call distribute_dataset."
        )
    context = InputContext(place.num_workers, place.worker_index, place.num_replicas)
    node = as_dataset(fn(context)).node
    return DistributedDataset(node, place, Sharding.FUNCTION, options or _options_of(node))


class DistributedDataset:
    """Yield nests of `PerReplica`, one component for each replica, in their order.

    Made by a strategy. Each iteration is independent and can be resumed, see `DistributedIterator`.

    >>> from ndistribute.data import Dataset
    >>> distribute(Dataset.range(9).batch(4), Place((Device("cpu:0"),), (1,))).cardinality()
    3
    """

    def __init__(self, node: Node, place: Place, sharding: Sharding, options: InputOptions):
        self._node = node
        self._place = place
        self._sharding = sharding
        self._depth = (
            _default_depth(node, place.devices) if options.prefetch is None else options.prefetch
        )

    def cardinality(self) -> int:
        """Return the number of steps, `INFINITE_CARDINALITY` or `UNKNOWN_CARDINALITY`.

        Where each worker has its own data, they are the steps of this worker's; others may have
        more, which it takes part in.
        """
        known = self._node.cardinality
        if self._sharding is Sharding.FILE:
            return UNKNOWN_CARDINALITY
        return known if known < 0 else steps_of(self._place, self._sharding).count(known)

    def __iter__(self) -> DistributedIterator:
        return DistributedIterator(self._node, self._place, self._sharding, self._depth)


def _check_options(options: Any, what: str) -> None:
    if options is not None and not isinstance(options, InputOptions):
        raise TypeError(f"{what}: options must be InputOptions(...) or None, got {options!r}.")


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
