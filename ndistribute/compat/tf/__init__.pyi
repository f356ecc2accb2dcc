# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

__version__: str
from ndistribute.compat.tf import UnconnectedGradients as UnconnectedGradients
from ndistribute.compat.tf import autograph as autograph
from ndistribute.compat.tf import bitwise as bitwise
from ndistribute.compat.tf import compat as compat
from ndistribute.compat.tf import config as config
from ndistribute.compat.tf import data as data
from ndistribute.compat.tf import debugging as debugging
from ndistribute.compat.tf import distribute as distribute
from ndistribute.compat.tf import dtypes as dtypes
from ndistribute.compat.tf import errors as errors
from ndistribute.compat.tf import estimator as estimator
from ndistribute.compat.tf import feature_column as feature_column
from ndistribute.compat.tf import image as image
from ndistribute.compat.tf import initializers as initializers
from ndistribute.compat.tf import io as io
from ndistribute.compat.tf import keras as keras
from ndistribute.compat.tf import linalg as linalg
from ndistribute.compat.tf import losses as losses
from ndistribute.compat.tf import math as math
from ndistribute.compat.tf import metrics as metrics
from ndistribute.compat.tf import nest as nest
from ndistribute.compat.tf import nn as nn
from ndistribute.compat.tf import optimizers as optimizers
from ndistribute.compat.tf import random as random
from ndistribute.compat.tf import saved_model as saved_model
from ndistribute.compat.tf import signal as signal
from ndistribute.compat.tf import strings as strings
from ndistribute.compat.tf import summary as summary
from ndistribute.compat.tf import tpu as tpu
from ndistribute.compat.tf import train as train
from ndistribute.compat.tf import version as version
Assert: Any
DType: Any
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
angle: Any
argmax: Any
argmin: Any
argsort: Any
as_dtype: Any
asin: Any
asinh: Any
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
divide: Any
divide_no_nan: Any
double: Any
einsum: Any
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
get_logger: Any
get_static_value: Any
greater: Any
greater_equal: Any
group: Any
half: Any
identity: Any
imag: Any
in_top_k: Any
init_scope: Any
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
meshgrid: Any
minimum: Any
mod: Any
multiply: Any
name_scope: Any
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
pad: Any
pow: Any
print: Any
py_function: Any
from ndistribute.models.initializers import RandomNormal as _random_normal_initializer
random_normal_initializer = _random_normal_initializer
from ndistribute.models.initializers import RandomUniform as _random_uniform_initializer
random_uniform_initializer = _random_uniform_initializer
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
reshape: Any
reverse: Any
rint: Any
roll: Any
round: Any
rsqrt: Any
saturate_cast: Any
scalar_mul: Any
scatter_nd: Any
segment_sum: Any
sequence_mask: Any
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
top_k: Any
transpose: Any
truediv: Any
truncatemod: Any
uint16: Any
uint32: Any
uint64: Any
uint8: Any
unique: Any
unique_with_counts: Any
unsorted_segment_sum: Any
unstack: Any
vectorized_map: Any
where: Any
while_loop: Any
zero_fraction: Any
zeros: Any
from ndistribute.models.initializers import Zeros as _zeros_initializer
zeros_initializer = _zeros_initializer
zeros_like: Any
