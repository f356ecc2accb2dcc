# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

DEFINE_bool: Any
DEFINE_boolean: Any
DEFINE_float: Any
DEFINE_integer: Any
DEFINE_string: Any
FLAGS: Any
