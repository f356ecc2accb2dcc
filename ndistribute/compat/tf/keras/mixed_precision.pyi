# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.compat.keras_precision import LossScaleOptimizer as _LossScaleOptimizer
LossScaleOptimizer = _LossScaleOptimizer
from ndistribute.compat.keras_precision import Policy as _Policy
Policy = _Policy
global_policy: Any
set_global_policy: Any
