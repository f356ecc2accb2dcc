"""Metrics: what a model reports of its predictions, exact over all examples of all replicas."""

from ndistribute.exports import export as _export
from ndistribute.models.metrics.counts import AUC as AUC
from ndistribute.models.metrics.counts import FalseNegatives as FalseNegatives
from ndistribute.models.metrics.counts import FalsePositives as FalsePositives
from ndistribute.models.metrics.counts import Precision as Precision
from ndistribute.models.metrics.counts import Recall as Recall
from ndistribute.models.metrics.counts import TrueNegatives as TrueNegatives
from ndistribute.models.metrics.counts import TruePositives as TruePositives
from ndistribute.models.metrics.means import Accuracy as Accuracy
from ndistribute.models.metrics.means import BinaryAccuracy as BinaryAccuracy
from ndistribute.models.metrics.means import BinaryCrossentropy as BinaryCrossentropy
from ndistribute.models.metrics.means import CategoricalAccuracy as CategoricalAccuracy
from ndistribute.models.metrics.means import CategoricalCrossentropy as CategoricalCrossentropy
from ndistribute.models.metrics.means import CosineSimilarity as CosineSimilarity
from ndistribute.models.metrics.means import MeanAbsoluteError as MeanAbsoluteError
from ndistribute.models.metrics.means import (
    MeanAbsolutePercentageError as MeanAbsolutePercentageError,
)
from ndistribute.models.metrics.means import MeanMetric as MeanMetric
from ndistribute.models.metrics.means import MeanSquaredError as MeanSquaredError
from ndistribute.models.metrics.means import RootMeanSquaredError as RootMeanSquaredError
from ndistribute.models.metrics.means import SparseCategoricalAccuracy as SparseCategoricalAccuracy
from ndistribute.models.metrics.means import (
    SparseCategoricalCrossentropy as SparseCategoricalCrossentropy,
)
from ndistribute.models.metrics.means import (
    SparseTopKCategoricalAccuracy as SparseTopKCategoricalAccuracy,
)
from ndistribute.models.metrics.means import TopKCategoricalAccuracy as TopKCategoricalAccuracy
from ndistribute.models.metrics.means import deserialize as deserialize
from ndistribute.models.metrics.means import get as get
from ndistribute.models.metrics.metric import Mean as Mean
from ndistribute.models.metrics.metric import Metric as Metric
from ndistribute.models.metrics.metric import Sum as Sum

_export(vars())
