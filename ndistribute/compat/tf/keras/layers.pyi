# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.models.layers.core import Activation as _Activation
Activation = _Activation
from ndistribute.models.layers.convolution import AveragePool2D as _AveragePool2D
AveragePool2D = _AveragePool2D
from ndistribute.models.layers.convolution import AveragePool2D as _AveragePooling2D
AveragePooling2D = _AveragePooling2D
from ndistribute.models.layers.normalization import BatchNormalization as _BatchNormalization
BatchNormalization = _BatchNormalization
from ndistribute.models.layers.core import ColumnParallelDense as _ColumnParallelDense
ColumnParallelDense = _ColumnParallelDense
from ndistribute.models.layers.convolution import Conv2D as _Conv2D
Conv2D = _Conv2D
from ndistribute.models.layers.convolution import Conv2D as _Convolution2D
Convolution2D = _Convolution2D
from ndistribute.models.layers.core import Dense as _Dense
Dense = _Dense
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
from ndistribute.models.layers.core import Activation as _Lambda
Lambda = _Lambda
from ndistribute.models.layers.layer import Layer as _Layer
Layer = _Layer
from ndistribute.models.layers.normalization import LayerNormalization as _LayerNormalization
LayerNormalization = _LayerNormalization
from ndistribute.models.layers.convolution import MaxPool2D as _MaxPool2D
MaxPool2D = _MaxPool2D
from ndistribute.models.layers.convolution import MaxPool2D as _MaxPooling2D
MaxPooling2D = _MaxPooling2D
from ndistribute.models.layers.core import MultiHeadAttention as _MultiHeadAttention
MultiHeadAttention = _MultiHeadAttention
ReLU: Any
from ndistribute.models.layers.core import Reshape as _Reshape
Reshape = _Reshape
from ndistribute.models.layers.core import RowParallelDense as _RowParallelDense
RowParallelDense = _RowParallelDense
Softmax: Any
SyncBatchNormalization: Any
set_dtype_policy: Any
