# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

abs: Any
argmax: Any
backend: Any
cast: Any
clear_session: Any
clip: Any
concatenate: Any
constant: Any
dot: Any
epsilon: Any
equal: Any
exp: Any
expand_dims: Any
flatten: Any
floatx: Any
function: Any
get_value: Any
image_data_format: Any
int_shape: Any
log: Any
max: Any
maximum: Any
mean: Any
min: Any
minimum: Any
ones: Any
pow: Any
random_normal: Any
random_uniform: Any
relu: Any
reshape: Any
round: Any
set_value: Any
shape: Any
sigmoid: Any
softmax: Any
sqrt: Any
square: Any
stack: Any
std: Any
sum: Any
tanh: Any
transpose: Any
from ndistribute.compat.tf import Variable as _variable
variable = _variable
zeros: Any
