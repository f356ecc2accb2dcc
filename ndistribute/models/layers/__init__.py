"""Layers: functions of arrays with variables of their own."""

from ndistribute.exports import export as _export
from ndistribute.models.layers.convolution import AveragePool2D as AveragePool2D
from ndistribute.models.layers.convolution import Conv2D as Conv2D
from ndistribute.models.layers.convolution import GlobalAveragePool2D as GlobalAveragePool2D
from ndistribute.models.layers.convolution import MaxPool2D as MaxPool2D
from ndistribute.models.layers.core import Activation as Activation
from ndistribute.models.layers.core import ColumnParallelDense as ColumnParallelDense
from ndistribute.models.layers.core import Dense as Dense
from ndistribute.models.layers.core import Dropout as Dropout
from ndistribute.models.layers.core import Embedding as Embedding
from ndistribute.models.layers.core import Flatten as Flatten
from ndistribute.models.layers.core import Lambda as Lambda
from ndistribute.models.layers.core import MultiHeadAttention as MultiHeadAttention
from ndistribute.models.layers.core import Permute as Permute
from ndistribute.models.layers.core import RepeatVector as RepeatVector
from ndistribute.models.layers.core import Reshape as Reshape
from ndistribute.models.layers.core import RowParallelDense as RowParallelDense
from ndistribute.models.layers.inputs import Input as Input
from ndistribute.models.layers.inputs import InputLayer as InputLayer
from ndistribute.models.layers.layer import Layer as Layer
from ndistribute.models.layers.layer import set_dtype_policy as set_dtype_policy
from ndistribute.models.layers.merging import Add as Add
from ndistribute.models.layers.merging import Average as Average
from ndistribute.models.layers.merging import Concatenate as Concatenate
from ndistribute.models.layers.merging import Dot as Dot
from ndistribute.models.layers.merging import Maximum as Maximum
from ndistribute.models.layers.merging import Minimum as Minimum
from ndistribute.models.layers.merging import Multiply as Multiply
from ndistribute.models.layers.merging import Subtract as Subtract
from ndistribute.models.layers.merging import add as add
from ndistribute.models.layers.merging import average as average
from ndistribute.models.layers.merging import concatenate as concatenate
from ndistribute.models.layers.merging import dot as dot
from ndistribute.models.layers.merging import maximum as maximum
from ndistribute.models.layers.merging import minimum as minimum
from ndistribute.models.layers.merging import multiply as multiply
from ndistribute.models.layers.merging import subtract as subtract
from ndistribute.models.layers.normalization import BatchNormalization as BatchNormalization
from ndistribute.models.layers.normalization import LayerNormalization as LayerNormalization

_export(vars())
