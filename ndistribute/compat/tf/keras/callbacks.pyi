# Written by tests/compat/name_stubs.py from the tables of names.
from typing import Any

from ndistribute.models.callbacks.saving import BackupAndRestore as _BackupAndRestore
BackupAndRestore = _BackupAndRestore
from ndistribute.models.callbacks.saving import CSVLogger as _CSVLogger
CSVLogger = _CSVLogger
from ndistribute.models.callbacks.callback import Callback as _Callback
Callback = _Callback
from ndistribute.models.callbacks.control import EarlyStopping as _EarlyStopping
EarlyStopping = _EarlyStopping
from ndistribute.models.callbacks.callback import History as _History
History = _History
from ndistribute.models.callbacks.callback import LambdaCallback as _LambdaCallback
LambdaCallback = _LambdaCallback
from ndistribute.models.callbacks.control import LearningRateScheduler as _LearningRateScheduler
LearningRateScheduler = _LearningRateScheduler
from ndistribute.models.callbacks.saving import ModelCheckpoint as _ModelCheckpoint
ModelCheckpoint = _ModelCheckpoint
from ndistribute.models.callbacks.saving import PreemptionCheckpointHandler as _PreemptionCheckpointHandler
PreemptionCheckpointHandler = _PreemptionCheckpointHandler
from ndistribute.models.callbacks.callback import ProgbarLogger as _ProgbarLogger
ProgbarLogger = _ProgbarLogger
from ndistribute.models.callbacks.control import ReduceLROnPlateau as _ReduceLROnPlateau
ReduceLROnPlateau = _ReduceLROnPlateau
from ndistribute.models.callbacks.saving import TensorBoard as _TensorBoard
TensorBoard = _TensorBoard
from ndistribute.models.callbacks.control import TerminateOnNaN as _TerminateOnNaN
TerminateOnNaN = _TerminateOnNaN
from ndistribute.models.callbacks.saving import TerminationConfig as _TerminationConfig
TerminationConfig = _TerminationConfig
