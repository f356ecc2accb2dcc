# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

set_inter_op_parallelism_threads: Any
set_intra_op_parallelism_threads: Any
