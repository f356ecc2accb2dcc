"""TensorFlow 1's names: many scripts run with ``import ndistribute.compat.tf1 as tf``.

The names make operations of graphs from the first line on, until ``tf.enable_eager_execution()``.
"""

from ndistribute.compat import namespaces as _namespaces
from ndistribute.compat import tf as _tf
from ndistribute.compat.programs import Program as _Program
from ndistribute.compat.tables import TF1 as _TF1

__version__ = _tf.__version__.replace("2.16", "1.15")
__all__: list[str] = []
_namespaces.build("tf1", _Program(has_graphs=True), _TF1, base="tf")
