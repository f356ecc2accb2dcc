"""Metrics, which score a model's predictions exactly over all examples of all replicas."""

from ndistribute.exports import export as _export
from ndistribute.models.metrics.counts import *
from ndistribute.models.metrics.means import *
from ndistribute.models.metrics.metric import *

_export(vars())
