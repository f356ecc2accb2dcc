# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.compat.keras_functions import SeedGenerator as _SeedGenerator
SeedGenerator = _SeedGenerator
categorical: Any
dropout: Any
normal: Any
randint: Any
uniform: Any
