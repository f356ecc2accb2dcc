"""The optimizers, where models expect them."""

from ndistribute.optimizers import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    GradientAccumulation,
    LossScale,
    Optimizer,
    RMSprop,
    get,
    schedules,
)

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "GradientAccumulation",
    "LossScale",
    "Optimizer",
    "RMSprop",
    "get",
    "schedules",
]
