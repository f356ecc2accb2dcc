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
accuracy: Any
auc: Any
average_precision_at_k: Any
false_negatives: Any
false_negatives_at_thresholds: Any
false_positives: Any
false_positives_at_thresholds: Any
get: Any
mean: Any
mean_absolute_error: Any
mean_cosine_distance: Any
mean_iou: Any
mean_per_class_accuracy: Any
mean_relative_error: Any
mean_squared_error: Any
mean_tensor: Any
percentage_below: Any
precision: Any
precision_at_k: Any
precision_at_thresholds: Any
precision_at_top_k: Any
recall: Any
recall_at_k: Any
recall_at_thresholds: Any
recall_at_top_k: Any
root_mean_squared_error: Any
sensitivity_at_specificity: Any
sparse_average_precision_at_k: Any
sparse_precision_at_k: Any
specificity_at_sensitivity: Any
true_negatives: Any
true_negatives_at_thresholds: Any
true_positives: Any
true_positives_at_thresholds: Any
