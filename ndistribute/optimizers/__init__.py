"""Optimizers, which update variables by their gradients, and schedules of the learning rate."""

from ndistribute.exports import export as _export
from ndistribute.names import serialize as serialize
from ndistribute.optimizers import schedules as schedules
from ndistribute.optimizers.algorithms import SGD as SGD
from ndistribute.optimizers.algorithms import Adadelta as Adadelta
from ndistribute.optimizers.algorithms import Adagrad as Adagrad
from ndistribute.optimizers.algorithms import Adam as Adam
from ndistribute.optimizers.algorithms import AdamW as AdamW
from ndistribute.optimizers.algorithms import Ftrl as Ftrl
from ndistribute.optimizers.algorithms import Nadam as Nadam
from ndistribute.optimizers.algorithms import RMSprop as RMSprop
from ndistribute.optimizers.algorithms import deserialize as deserialize
from ndistribute.optimizers.algorithms import get as get
from ndistribute.optimizers.optimizer import Optimizer as Optimizer
from ndistribute.optimizers.wrappers import GradientAccumulation as GradientAccumulation
from ndistribute.optimizers.wrappers import LossScale as LossScale

_export(vars(), "schedules")
