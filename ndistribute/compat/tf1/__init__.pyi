# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

__version__: str
from ndistribute.compat.tf import compat as compat
from ndistribute.compat.tf1 import GraphKeys as GraphKeys
from ndistribute.compat.tf1 import UnconnectedGradients as UnconnectedGradients
from ndistribute.compat.tf1 import app as app
from ndistribute.compat.tf1 import autograph as autograph
from ndistribute.compat.tf1 import bitwise as bitwise
from ndistribute.compat.tf1 import config as config
from ndistribute.compat.tf1 import contrib as contrib
from ndistribute.compat.tf1 import data as data
from ndistribute.compat.tf1 import debugging as debugging
from ndistribute.compat.tf1 import distribute as distribute
from ndistribute.compat.tf1 import dtypes as dtypes
from ndistribute.compat.tf1 import errors as errors
from ndistribute.compat.tf1 import estimator as estimator
from ndistribute.compat.tf1 import feature_column as feature_column
from ndistribute.compat.tf1 import flags as flags
from ndistribute.compat.tf1 import gfile as gfile
from ndistribute.compat.tf1 import image as image
from ndistribute.compat.tf1 import initializers as initializers
from ndistribute.compat.tf1 import io as io
from ndistribute.compat.tf1 import keras as keras
from ndistribute.compat.tf1 import layers as layers
from ndistribute.compat.tf1 import linalg as linalg
from ndistribute.compat.tf1 import logging as logging
from ndistribute.compat.tf1 import losses as losses
from ndistribute.compat.tf1 import math as math
from ndistribute.compat.tf1 import metrics as metrics
from ndistribute.compat.tf1 import nest as nest
from ndistribute.compat.tf1 import nn as nn
from ndistribute.compat.tf1 import optimizers as optimizers
from ndistribute.compat.tf1 import random as random
from ndistribute.compat.tf1 import saved_model as saved_model
from ndistribute.compat.tf1 import signal as signal
from ndistribute.compat.tf1 import strings as strings
from ndistribute.compat.tf1 import summary as summary
from ndistribute.compat.tf1 import tpu as tpu
from ndistribute.compat.tf1 import train as train
from ndistribute.compat.tf1 import version as version
AUTO_REUSE: Any
Assert: Any
from ndistribute.graph.session import ConfigProto as _ConfigProto
ConfigProto = _ConfigProto
DType: Any
from ndistribute.graph.session import GPUOptions as _GPUOptions
GPUOptions = _GPUOptions
from ndistribute.compat.tensors import WatchingTape as _GradientTape
GradientTape = _GradientTape
from ndistribute.graph.graph import Graph as _Graph
Graph = _Graph
from ndistribute.compat.tensor_functions import IndexedSlices as _IndexedSlices
IndexedSlices = _IndexedSlices
from ndistribute.compat.functions import Module as _Module
Module = _Module
from ndistribute.graph.graph import Operation as _Operation
Operation = _Operation
RunMetadata: Any
from ndistribute.graph.session import RunOptions as _RunOptions
RunOptions = _RunOptions
from ndistribute.compat.graphs import BytesSession as _Session
Session = _Session
from ndistribute.compat.tensors import Tensor as _Tensor
Tensor = _Tensor
from ndistribute.compat.tensor_functions import TensorArray as _TensorArray
TensorArray = _TensorArray
from ndistribute.graph.shapes import Shape as _TensorShape
TensorShape = _TensorShape
TensorSpec: Any
Variable: Any
from ndistribute.variables.policy import VariableAggregation as _VariableAggregation
VariableAggregation = _VariableAggregation
from ndistribute.variables.policy import VariableSynchronization as _VariableSynchronization
VariableSynchronization = _VariableSynchronization
abs: Any
accumulate_n: Any
acos: Any
acosh: Any
add: Any
add_n: Any
add_to_collection: Any
all_variables: Any
angle: Any
argmax: Any
argmin: Any
argsort: Any
as_dtype: Any
asin: Any
asinh: Any
assign: Any
assign_add: Any
assign_sub: Any
atan: Any
atan2: Any
atanh: Any
bool: Any
boolean_mask: Any
broadcast_to: Any
cast: Any
ceil: Any
clip_by_global_norm: Any
clip_by_norm: Any
clip_by_value: Any
complex: Any
complex128: Any
complex64: Any
concat: Any
cond: Any
confusion_matrix: Any
conj: Any
constant: Any
from ndistribute.models.initializers import Constant as _constant_initializer
constant_initializer = _constant_initializer
control_dependencies: Any
convert_to_tensor: Any
cos: Any
cosh: Any
count_nonzero: Any
cumprod: Any
cumsum: Any
custom_gradient: Any
device: Any
diag: Any
disable_eager_execution: Any
disable_v2_behavior: Any
div: Any
divide: Any
divide_no_nan: Any
double: Any
einsum: Any
enable_eager_execution: Any
enable_v2_behavior: Any
ensure_shape: Any
equal: Any
erf: Any
executing_eagerly: Any
exp: Any
expand_dims: Any
expm1: Any
eye: Any
fill: Any
float16: Any
float32: Any
float64: Any
floor: Any
floordiv: Any
floormod: Any
function: Any
gather: Any
gather_nd: Any
get_collection: Any
get_default_graph: Any
get_logger: Any
get_static_value: Any
get_variable: Any
get_variable_scope: Any
global_norm: Any
global_variables: Any
global_variables_initializer: Any
glorot_uniform_initializer: Any
gradients: Any
greater: Any
greater_equal: Any
group: Any
half: Any
histogram_summary: Any
identity: Any
imag: Any
image_summary: Any
in_top_k: Any
init_scope: Any
initialize_all_variables: Any
initialize_local_variables: Any
int16: Any
int32: Any
int64: Any
int8: Any
is_finite: Any
is_inf: Any
is_nan: Any
is_tensor: Any
l2_normalize: Any
less: Any
less_equal: Any
linspace: Any
local_variables: Any
local_variables_initializer: Any
log: Any
log1p: Any
log_sigmoid: Any
log_softmax: Any
logical_and: Any
logical_not: Any
logical_or: Any
logical_xor: Any
map_fn: Any
matmul: Any
maximum: Any
merge_all_summaries: Any
merge_summary: Any
meshgrid: Any
minimum: Any
mod: Any
mul: Any
multiply: Any
name_scope: Any
neg: Any
negative: Any
newaxis: Any
nextafter: Any
no_op: Any
norm: Any
not_equal: Any
numpy_function: Any
one_hot: Any
ones: Any
from ndistribute.models.initializers import Ones as _ones_initializer
ones_initializer = _ones_initializer
ones_like: Any
pack: Any
pad: Any
placeholder: Any
pow: Any
print: Any
py_func: Any
py_function: Any
random_normal: Any
random_normal_initializer: Any
random_uniform: Any
random_uniform_initializer: Any
range: Any
rank: Any
real: Any
realdiv: Any
reciprocal: Any
reduce_all: Any
reduce_any: Any
reduce_logsumexp: Any
reduce_max: Any
reduce_mean: Any
reduce_min: Any
reduce_prod: Any
reduce_std: Any
reduce_sum: Any
reduce_variance: Any
repeat: Any
report_uninitialized_variables: Any
reset_default_graph: Any
reshape: Any
reverse: Any
rint: Any
roll: Any
round: Any
rsqrt: Any
saturate_cast: Any
scalar_mul: Any
scalar_summary: Any
scatter_nd: Any
segment_sum: Any
sequence_mask: Any
set_random_seed: Any
shape: Any
sigmoid: Any
sign: Any
sin: Any
sinh: Any
size: Any
slice: Any
softmax: Any
softplus: Any
softsign: Any
sort: Any
split: Any
sqrt: Any
square: Any
squared_difference: Any
squeeze: Any
stack: Any
stop_gradient: Any
string: Any
sub: Any
subtract: Any
tan: Any
tanh: Any
tensor_scatter_nd_add: Any
tensor_scatter_nd_max: Any
tensor_scatter_nd_min: Any
tensor_scatter_nd_sub: Any
tensor_scatter_nd_update: Any
tensordot: Any
tile: Any
timestamp: Any
to_float: Any
to_int32: Any
to_int64: Any
top_k: Any
trainable_variables: Any
transpose: Any
truediv: Any
truncated_normal: Any
truncated_normal_initializer: Any
truncatemod: Any
uint16: Any
uint32: Any
uint64: Any
uint8: Any
unique: Any
unique_with_counts: Any
unpack: Any
unsorted_segment_sum: Any
unstack: Any
variable_scope: Any
variables_initializer: Any
vectorized_map: Any
where: Any
while_loop: Any
zero_fraction: Any
zeros: Any
from ndistribute.models.initializers import Zeros as _zeros_initializer
zeros_initializer = _zeros_initializer
zeros_like: Any
