# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

DeleteRecursively: Any
Exists: Any
FastGFile: Any
GFile: Any
Glob: Any
IsDirectory: Any
ListDirectory: Any
MakeDirs: Any
Open: Any
Remove: Any
exists: Any
glob: Any
isdir: Any
join: Any
listdir: Any
makedirs: Any
mkdir: Any
remove: Any
rmtree: Any
