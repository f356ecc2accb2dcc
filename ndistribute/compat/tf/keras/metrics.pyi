# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.models.metrics import AUC as _AUC
AUC = _AUC
from ndistribute.models.metrics import Accuracy as _Accuracy
Accuracy = _Accuracy
from ndistribute.models.metrics import BinaryAccuracy as _BinaryAccuracy
BinaryAccuracy = _BinaryAccuracy
from ndistribute.models.metrics import BinaryCrossentropy as _BinaryCrossentropy
BinaryCrossentropy = _BinaryCrossentropy
from ndistribute.models.metrics import CategoricalAccuracy as _CategoricalAccuracy
CategoricalAccuracy = _CategoricalAccuracy
from ndistribute.models.metrics import CategoricalCrossentropy as _CategoricalCrossentropy
CategoricalCrossentropy = _CategoricalCrossentropy
from ndistribute.models.metrics import FalseNegatives as _FalseNegatives
FalseNegatives = _FalseNegatives
from ndistribute.models.metrics import FalsePositives as _FalsePositives
FalsePositives = _FalsePositives
from ndistribute.models.metrics import Mean as _Mean
Mean = _Mean
from ndistribute.models.metrics import MeanAbsoluteError as _MeanAbsoluteError
MeanAbsoluteError = _MeanAbsoluteError
from ndistribute.models.metrics import MeanAbsolutePercentageError as _MeanAbsolutePercentageError
MeanAbsolutePercentageError = _MeanAbsolutePercentageError
from ndistribute.models.metrics import MeanMetric as _MeanMetric
MeanMetric = _MeanMetric
from ndistribute.models.metrics import MeanSquaredError as _MeanSquaredError
MeanSquaredError = _MeanSquaredError
from ndistribute.models.metrics import Metric as _Metric
Metric = _Metric
from ndistribute.models.metrics import Precision as _Precision
Precision = _Precision
from ndistribute.models.metrics import Recall as _Recall
Recall = _Recall
from ndistribute.models.metrics import RootMeanSquaredError as _RootMeanSquaredError
RootMeanSquaredError = _RootMeanSquaredError
from ndistribute.models.metrics import SparseCategoricalAccuracy as _SparseCategoricalAccuracy
SparseCategoricalAccuracy = _SparseCategoricalAccuracy
from ndistribute.models.metrics import SparseCategoricalCrossentropy as _SparseCategoricalCrossentropy
SparseCategoricalCrossentropy = _SparseCategoricalCrossentropy
from ndistribute.models.metrics import SparseTopKCategoricalAccuracy as _SparseTopKCategoricalAccuracy
SparseTopKCategoricalAccuracy = _SparseTopKCategoricalAccuracy
from ndistribute.models.metrics import Sum as _Sum
Sum = _Sum
from ndistribute.models.metrics import TopKCategoricalAccuracy as _TopKCategoricalAccuracy
TopKCategoricalAccuracy = _TopKCategoricalAccuracy
from ndistribute.models.metrics import TrueNegatives as _TrueNegatives
TrueNegatives = _TrueNegatives
from ndistribute.models.metrics import TruePositives as _TruePositives
TruePositives = _TruePositives
get: Any
