"""Callbacks: objects whose methods `fit`, `evaluate` and `predict` call."""

from ndistribute.exports import export as _export
from ndistribute.models.callbacks.callback import *
from ndistribute.models.callbacks.control import *
from ndistribute.models.callbacks.saving import *

_export(vars())
