"""Optimizers, which update variables by their gradients under any strategy."""

from ndistribute.optimizers.algorithms import SGD, Adagrad, Adam
from ndistribute.optimizers.optimizer import Optimizer

__all__ = ["SGD", "Adagrad", "Adam", "Optimizer"]
