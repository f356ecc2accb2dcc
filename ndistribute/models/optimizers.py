"""The optimizers, where models expect them."""

from ndistribute.optimizers import SGD, Adagrad, Adam, Optimizer

__all__ = ["SGD", "Adagrad", "Adam", "Optimizer"]
