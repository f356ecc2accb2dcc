"""Layers: functions of arrays with variables of their own."""

from ndistribute.exports import export as _export
from ndistribute.models.layers.convolution import AveragePool1D as AveragePool1D
from ndistribute.models.layers.convolution import AveragePool2D as AveragePool2D
from ndistribute.models.layers.convolution import Conv1D as Conv1D
from ndistribute.models.layers.convolution import Conv2D as Conv2D
from ndistribute.models.layers.convolution import Conv2DTranspose as Conv2DTranspose
from ndistribute.models.layers.convolution import DepthwiseConv2D as DepthwiseConv2D
from ndistribute.models.layers.convolution import GlobalAveragePool1D as GlobalAveragePool1D
from ndistribute.models.layers.convolution import GlobalAveragePool2D as GlobalAveragePool2D
from ndistribute.models.layers.convolution import GlobalMaxPool1D as GlobalMaxPool1D
from ndistribute.models.layers.convolution import GlobalMaxPool2D as GlobalMaxPool2D
from ndistribute.models.layers.convolution import MaxPool1D as MaxPool1D
from ndistribute.models.layers.convolution import MaxPool2D as MaxPool2D
from ndistribute.models.layers.core import Activation as Activation
from ndistribute.models.layers.core import ColumnParallelDense as ColumnParallelDense
from ndistribute.models.layers.core import Dense as Dense
from ndistribute.models.layers.core import Dropout as Dropout
from ndistribute.models.layers.core import Embedding as Embedding
from ndistribute.models.layers.core import Flatten as Flatten
from ndistribute.models.layers.core import Input as Input
from ndistribute.models.layers.core import LeakyReLU as LeakyReLU
from ndistribute.models.layers.core import MultiHeadAttention as MultiHeadAttention
from ndistribute.models.layers.core import PReLU as PReLU
from ndistribute.models.layers.core import Reshape as Reshape
from ndistribute.models.layers.core import RowParallelDense as RowParallelDense
from ndistribute.models.layers.images import CenterCrop as CenterCrop
from ndistribute.models.layers.images import Cropping2D as Cropping2D
from ndistribute.models.layers.images import RandomCrop as RandomCrop
from ndistribute.models.layers.images import RandomFlip as RandomFlip
from ndistribute.models.layers.images import Rescaling as Rescaling
from ndistribute.models.layers.images import UpSampling2D as UpSampling2D
from ndistribute.models.layers.images import ZeroPadding2D as ZeroPadding2D
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
