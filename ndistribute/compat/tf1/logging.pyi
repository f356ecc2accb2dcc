# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

DEBUG: Any
ERROR: Any
FATAL: Any
INFO: Any
WARN: Any
debug: Any
error: Any
info: Any
set_verbosity: Any
warn: Any
warning: Any
