# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

cholesky: Any
det: Any
eigh: Any
inv: Any
norm: Any
qr: Any
solve: Any
svd: Any
