# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.models.layers.core import Activation as _Activation
Activation = _Activation
from ndistribute.models.layers.merging import Add as _Add
Add = _Add
from ndistribute.models.layers.merging import Average as _Average
Average = _Average
from ndistribute.models.layers.convolution import AveragePool2D as _AveragePool2D
AveragePool2D = _AveragePool2D
from ndistribute.models.layers.convolution import AveragePool2D as _AveragePooling2D
AveragePooling2D = _AveragePooling2D
from ndistribute.models.layers.normalization import BatchNormalization as _BatchNormalization
BatchNormalization = _BatchNormalization
from ndistribute.models.layers.core import ColumnParallelDense as _ColumnParallelDense
ColumnParallelDense = _ColumnParallelDense
from ndistribute.models.layers.merging import Concatenate as _Concatenate
Concatenate = _Concatenate
from ndistribute.models.layers.convolution import Conv2D as _Conv2D
Conv2D = _Conv2D
from ndistribute.models.layers.convolution import Conv2D as _Convolution2D
Convolution2D = _Convolution2D
from ndistribute.models.layers.core import Dense as _Dense
Dense = _Dense
from ndistribute.models.layers.merging import Dot as _Dot
Dot = _Dot
from ndistribute.models.layers.core import Dropout as _Dropout
Dropout = _Dropout
ELU: Any
from ndistribute.models.layers.core import Embedding as _Embedding
Embedding = _Embedding
from ndistribute.models.layers.core import Flatten as _Flatten
Flatten = _Flatten
from ndistribute.models.layers.convolution import GlobalAveragePool2D as _GlobalAveragePool2D
GlobalAveragePool2D = _GlobalAveragePool2D
from ndistribute.models.layers.convolution import GlobalAveragePool2D as _GlobalAveragePooling2D
GlobalAveragePooling2D = _GlobalAveragePooling2D
Input: Any
InputLayer: Any
from ndistribute.models.layers.core import Lambda as _Lambda
Lambda = _Lambda
from ndistribute.models.layers.layer import Layer as _Layer
Layer = _Layer
from ndistribute.models.layers.normalization import LayerNormalization as _LayerNormalization
LayerNormalization = _LayerNormalization
from ndistribute.models.layers.convolution import MaxPool2D as _MaxPool2D
MaxPool2D = _MaxPool2D
from ndistribute.models.layers.convolution import MaxPool2D as _MaxPooling2D
MaxPooling2D = _MaxPooling2D
from ndistribute.models.layers.merging import Maximum as _Maximum
Maximum = _Maximum
from ndistribute.models.layers.merging import Minimum as _Minimum
Minimum = _Minimum
from ndistribute.models.layers.core import MultiHeadAttention as _MultiHeadAttention
MultiHeadAttention = _MultiHeadAttention
from ndistribute.models.layers.merging import Multiply as _Multiply
Multiply = _Multiply
from ndistribute.models.layers.core import Permute as _Permute
Permute = _Permute
ReLU: Any
from ndistribute.models.layers.core import RepeatVector as _RepeatVector
RepeatVector = _RepeatVector
from ndistribute.models.layers.core import Reshape as _Reshape
Reshape = _Reshape
from ndistribute.models.layers.core import RowParallelDense as _RowParallelDense
RowParallelDense = _RowParallelDense
Softmax: Any
from ndistribute.models.layers.merging import Subtract as _Subtract
Subtract = _Subtract
SyncBatchNormalization: Any
add: Any
average: Any
concatenate: Any
dot: Any
maximum: Any
minimum: Any
multiply: Any
set_dtype_policy: Any
subtract: Any
