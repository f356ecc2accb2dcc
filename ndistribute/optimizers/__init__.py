"""Optimizers, which update variables by their gradients, and schedules of the learning rate."""

from ndistribute.optimizers import schedules
from ndistribute.optimizers.algorithms import SGD, Adagrad, Adam, AdamW, RMSprop, get
from ndistribute.optimizers.optimizer import Optimizer
from ndistribute.optimizers.wrappers import GradientAccumulation, LossScale

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
