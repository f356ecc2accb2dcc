# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

average_pooling2d: Any
batch_normalization: Any
conv2d: Any
dense: Any
dropout: Any
flatten: Any
max_pooling2d: Any
