# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

bitwise_and: Any
bitwise_or: Any
bitwise_xor: Any
invert: Any
left_shift: Any
right_shift: Any
