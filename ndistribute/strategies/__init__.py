"""Strategies: which replicas run a step, and where variables are stored."""

from ndistribute.context import register_default_strategy
from ndistribute.strategies.base import RunOptions as RunOptions
from ndistribute.strategies.base import Strategy as Strategy
from ndistribute.strategies.local import CentralStorageStrategy as CentralStorageStrategy
from ndistribute.strategies.local import DefaultStrategy
from ndistribute.strategies.local import MirroredStrategy as MirroredStrategy
from ndistribute.strategies.local import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
from ndistribute.strategies.local import OneDeviceStrategy as OneDeviceStrategy
from ndistribute.strategies.parameter_server import (
    ParameterServerStrategy as ParameterServerStrategy,
)
from ndistribute.strategies.tpu import TPUStrategy as TPUStrategy
from ndistribute.strategies.tpu import initialize_tpu_system as initialize_tpu_system

register_default_strategy(DefaultStrategy())
