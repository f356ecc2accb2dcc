# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

set_experimental_options: Any
set_jit: Any
