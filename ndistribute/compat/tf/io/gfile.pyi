# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

GFile: Any
exists: Any
glob: Any
isdir: Any
join: Any
listdir: Any
makedirs: Any
mkdir: Any
remove: Any
rmtree: Any
