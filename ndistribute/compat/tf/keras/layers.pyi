# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.models.layers.core import Activation as _Activation
Activation = _Activation
from ndistribute.models.layers.merging import Add as _Add
Add = _Add
from ndistribute.models.layers.merging import Average as _Average
Average = _Average
from ndistribute.models.layers.convolution import AveragePool1D as _AveragePool1D
AveragePool1D = _AveragePool1D
from ndistribute.models.layers.convolution import AveragePool2D as _AveragePool2D
AveragePool2D = _AveragePool2D
from ndistribute.models.layers.convolution import AveragePool1D as _AveragePooling1D
AveragePooling1D = _AveragePooling1D
from ndistribute.models.layers.convolution import AveragePool2D as _AveragePooling2D
AveragePooling2D = _AveragePooling2D
from ndistribute.models.layers.normalization import BatchNormalization as _BatchNormalization
BatchNormalization = _BatchNormalization
from ndistribute.models.layers.recurrent import Bidirectional as _Bidirectional
Bidirectional = _Bidirectional
from ndistribute.models.layers.preprocessing import CategoryEncoding as _CategoryEncoding
CategoryEncoding = _CategoryEncoding
from ndistribute.models.layers.resizing import CenterCrop as _CenterCrop
CenterCrop = _CenterCrop
from ndistribute.models.layers.core import ColumnParallelDense as _ColumnParallelDense
ColumnParallelDense = _ColumnParallelDense
from ndistribute.models.layers.merging import Concatenate as _Concatenate
Concatenate = _Concatenate
from ndistribute.models.layers.convolution import Conv1D as _Conv1D
Conv1D = _Conv1D
from ndistribute.models.layers.convolution import Conv2D as _Conv2D
Conv2D = _Conv2D
from ndistribute.models.layers.convolution import Conv2DTranspose as _Conv2DTranspose
Conv2DTranspose = _Conv2DTranspose
from ndistribute.models.layers.convolution import Conv2D as _Convolution2D
Convolution2D = _Convolution2D
from ndistribute.models.layers.resizing import Cropping2D as _Cropping2D
Cropping2D = _Cropping2D
from ndistribute.models.layers.core import Dense as _Dense
Dense = _Dense
from ndistribute.models.layers.convolution import DepthwiseConv2D as _DepthwiseConv2D
DepthwiseConv2D = _DepthwiseConv2D
from ndistribute.models.layers.preprocessing import Discretization as _Discretization
Discretization = _Discretization
from ndistribute.models.layers.core import Dropout as _Dropout
Dropout = _Dropout
from ndistribute.models.layers.core import ELU as _ELU
ELU = _ELU
from ndistribute.models.layers.core import Embedding as _Embedding
Embedding = _Embedding
from ndistribute.models.layers.core import Flatten as _Flatten
Flatten = _Flatten
from ndistribute.models.layers.recurrent import GRU as _GRU
GRU = _GRU
from ndistribute.models.layers.recurrent import GRUCell as _GRUCell
GRUCell = _GRUCell
from ndistribute.models.layers.preprocessing import GaussianNoise as _GaussianNoise
GaussianNoise = _GaussianNoise
from ndistribute.models.layers.convolution import GlobalAveragePool1D as _GlobalAveragePool1D
GlobalAveragePool1D = _GlobalAveragePool1D
from ndistribute.models.layers.convolution import GlobalAveragePool2D as _GlobalAveragePool2D
GlobalAveragePool2D = _GlobalAveragePool2D
from ndistribute.models.layers.convolution import GlobalAveragePool1D as _GlobalAveragePooling1D
GlobalAveragePooling1D = _GlobalAveragePooling1D
from ndistribute.models.layers.convolution import GlobalAveragePool2D as _GlobalAveragePooling2D
GlobalAveragePooling2D = _GlobalAveragePooling2D
from ndistribute.models.layers.convolution import GlobalMaxPool1D as _GlobalMaxPool1D
GlobalMaxPool1D = _GlobalMaxPool1D
from ndistribute.models.layers.convolution import GlobalMaxPool2D as _GlobalMaxPool2D
GlobalMaxPool2D = _GlobalMaxPool2D
from ndistribute.models.layers.convolution import GlobalMaxPool1D as _GlobalMaxPooling1D
GlobalMaxPooling1D = _GlobalMaxPooling1D
from ndistribute.models.layers.convolution import GlobalMaxPool2D as _GlobalMaxPooling2D
GlobalMaxPooling2D = _GlobalMaxPooling2D
from ndistribute.models.layers.normalization import GroupNormalization as _GroupNormalization
GroupNormalization = _GroupNormalization
from ndistribute.models.layers.preprocessing import Hashing as _Hashing
Hashing = _Hashing
Input: Any
InputLayer: Any
from ndistribute.models.layers.preprocessing import IntegerLookup as _IntegerLookup
IntegerLookup = _IntegerLookup
from ndistribute.models.layers.recurrent import LSTM as _LSTM
LSTM = _LSTM
from ndistribute.models.layers.recurrent import LSTMCell as _LSTMCell
LSTMCell = _LSTMCell
from ndistribute.models.layers.core import Lambda as _Lambda
Lambda = _Lambda
from ndistribute.compat.keras_layers import Layer as _Layer
Layer = _Layer
from ndistribute.models.layers.normalization import LayerNormalization as _LayerNormalization
LayerNormalization = _LayerNormalization
from ndistribute.models.layers.core import LeakyReLU as _LeakyReLU
LeakyReLU = _LeakyReLU
from ndistribute.models.layers.core import Masking as _Masking
Masking = _Masking
from ndistribute.models.layers.convolution import MaxPool1D as _MaxPool1D
MaxPool1D = _MaxPool1D
from ndistribute.models.layers.convolution import MaxPool2D as _MaxPool2D
MaxPool2D = _MaxPool2D
from ndistribute.models.layers.convolution import MaxPool1D as _MaxPooling1D
MaxPooling1D = _MaxPooling1D
from ndistribute.models.layers.convolution import MaxPool2D as _MaxPooling2D
MaxPooling2D = _MaxPooling2D
from ndistribute.models.layers.merging import Maximum as _Maximum
Maximum = _Maximum
from ndistribute.models.layers.merging import Minimum as _Minimum
Minimum = _Minimum
from ndistribute.models.layers.attention import MultiHeadAttention as _MultiHeadAttention
MultiHeadAttention = _MultiHeadAttention
from ndistribute.models.layers.merging import Multiply as _Multiply
Multiply = _Multiply
from ndistribute.models.layers.preprocessing import Normalization as _Normalization
Normalization = _Normalization
from ndistribute.models.layers.core import PReLU as _PReLU
PReLU = _PReLU
from ndistribute.models.layers.core import Permute as _Permute
Permute = _Permute
from ndistribute.models.layers.recurrent import RNN as _RNN
RNN = _RNN
from ndistribute.models.layers.resizing import RandomContrast as _RandomContrast
RandomContrast = _RandomContrast
from ndistribute.models.layers.resizing import RandomCrop as _RandomCrop
RandomCrop = _RandomCrop
from ndistribute.models.layers.resizing import RandomFlip as _RandomFlip
RandomFlip = _RandomFlip
from ndistribute.models.layers.resizing import RandomRotation as _RandomRotation
RandomRotation = _RandomRotation
from ndistribute.models.layers.resizing import RandomTranslation as _RandomTranslation
RandomTranslation = _RandomTranslation
from ndistribute.models.layers.resizing import RandomZoom as _RandomZoom
RandomZoom = _RandomZoom
from ndistribute.models.layers.core import ReLU as _ReLU
ReLU = _ReLU
from ndistribute.models.layers.core import RepeatVector as _RepeatVector
RepeatVector = _RepeatVector
from ndistribute.models.layers.resizing import Rescaling as _Rescaling
Rescaling = _Rescaling
from ndistribute.models.layers.core import Reshape as _Reshape
Reshape = _Reshape
from ndistribute.models.layers.resizing import Resizing as _Resizing
Resizing = _Resizing
from ndistribute.models.layers.core import RowParallelDense as _RowParallelDense
RowParallelDense = _RowParallelDense
from ndistribute.models.layers.convolution import SeparableConv2D as _SeparableConv2D
SeparableConv2D = _SeparableConv2D
from ndistribute.models.layers.recurrent import SimpleRNN as _SimpleRNN
SimpleRNN = _SimpleRNN
from ndistribute.models.layers.recurrent import SimpleRNNCell as _SimpleRNNCell
SimpleRNNCell = _SimpleRNNCell
from ndistribute.models.layers.core import Softmax as _Softmax
Softmax = _Softmax
from ndistribute.models.layers.core import SpatialDropout1D as _SpatialDropout1D
SpatialDropout1D = _SpatialDropout1D
from ndistribute.models.layers.core import SpatialDropout2D as _SpatialDropout2D
SpatialDropout2D = _SpatialDropout2D
from ndistribute.models.layers.preprocessing import StringLookup as _StringLookup
StringLookup = _StringLookup
from ndistribute.models.layers.merging import Subtract as _Subtract
Subtract = _Subtract
SyncBatchNormalization: Any
from ndistribute.models.layers.preprocessing import TextVectorization as _TextVectorization
TextVectorization = _TextVectorization
from ndistribute.models.layers.recurrent import TimeDistributed as _TimeDistributed
TimeDistributed = _TimeDistributed
from ndistribute.models.layers.resizing import UpSampling2D as _UpSampling2D
UpSampling2D = _UpSampling2D
from ndistribute.models.layers.resizing import ZeroPadding2D as _ZeroPadding2D
ZeroPadding2D = _ZeroPadding2D
add: Any
average: Any
concatenate: Any
deserialize: Any
maximum: Any
minimum: Any
multiply: Any
serialize: Any
set_dtype_policy: Any
subtract: Any
