# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.compat.tf.data import experimental as experimental
AUTOTUNE: Any
from ndistribute.compat.adapters import TensorDataset as _Dataset
Dataset = _Dataset
INFINITE_CARDINALITY: Any
from ndistribute.data.options import InputOptions as _Options
Options = _Options
TextLineDataset: Any
UNKNOWN_CARDINALITY: Any
