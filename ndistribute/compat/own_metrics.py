"""`OwnMetric`, which is `tf.keras.metrics.Metric`: the base class of metrics that programs define.

Its variables are those of TensorFlow, and `result` returns tensors. All other metrics count as its
instances, too.
"""

from __future__ import annotations

from typing import Any

from ndistribute import models
from ndistribute.compat.programs import StandIn
from ndistribute.compat.signatures import adapted
from ndistribute.compat.tensors import flavored


class OwnMetric(models.metrics.Metric, metaclass=StandIn):
    """A metric with the variables of TensorFlow."""

    native = models.metrics.Metric

    def __init_subclass__(cls, **options: Any) -> None:
        if "result" in vars(cls):
            cls.result = adapted(cls.result)  # type: ignore[method-assign]
        super().__init_subclass__(**options)

    def add_weight(self, *args: Any, **options: Any) -> Any:
        variable: Any = super().add_weight(*args, **options)
        variable.__class__ = flavored(type(variable))  # type: ignore[arg-type]
        return variable
