"""Gradients of NumPy code: the gradient tape, tracked arrays, and custom gradients."""

from ndistribute.autodiff.custom import custom_gradient as custom_gradient
from ndistribute.autodiff.custom import log_softmax as log_softmax
from ndistribute.autodiff.custom import logsumexp as logsumexp
from ndistribute.autodiff.custom import softmax as softmax
from ndistribute.autodiff.tape import GradientTape as GradientTape
from ndistribute.autodiff.tracked import Tracked as Tracked
from ndistribute.autodiff.tracked import stop_gradient as stop_gradient
from ndistribute.autodiff.tracked import untrack as untrack
