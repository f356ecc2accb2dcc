# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

backend: Any
epsilon: Any
floatx: Any
image_data_format: Any
set_dtype_policy: Any
set_floatx: Any
