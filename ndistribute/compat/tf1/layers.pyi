# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.compat.layers import AveragePooling2D as _AveragePooling2D
AveragePooling2D = _AveragePooling2D
from ndistribute.compat.layers import BatchNormalization as _BatchNormalization
BatchNormalization = _BatchNormalization
from ndistribute.compat.layers import Conv2D as _Conv2D
Conv2D = _Conv2D
from ndistribute.compat.layers import Dense as _Dense
Dense = _Dense
from ndistribute.compat.layers import Dropout as _Dropout
Dropout = _Dropout
from ndistribute.compat.layers import Flatten as _Flatten
Flatten = _Flatten
from ndistribute.compat.layers import MaxPooling2D as _MaxPooling2D
MaxPooling2D = _MaxPooling2D
average_pooling2d: Any
batch_normalization: Any
conv2d: Any
dense: Any
dropout: Any
flatten: Any
max_pooling2d: Any
