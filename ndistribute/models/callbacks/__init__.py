"""Callbacks: what a model calls while it is fitted."""

from ndistribute.exports import export as _export
from ndistribute.models.callbacks.callback import Callback as Callback
from ndistribute.models.callbacks.callback import History as History
from ndistribute.models.callbacks.callback import LambdaCallback as LambdaCallback
from ndistribute.models.callbacks.callback import ProgbarLogger as ProgbarLogger
from ndistribute.models.callbacks.control import EarlyStopping as EarlyStopping
from ndistribute.models.callbacks.control import LearningRateScheduler as LearningRateScheduler
from ndistribute.models.callbacks.control import ReduceLROnPlateau as ReduceLROnPlateau
from ndistribute.models.callbacks.control import TerminateOnNaN as TerminateOnNaN
from ndistribute.models.callbacks.saving import BackupAndRestore as BackupAndRestore
from ndistribute.models.callbacks.saving import CSVLogger as CSVLogger
from ndistribute.models.callbacks.saving import ModelCheckpoint as ModelCheckpoint
from ndistribute.models.callbacks.saving import (
    PreemptionCheckpointHandler as PreemptionCheckpointHandler,
)
from ndistribute.models.callbacks.saving import TensorBoard as TensorBoard
from ndistribute.models.callbacks.saving import TerminationConfig as TerminationConfig

_export(vars())
