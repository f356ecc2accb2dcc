"""Datasets, and their distribution over the replicas and workers of a job."""

from ndistribute.data.dataset import Dataset as Dataset
from ndistribute.data.dataset import as_dataset as as_dataset
from ndistribute.data.distributed import DistributedDataset as DistributedDataset
from ndistribute.data.distributed import DistributedIterator as DistributedIterator
from ndistribute.data.distributed import PerReplicaSpec as PerReplicaSpec
from ndistribute.data.distributed import distribute as distribute
from ndistribute.data.distributed import distribute_from_function as distribute_from_function
from ndistribute.data.options import AutoShardPolicy as AutoShardPolicy
from ndistribute.data.options import InputContext as InputContext
from ndistribute.data.options import InputOptions as InputOptions
from ndistribute.data.options import InputReplicationMode as InputReplicationMode
from ndistribute.data.options import Topology as Topology
from ndistribute.data.pipeline import INFINITE_CARDINALITY as INFINITE_CARDINALITY
from ndistribute.data.pipeline import UNKNOWN_CARDINALITY as UNKNOWN_CARDINALITY
from ndistribute.data.text import csv_rows as csv_rows
from ndistribute.data.text import make_csv_dataset as make_csv_dataset
from ndistribute.data.text import text_lines as text_lines
from ndistribute.data.transformations import AUTOTUNE as AUTOTUNE
