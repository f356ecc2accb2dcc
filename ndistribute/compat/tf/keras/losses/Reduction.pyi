# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

AUTO: str
NONE: str
SUM: str
SUM_OVER_BATCH_SIZE: str
