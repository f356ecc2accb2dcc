"""Layers: functions of arrays with their own variables."""

from ndistribute.exports import export as _export
from ndistribute.models.layers.attention import *
from ndistribute.models.layers.convolution import *
from ndistribute.models.layers.core import *
from ndistribute.models.layers.inputs import *
from ndistribute.models.layers.layer import Layer as Layer
from ndistribute.models.layers.layer import set_dtype_policy as set_dtype_policy
from ndistribute.models.layers.merging import *
from ndistribute.models.layers.normalization import *
from ndistribute.models.layers.preprocessing import *
from ndistribute.models.layers.recurrent import *
from ndistribute.models.layers.resizing import *

_export(vars())
