# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

length: Any
lower: Any
strip: Any
to_number: Any
upper: Any
