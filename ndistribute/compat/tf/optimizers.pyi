# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.optimizers.algorithms import Adadelta as _Adadelta
Adadelta = _Adadelta
from ndistribute.optimizers.algorithms import Adagrad as _Adagrad
Adagrad = _Adagrad
from ndistribute.optimizers.algorithms import Adam as _Adam
Adam = _Adam
from ndistribute.optimizers.algorithms import AdamW as _AdamW
AdamW = _AdamW
from ndistribute.optimizers.algorithms import Ftrl as _Ftrl
Ftrl = _Ftrl
from ndistribute.optimizers.wrappers import GradientAccumulation as _GradientAccumulation
GradientAccumulation = _GradientAccumulation
from ndistribute.optimizers.wrappers import LossScale as _LossScale
LossScale = _LossScale
from ndistribute.optimizers.algorithms import Nadam as _Nadam
Nadam = _Nadam
from ndistribute.optimizers.optimizer import Optimizer as _Optimizer
Optimizer = _Optimizer
from ndistribute.optimizers.algorithms import RMSprop as _RMSprop
RMSprop = _RMSprop
from ndistribute.optimizers.algorithms import SGD as _SGD
SGD = _SGD
deserialize: Any
get: Any
legacy: Any
schedules: Any
serialize: Any
