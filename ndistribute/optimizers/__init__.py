"""Optimizers, which update variables by their gradients."""

from ndistribute.optimizers.algorithms import SGD, Adagrad, Adam, get
from ndistribute.optimizers.optimizer import Optimizer

__all__ = ["SGD", "Adagrad", "Adam", "Optimizer", "get"]
