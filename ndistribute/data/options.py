"""Options for the distribution of input, and the topology of the replicas that receive it.

All are plain values that check their arguments on creation. The functions at the end check
arguments for the whole subpackage. Nothing here depends on a dataset.
"""

from __future__ import annotations

import enum
import operator
from dataclasses import dataclass
from typing import Any

from ndistribute.collective.objects import ProcessGroup
from ndistribute.devices import Device
from ndistribute.mistakes import count_of


class AutoShardPolicy(enum.Enum):
    """The ways in which several workers divide one dataset.

    ``DATA``: each worker takes its slices of every global batch. ``FILE``: worker i of n reads the
    files i, i + n, and so on. ``OFF``: every worker reads the whole dataset. ``AUTO``: ``FILE`` if
    the dataset reads at least one file per worker, reads nothing else, and does not count elements
    over all files (`take`, `skip`, `shard`, `zip`); otherwise ``DATA``.

    >>> AutoShardPolicy("Data")
    <AutoShardPolicy.DATA: 'data'>
    """

    AUTO = "auto"
    DATA = "data"
    FILE = "file"
    OFF = "off"

    @classmethod
    def _missing_(cls, value: object) -> AutoShardPolicy:
        if (name := str(value).upper()) in cls.__members__:
            return cls[name]
        names = ", ".join(cls.__members__)
        raise ValueError(f"auto_shard_policy must be one of {names}, got {value!r}.")


class InputReplicationMode(enum.Enum):
    """How often a dataset function is called: once for each worker, or for each replica.

    >>> InputReplicationMode("per_replica")
    <InputReplicationMode.PER_REPLICA: 'per_replica'>
    """

    PER_WORKER = "per_worker"
    PER_REPLICA = "per_replica"


@dataclass(frozen=True)
class InputOptions:
    """Options for the distribution of a dataset.

    Args:
        auto_shard_policy: an `AutoShardPolicy`, or its name in any case.
        prefetch: the number of steps that a background thread prepares ahead. That thread then
            calls the dataset's functions. 0 prepares each step on request. None means 2 if the
            dataset runs user code or reads files, or if a replica is on a GPU, and otherwise 0.
            None also means 0 for a loader with its own state, because reading ahead copies the
            state after each batch.
        experimental_fetch_to_device: whether elements are copied to the replicas' devices; False
            leaves them in host memory.
        experimental_replication_mode: PER_REPLICA calls the function of
            `distribute_datasets_from_function` for each replica, with its number as the
            `input_pipeline_id`.
        experimental_place_dataset_on_device: whether elements are copied to the devices even if
            `experimental_fetch_to_device` is False. Datasets always compute in host memory.
        experimental_per_replica_buffer_size: another name of `prefetch`.

    Raises:
        ValueError: the policy is unknown, `prefetch` is negative, or two options contradict.

    >>> InputOptions(auto_shard_policy="off").auto_shard_policy
    <AutoShardPolicy.OFF: 'off'>
    """

    auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO
    prefetch: int | None = None
    experimental_fetch_to_device: bool = True
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int | None = None

    @property
    def to_device(self) -> bool:
        """Whether elements are copied to the devices of the replicas."""
        return self.experimental_fetch_to_device or self.experimental_place_dataset_on_device

    @property
    def per_replica(self) -> bool:
        """Whether a dataset function is called for each replica."""
        return self.experimental_replication_mode is InputReplicationMode.PER_REPLICA

    def __post_init__(self) -> None:
        policy = AutoShardPolicy(self.auto_shard_policy)
        object.__setattr__(self, "auto_shard_policy", policy)
        mode = InputReplicationMode(self.experimental_replication_mode)
        object.__setattr__(self, "experimental_replication_mode", mode)
        if self.experimental_fetch_to_device and self.experimental_place_dataset_on_device:
            raise ValueError(
                "experimental_place_dataset_on_device cannot be True while "
                "experimental_fetch_to_device is True, its default: pass it as False."
            )
        buffer = self.experimental_per_replica_buffer_size
        if buffer is not None:
            if self.prefetch not in (None, buffer):
                raise ValueError("pass prefetch or experimental_per_replica_buffer_size, not both.")
            object.__setattr__(self, "prefetch", buffer)
        if self.prefetch is not None:
            integer(self.prefetch, "InputOptions: prefetch", 0)


@dataclass(frozen=True)
class InputContext:
    """The part of the input that a dataset function must produce.

    Args:
        num_input_pipelines: the number of input pipelines, one for each worker.
        input_pipeline_id: the index of this pipeline, from 0.
        num_replicas_in_sync: the number of replicas of all workers together.

    >>> InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=4)
    InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=4)
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the batch size of one replica.

        Raises:
            ValueError: the global batch size is not a multiple of the number of replicas.

        >>> InputContext(num_replicas_in_sync=2).get_per_replica_batch_size(64)
        32
        """
        integer(global_batch_size, "get_per_replica_batch_size: global_batch_size", 1)
        if global_batch_size % self.num_replicas_in_sync:
            raise ValueError(
                f"get_per_replica_batch_size: the global batch size {global_batch_size} is not a "
                f"multiple of the {self.num_replicas_in_sync} replicas in sync. Choose a multiple, "
                "or pass the global batches to distribute_dataset, which accepts any size."
            )
        return global_batch_size // self.num_replicas_in_sync


class Sharding(enum.Enum):
    """The kinds of shards of an epoch.

    ``DATA``: one shard; each worker takes its slices of every batch. ``FILE``: every n-th file of
    the pipeline. ``OFF``: the whole pipeline, once for each worker. ``FUNCTION``: the dataset that
    each worker's dataset function returned.
    """

    DATA = "data"
    FILE = "file"
    OFF = "off"
    FUNCTION = "function"


@dataclass(frozen=True)
class Topology:
    """The replicas of this worker, and the replica counts of all workers of the job.

    Args:
        devices: the devices of this worker's replicas.
        replica_counts: the number of replicas of each worker.
        worker_index: the index of this worker.
        workers: the process group of the workers; None if there is one worker or no process group.
            An iteration begins with a collective of this group, and so does each step with FILE and
            OFF.

    Raises:
        ValueError: the replica counts, the worker index and the devices are inconsistent.

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
                f"replica_counts is {counts} for {count_of(len(counts), 'worker')}, but this is "
                f"worker {index}, which has {count_of(len(self.devices), 'device')}. Pass the "
                "number of devices of every worker, in order."
            )

    @property
    def num_workers(self) -> int:
        """The number of workers of the job."""
        return len(self.replica_counts)

    @property
    def num_replicas(self) -> int:
        """The number of replicas of all workers."""
        return sum(self.replica_counts)


def integer(value: Any, what: str, lowest: int | None = None, below: int | None = None) -> int:
    """Return an argument as an integer, after checking its bounds.

    Raises:
        TypeError: the value is not an integer.
        ValueError: the value is below `lowest`, or not from 0 to ``below - 1``.

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
