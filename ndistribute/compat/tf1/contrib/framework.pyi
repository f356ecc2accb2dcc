# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

get_or_create_global_step: Any
