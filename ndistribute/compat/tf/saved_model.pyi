# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.compat.adapters import FileOptions as _LoadOptions
LoadOptions = _LoadOptions
from ndistribute.compat.adapters import FileOptions as _SaveOptions
SaveOptions = _SaveOptions
load: Any
save: Any
