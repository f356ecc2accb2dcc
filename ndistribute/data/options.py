"""What the user says about how input is spread, and what a dataset function is told.

Plain values, checked when they are made; they start nothing and know no dataset.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ndistribute.data.arguments import at_least

__all__ = ["AutoShardPolicy", "InputContext", "InputOptions"]


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
            at_least(0, self.prefetch, "InputOptions: prefetch")


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
        at_least(1, global_batch_size, "get_per_replica_batch_size: global_batch_size")
        if global_batch_size % self.num_replicas_in_sync:
            raise ValueError(
                f"get_per_replica_batch_size: the global batch size {global_batch_size} is not a "
                f"multiple of the {self.num_replicas_in_sync} replicas in sync. Choose a multiple, "
                "or give the global batches to distribute_dataset, which cuts any size."
            )
        return global_batch_size // self.num_replicas_in_sync
