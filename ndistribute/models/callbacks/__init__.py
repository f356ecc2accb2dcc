"""Callbacks: what a model calls while it is fitted."""

from ndistribute.models.callbacks.callback import Callback, History, LambdaCallback
from ndistribute.models.callbacks.control import (
    EarlyStopping,
    LearningRateScheduler,
    ReduceLROnPlateau,
    TerminateOnNaN,
)
from ndistribute.models.callbacks.saving import BackupAndRestore, CSVLogger, ModelCheckpoint
from ndistribute.models.callbacks.tensorboard import TensorBoard

__all__ = [
    "BackupAndRestore",
    "CSVLogger",
    "Callback",
    "EarlyStopping",
    "History",
    "LambdaCallback",
    "LearningRateScheduler",
    "ModelCheckpoint",
    "ReduceLROnPlateau",
    "TensorBoard",
    "TerminateOnNaN",
]
