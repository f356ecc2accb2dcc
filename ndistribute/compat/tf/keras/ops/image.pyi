# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

extract_patches: Any
resize: Any
