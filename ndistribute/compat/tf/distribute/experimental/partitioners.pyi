# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.variables.partitioners import FixedShardsPartitioner as _FixedShardsPartitioner
FixedShardsPartitioner = _FixedShardsPartitioner
from ndistribute.variables.partitioners import MaxSizePartitioner as _MaxSizePartitioner
MaxSizePartitioner = _MaxSizePartitioner
from ndistribute.variables.partitioners import MinSizePartitioner as _MinSizePartitioner
MinSizePartitioner = _MinSizePartitioner
Partitioner: Any
number_of_shards: Any
