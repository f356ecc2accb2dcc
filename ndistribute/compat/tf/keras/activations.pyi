# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

elu: Any
gelu: Any
get: Any
leaky_relu: Any
linear: Any
log_softmax: Any
relu: Any
sigmoid: Any
silu: Any
softmax: Any
softplus: Any
swish: Any
tanh: Any
