"""Datasets, and their distribution over the replicas and workers of a job."""

from ndistribute.data.dataset import Dataset, as_dataset
from ndistribute.data.distributed import (
    DistributedDataset,
    DistributedIterator,
    distribute,
    distribute_from_function,
)
from ndistribute.data.options import AutoShardPolicy, InputContext, InputOptions, Topology
from ndistribute.data.pipeline import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from ndistribute.data.transformations import AUTOTUNE

__all__ = [
    "AUTOTUNE",
    "INFINITE_CARDINALITY",
    "UNKNOWN_CARDINALITY",
    "AutoShardPolicy",
    "Dataset",
    "DistributedDataset",
    "DistributedIterator",
    "InputContext",
    "InputOptions",
    "Topology",
    "as_dataset",
    "distribute",
    "distribute_from_function",
]
