# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.optimizers.wrappers import LossScale as _LossScaleOptimizer
LossScaleOptimizer = _LossScaleOptimizer
set_global_policy: Any
