# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

band_part: Any
cholesky: Any
cross: Any
det: Any
diag: Any
diag_part: Any
eigh: Any
eigvalsh: Any
einsum: Any
eye: Any
global_norm: Any
inv: Any
l2_normalize: Any
matmul: Any
matrix_transpose: Any
norm: Any
pinv: Any
qr: Any
slogdet: Any
solve: Any
svd: Any
tensordot: Any
