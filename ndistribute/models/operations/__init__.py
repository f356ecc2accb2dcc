"""Fused operations of layers and losses: one entry of the tape each, with buffers reused.

They accept plain and tracked arrays and variables. Host arrays of 16-bit floats are computed in
float32, because NumPy has no fast products for them.
"""

from ndistribute.models.operations.images import average_pool2d as average_pool2d
from ndistribute.models.operations.images import conv2d as conv2d
from ndistribute.models.operations.images import conv2d_transpose as conv2d_transpose
from ndistribute.models.operations.images import max_pool2d as max_pool2d
from ndistribute.models.operations.rows import attention as attention
from ndistribute.models.operations.rows import batch_normalization as batch_normalization
from ndistribute.models.operations.rows import causal_mask as causal_mask
from ndistribute.models.operations.rows import check_range as check_range
from ndistribute.models.operations.rows import dense as dense
from ndistribute.models.operations.rows import layer_normalization as layer_normalization
from ndistribute.models.operations.rows import masked_normalization as masked_normalization
from ndistribute.models.operations.rows import normalized_by as normalized_by
from ndistribute.models.operations.rows import sigmoid_cross_entropy as sigmoid_cross_entropy
from ndistribute.models.operations.rows import softmax_cross_entropy as softmax_cross_entropy
from ndistribute.models.operations.sequences import GRUStep as GRUStep
from ndistribute.models.operations.sequences import LSTMStep as LSTMStep
from ndistribute.models.operations.sequences import RecurrentStep as RecurrentStep
from ndistribute.models.operations.sequences import recurrent as recurrent
