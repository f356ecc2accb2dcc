# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

AUTOTUNE: Any
from ndistribute.data.options import AutoShardPolicy as _AutoShardPolicy
AutoShardPolicy = _AutoShardPolicy
Counter: Any
CsvDataset: Any
INFINITE_CARDINALITY: Any
UNKNOWN_CARDINALITY: Any
cardinality: Any
make_csv_dataset: Any
rejection_resample: Any
