"""Optimizers: gradients in, updated variables out, under any strategy."""

from ndistribute.optimizers.adagrad import Adagrad
from ndistribute.optimizers.adam import Adam
from ndistribute.optimizers.optimizer import Optimizer
from ndistribute.optimizers.sgd import SGD

__all__ = ["SGD", "Adagrad", "Adam", "Optimizer"]
