"""Fused operations of layers and losses: one entry of the tape each, with buffers reused.

They accept plain and tracked arrays and variables. Host arrays of 16-bit floats are computed in
float32, because NumPy has no fast products for them.
"""

from ndistribute.models.operations.images import *
from ndistribute.models.operations.rows import *
from ndistribute.models.operations.sequences import *
