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
from ndistribute.models.layers.core import Input as Input
from ndistribute.models.layers.core import MultiHeadAttention as MultiHeadAttention
from ndistribute.models.layers.core import Reshape as Reshape
from ndistribute.models.layers.core import RowParallelDense as RowParallelDense
from ndistribute.models.layers.layer import Layer as Layer
from ndistribute.models.layers.layer import set_dtype_policy as set_dtype_policy
from ndistribute.models.layers.normalization import BatchNormalization as BatchNormalization
from ndistribute.models.layers.normalization import LayerNormalization as LayerNormalization
from ndistribute.models.layers.recurrent import GRU as GRU
from ndistribute.models.layers.recurrent import LSTM as LSTM
from ndistribute.models.layers.recurrent import Bidirectional as Bidirectional
from ndistribute.models.layers.recurrent import Masking as Masking
from ndistribute.models.layers.recurrent import SimpleRNN as SimpleRNN
from ndistribute.models.layers.recurrent import TimeDistributed as TimeDistributed

_export(vars())
