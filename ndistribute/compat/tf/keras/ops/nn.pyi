# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

binary_crossentropy: Any
categorical_crossentropy: Any
elu: Any
gelu: Any
leaky_relu: Any
log_sigmoid: Any
log_softmax: Any
moments: Any
normalize: Any
one_hot: Any
relu: Any
relu6: Any
selu: Any
sigmoid: Any
silu: Any
softmax: Any
softplus: Any
softsign: Any
sparse_categorical_crossentropy: Any
swish: Any
