"""Who runs what where."""

from ndistribute.context import register_default_strategy
from ndistribute.strategies.base import Strategy
from ndistribute.strategies.central_storage import CentralStorageStrategy
from ndistribute.strategies.components import ValueContext
from ndistribute.strategies.mirrored import MirroredStrategy
from ndistribute.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from ndistribute.strategies.one_device import DefaultStrategy, OneDeviceStrategy
from ndistribute.strategies.parameter_server import ParameterServerStrategy

register_default_strategy(DefaultStrategy)

__all__ = [
    "CentralStorageStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "Strategy",
    "ValueContext",
]
