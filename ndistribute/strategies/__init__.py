"""Strategies: which replicas run a step, and where variables are stored."""

from ndistribute.context import register_default_strategy
from ndistribute.strategies.base import Strategy
from ndistribute.strategies.local import (
    CentralStorageStrategy,
    DefaultStrategy,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
)
from ndistribute.strategies.parameter_server import ParameterServerStrategy

register_default_strategy(DefaultStrategy())

__all__ = [
    "CentralStorageStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "Strategy",
]
