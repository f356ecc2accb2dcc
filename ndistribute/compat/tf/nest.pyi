# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

assert_same_structure: Any
flatten: Any
is_nested: Any
map_structure: Any
pack_sequence_as: Any
