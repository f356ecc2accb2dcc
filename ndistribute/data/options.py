"""What the user says about how input is spread, and where it goes.

Plain values, checked when they are made, with one wording for all wrong arguments; they start
nothing and know no dataset.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ndistribute.collective.objects import ProcessGroup
from ndistribute.device import Device


class AutoShardPolicy(enum.Enum):
    """Say how several workers share one dataset.

    ``DATA``: each global batch is cut over all workers. ``FILE``: each worker reads its own files,
    number i belonging to worker i modulo their number. ``OFF``: every worker goes through the whole
    dataset. ``AUTO``: ``FILE`` where the dataset is made of at least as many files as there are
    workers and counts nothing over them, else ``DATA``.

    >>> AutoShardPolicy("Data")
    <AutoShardPolicy.DATA: 'data'>
    """

    AUTO = "auto"
    DATA = "data"
    FILE = "file"
    OFF = "off"

    @classmethod
    def _missing_(cls, value: object) -> AutoShardPolicy | None:
        return cls.__members__.get(str(value).upper())


@dataclass(frozen=True)
class InputOptions:
    """Say how a dataset is distributed.

    Args:
        auto_shard_policy: an `AutoShardPolicy` or its name in any case.
        prefetch: steps that a background thread prepares ahead, which then is the one that calls
            the dataset's functions; 0 prepares each step when it is asked for; None chooses by the
            kind of dataset.

    Raises:
        ValueError: the policy is unknown, or `prefetch` is negative.

    >>> InputOptions(auto_shard_policy="off").auto_shard_policy
    <AutoShardPolicy.OFF: 'off'>
    """

    auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO
    prefetch: int | None = None

    def __post_init__(self) -> None:
        try:
            policy = AutoShardPolicy(self.auto_shard_policy)
        except ValueError:
            names = ", ".join(AutoShardPolicy.__members__)
            raise ValueError(
                f"auto_shard_policy must be one of {names}, got {self.auto_shard_policy!r}."
            ) from None
        object.__setattr__(self, "auto_shard_policy", policy)
        if self.prefetch is not None:
            integer(self.prefetch, "InputOptions: prefetch", 0)


@dataclass(frozen=True)
class InputContext:
    """Tell a dataset function which part of the input it makes.

    Args:
        num_input_pipelines: how many such functions run, one for each worker.
        input_pipeline_id: which of them this one is, from 0.
        num_replicas_in_sync: the replicas that all of them feed together.

    >>> InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=4)
    InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=4)
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return a replica's share of the global batch.

        Raises:
            ValueError: the replicas can not share it evenly.

        >>> InputContext(num_replicas_in_sync=2).get_per_replica_batch_size(64)
        32
        """
        integer(global_batch_size, "get_per_replica_batch_size: global_batch_size", 1)
        if global_batch_size % self.num_replicas_in_sync:
            raise ValueError(
                f"get_per_replica_batch_size: the global batch size {global_batch_size} is not a "
                f"multiple of the {self.num_replicas_in_sync} replicas in sync. Choose a multiple, "
                "or give the global batches to distribute_dataset, which cuts any size."
            )
        return global_batch_size // self.num_replicas_in_sync


class Sharding(enum.Enum):
    """Say what the shards of an epoch are.

    ``DATA``: one shard, of whose every batch each worker takes its slices. ``FILE``: every n-th
    file. ``OFF``: the whole pipeline, once for each worker. ``FUNCTION``: what the dataset function
    of each worker made.
    """

    DATA = "data"
    FILE = "file"
    OFF = "off"
    FUNCTION = "function"


@dataclass(frozen=True)
class Topology:
    """Say where input goes: the replicas of this worker, among those of all workers of the job.

    Args:
        devices: of this worker's replicas.
        replica_counts: replicas of each worker of the job.
        worker_index: this worker.
        workers: how the workers meet, so that an iteration may begin with a collective of all of
            them, and under the policies FILE and OFF each step; None where there is one worker,
            or where they can not.

    Raises:
        ValueError: the numbers do not fit together.

    >>> Topology((Device("cpu:0"),), (1, 3)).num_replicas
    4
    """

    devices: tuple[Device, ...]
    replica_counts: tuple[int, ...]
    worker_index: int = 0
    workers: ProcessGroup | None = None

    def __post_init__(self) -> None:
        counts = self.replica_counts
        index = integer(self.worker_index, "worker_index", below=len(counts))
        if counts[index] != len(self.devices) or min(counts) < 1:
            raise ValueError(
                f"replica_counts is {counts} for {len(counts)} worker(s), of which this one, "
                f"number {index}, has {len(self.devices)} device(s). Give the number of devices "
                "of every worker, in order."
            )

    @property
    def num_workers(self) -> int:
        """Return the number of workers of the job."""
        return len(self.replica_counts)

    @property
    def num_replicas(self) -> int:
        """Return the replicas of all of them."""
        return sum(self.replica_counts)


def integer(value: Any, what: str, lowest: int | None = None, below: int | None = None) -> int:
    """Return an integer within bounds.

    Raises:
        TypeError: the value is no integer.
        ValueError: it is out of bounds.

    >>> integer(3, "batch: n", 1)
    3
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} must be an integer, got {value!r}.") from None
    if below is not None and not 0 <= number < below:
        raise ValueError(f"{what} must be 0 to {below - 1}, got {number}.")
    if lowest is not None and number < lowest:
        raise ValueError(f"{what} must be at least {lowest}, got {number}.")
    return number


def function(value: Any, what: str) -> Callable[..., Any]:
    """Return what can be called, or raise a TypeError."""
    if not callable(value):
        raise TypeError(f"{what} must be a function, got {value!r}.")
    return value  # type: ignore[no-any-return]
