# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.models.losses import BinaryCrossentropy as _BinaryCrossentropy
BinaryCrossentropy = _BinaryCrossentropy
from ndistribute.models.losses import CategoricalCrossentropy as _CategoricalCrossentropy
CategoricalCrossentropy = _CategoricalCrossentropy
from ndistribute.models.losses import CategoricalHinge as _CategoricalHinge
CategoricalHinge = _CategoricalHinge
from ndistribute.models.losses import CosineSimilarity as _CosineSimilarity
CosineSimilarity = _CosineSimilarity
from ndistribute.models.losses import Hinge as _Hinge
Hinge = _Hinge
from ndistribute.models.losses import Huber as _Huber
Huber = _Huber
from ndistribute.models.losses import KLDivergence as _KLDivergence
KLDivergence = _KLDivergence
from ndistribute.models.losses import LogCosh as _LogCosh
LogCosh = _LogCosh
from ndistribute.models.losses import Loss as _Loss
Loss = _Loss
MAE: Any
MSE: Any
from ndistribute.models.losses import MeanAbsoluteError as _MeanAbsoluteError
MeanAbsoluteError = _MeanAbsoluteError
from ndistribute.models.losses import MeanAbsolutePercentageError as _MeanAbsolutePercentageError
MeanAbsolutePercentageError = _MeanAbsolutePercentageError
from ndistribute.models.losses import MeanSquaredError as _MeanSquaredError
MeanSquaredError = _MeanSquaredError
from ndistribute.models.losses import MeanSquaredLogarithmicError as _MeanSquaredLogarithmicError
MeanSquaredLogarithmicError = _MeanSquaredLogarithmicError
from ndistribute.models.losses import Poisson as _Poisson
Poisson = _Poisson
Reduction: Any
from ndistribute.models.losses import SparseCategoricalCrossentropy as _SparseCategoricalCrossentropy
SparseCategoricalCrossentropy = _SparseCategoricalCrossentropy
from ndistribute.models.losses import SquaredHinge as _SquaredHinge
SquaredHinge = _SquaredHinge
absolute_difference: Any
binary_crossentropy: Any
categorical_crossentropy: Any
categorical_hinge: Any
compute_average_loss: Any
cosine_similarity: Any
deserialize: Any
get: Any
get_regularization_loss: Any
get_total_loss: Any
hinge: Any
huber: Any
huber_loss: Any
kl_divergence: Any
log_cosh: Any
mae: Any
mean_absolute_error: Any
mean_absolute_percentage_error: Any
mean_squared_error: Any
mean_squared_logarithmic_error: Any
mse: Any
poisson: Any
scale_regularization_loss: Any
serialize: Any
sigmoid_cross_entropy: Any
softmax_cross_entropy: Any
sparse_categorical_crossentropy: Any
sparse_softmax_cross_entropy: Any
squared_hinge: Any
