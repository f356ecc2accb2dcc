# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

gelu: Any
log_softmax: Any
relu: Any
sigmoid: Any
silu: Any
softmax: Any
