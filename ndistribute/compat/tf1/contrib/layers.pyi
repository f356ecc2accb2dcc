# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

flatten: Any
l2_regularizer: Any
xavier_initializer: Any
