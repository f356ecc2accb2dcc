# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

join: Any
length: Any
lower: Any
regex_replace: Any
split: Any
strip: Any
to_number: Any
