# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.models.metrics.counts import AUC as _AUC
AUC = _AUC
from ndistribute.models.metrics.means import Accuracy as _Accuracy
Accuracy = _Accuracy
from ndistribute.models.metrics.means import BinaryAccuracy as _BinaryAccuracy
BinaryAccuracy = _BinaryAccuracy
from ndistribute.models.metrics.means import BinaryCrossentropy as _BinaryCrossentropy
BinaryCrossentropy = _BinaryCrossentropy
from ndistribute.models.metrics.means import CategoricalAccuracy as _CategoricalAccuracy
CategoricalAccuracy = _CategoricalAccuracy
from ndistribute.models.metrics.means import CategoricalCrossentropy as _CategoricalCrossentropy
CategoricalCrossentropy = _CategoricalCrossentropy
from ndistribute.models.metrics.means import CosineSimilarity as _CosineSimilarity
CosineSimilarity = _CosineSimilarity
from ndistribute.models.metrics.counts import FalseNegatives as _FalseNegatives
FalseNegatives = _FalseNegatives
from ndistribute.models.metrics.counts import FalsePositives as _FalsePositives
FalsePositives = _FalsePositives
from ndistribute.models.metrics.metric import Mean as _Mean
Mean = _Mean
from ndistribute.models.metrics.means import MeanAbsoluteError as _MeanAbsoluteError
MeanAbsoluteError = _MeanAbsoluteError
from ndistribute.models.metrics.means import MeanAbsolutePercentageError as _MeanAbsolutePercentageError
MeanAbsolutePercentageError = _MeanAbsolutePercentageError
from ndistribute.models.metrics.means import MeanMetric as _MeanMetric
MeanMetric = _MeanMetric
from ndistribute.models.metrics.means import MeanSquaredError as _MeanSquaredError
MeanSquaredError = _MeanSquaredError
from ndistribute.compat.keras_layers import OwnMetric as _Metric
Metric = _Metric
from ndistribute.models.metrics.counts import Precision as _Precision
Precision = _Precision
from ndistribute.models.metrics.counts import Recall as _Recall
Recall = _Recall
from ndistribute.models.metrics.means import RootMeanSquaredError as _RootMeanSquaredError
RootMeanSquaredError = _RootMeanSquaredError
from ndistribute.models.metrics.means import SparseCategoricalAccuracy as _SparseCategoricalAccuracy
SparseCategoricalAccuracy = _SparseCategoricalAccuracy
from ndistribute.models.metrics.means import SparseCategoricalCrossentropy as _SparseCategoricalCrossentropy
SparseCategoricalCrossentropy = _SparseCategoricalCrossentropy
from ndistribute.models.metrics.means import SparseTopKCategoricalAccuracy as _SparseTopKCategoricalAccuracy
SparseTopKCategoricalAccuracy = _SparseTopKCategoricalAccuracy
from ndistribute.models.metrics.metric import Sum as _Sum
Sum = _Sum
from ndistribute.models.metrics.means import TopKCategoricalAccuracy as _TopKCategoricalAccuracy
TopKCategoricalAccuracy = _TopKCategoricalAccuracy
from ndistribute.models.metrics.counts import TrueNegatives as _TrueNegatives
TrueNegatives = _TrueNegatives
from ndistribute.models.metrics.counts import TruePositives as _TruePositives
TruePositives = _TruePositives
accuracy: Any
auc: Any
deserialize: Any
false_negatives: Any
false_negatives_at_thresholds: Any
false_positives: Any
false_positives_at_thresholds: Any
get: Any
mean: Any
mean_absolute_error: Any
mean_iou: Any
mean_per_class_accuracy: Any
mean_squared_error: Any
mean_tensor: Any
precision: Any
precision_at_thresholds: Any
recall: Any
recall_at_thresholds: Any
root_mean_squared_error: Any
sensitivity_at_specificity: Any
serialize: Any
specificity_at_sensitivity: Any
true_negatives: Any
true_negatives_at_thresholds: Any
true_positives: Any
true_positives_at_thresholds: Any
