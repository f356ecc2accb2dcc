# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.optimizers.schedules import CosineDecay as _CosineDecay
CosineDecay = _CosineDecay
from ndistribute.optimizers.schedules import ExponentialDecay as _ExponentialDecay
ExponentialDecay = _ExponentialDecay
from ndistribute.optimizers.schedules import InverseTimeDecay as _InverseTimeDecay
InverseTimeDecay = _InverseTimeDecay
from ndistribute.optimizers.schedules import LearningRateSchedule as _LearningRateSchedule
LearningRateSchedule = _LearningRateSchedule
from ndistribute.optimizers.schedules import PiecewiseConstantDecay as _PiecewiseConstantDecay
PiecewiseConstantDecay = _PiecewiseConstantDecay
from ndistribute.optimizers.schedules import PolynomialDecay as _PolynomialDecay
PolynomialDecay = _PolynomialDecay
from ndistribute.optimizers.schedules import ScaledByWorkers as _ScaledByWorkers
ScaledByWorkers = _ScaledByWorkers
from ndistribute.optimizers.schedules import WarmUp as _WarmUp
WarmUp = _WarmUp
deserialize: Any
serialize: Any
