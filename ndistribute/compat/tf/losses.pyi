# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.models.losses import BinaryCrossentropy as _BinaryCrossentropy
BinaryCrossentropy = _BinaryCrossentropy
from ndistribute.models.losses import CategoricalCrossentropy as _CategoricalCrossentropy
CategoricalCrossentropy = _CategoricalCrossentropy
from ndistribute.models.losses import Huber as _Huber
Huber = _Huber
from ndistribute.models.losses import Loss as _Loss
Loss = _Loss
MAE: Any
MSE: Any
from ndistribute.models.losses import MeanAbsoluteError as _MeanAbsoluteError
MeanAbsoluteError = _MeanAbsoluteError
from ndistribute.models.losses import MeanSquaredError as _MeanSquaredError
MeanSquaredError = _MeanSquaredError
Reduction: Any
from ndistribute.models.losses import SparseCategoricalCrossentropy as _SparseCategoricalCrossentropy
SparseCategoricalCrossentropy = _SparseCategoricalCrossentropy
binary_crossentropy: Any
categorical_crossentropy: Any
compute_average_loss: Any
get: Any
huber: Any
mean_absolute_error: Any
mean_squared_error: Any
scale_regularization_loss: Any
sparse_categorical_crossentropy: Any
