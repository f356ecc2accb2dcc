# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

enable_op_determinism: Any
list_logical_devices: Any
list_physical_devices: Any
set_memory_growth: Any
