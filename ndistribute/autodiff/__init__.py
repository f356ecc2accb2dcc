"""Gradients of NumPy code: the gradient tape, tracked arrays, and custom gradients."""

from ndistribute.autodiff.custom import custom_gradient, log_softmax, logsumexp, softmax
from ndistribute.autodiff.tape import GradientTape
from ndistribute.autodiff.tracked import Tracked, stop_gradient, untrack

__all__ = [
    "GradientTape",
    "Tracked",
    "custom_gradient",
    "log_softmax",
    "logsumexp",
    "softmax",
    "stop_gradient",
    "untrack",
]
