# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

avg_pool: Any
avg_pool2d: Any
batch_normalization: Any
bias_add: Any
compute_average_loss: Any
conv2d: Any
dropout: Any
elu: Any
embedding_lookup: Any
gelu: Any
in_top_k: Any
l2_loss: Any
l2_normalize: Any
leaky_relu: Any
log_sigmoid: Any
log_softmax: Any
max_pool: Any
max_pool2d: Any
moments: Any
relu: Any
relu6: Any
scale_regularization_loss: Any
selu: Any
sigmoid: Any
sigmoid_cross_entropy_with_logits: Any
silu: Any
softmax: Any
softmax_cross_entropy_with_logits: Any
softplus: Any
softsign: Any
sparse_softmax_cross_entropy_with_logits: Any
swish: Any
tanh: Any
top_k: Any
zero_fraction: Any
