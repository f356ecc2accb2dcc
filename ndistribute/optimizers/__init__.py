"""Optimizers, which update variables by their gradients, and schedules of the learning rate."""

from ndistribute.exports import export as _export
from ndistribute.names import serialize as serialize
from ndistribute.optimizers import schedules as schedules
from ndistribute.optimizers.algorithms import *
from ndistribute.optimizers.optimizer import Optimizer as Optimizer
from ndistribute.optimizers.wrappers import GradientAccumulation as GradientAccumulation
from ndistribute.optimizers.wrappers import LossScale as LossScale

_export(vars(), "schedules")
