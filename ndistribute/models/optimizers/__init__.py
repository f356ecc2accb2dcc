"""Optimizers: gradients in, updated variables out, under any strategy."""

from ndistribute.models.optimizers.adagrad import Adagrad
from ndistribute.models.optimizers.adam import Adam
from ndistribute.models.optimizers.optimizer import Optimizer
from ndistribute.models.optimizers.sgd import SGD

__all__ = ["SGD", "Adagrad", "Adam", "Optimizer"]
