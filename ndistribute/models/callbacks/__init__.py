"""Callbacks: what a model calls while it is fitted."""

from ndistribute.exports import export as _export
from ndistribute.models.callbacks.callback import *
from ndistribute.models.callbacks.control import *
from ndistribute.models.callbacks.saving import *

_export(vars())
