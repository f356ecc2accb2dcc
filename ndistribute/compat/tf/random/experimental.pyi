# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.compat.random_numbers import Generator as _Generator
Generator = _Generator
get_global_generator: Any
