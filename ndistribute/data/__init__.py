"""What a replica is fed: datasets, and how they are cut over replicas and workers."""

from ndistribute.data.dataset import Dataset, as_dataset
from ndistribute.data.distributed import (
    DistributedDataset,
    distribute,
    distribute_from_function,
)
from ndistribute.data.iterator import DistributedIterator
from ndistribute.data.options import AutoShardPolicy, InputContext, InputOptions
from ndistribute.data.pipeline import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY
from ndistribute.data.places import Place
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
    "Place",
    "as_dataset",
    "distribute",
    "distribute_from_function",
]
