"""TensorFlow 2's names: many scripts run unchanged with ``import ndistribute.compat.tf as tf``.

Arrays are NumPy's and CuPy's, and all code runs at once: `function` returns its function unchanged,
unless it is told to compile it. ``tf.compat.v1`` has TensorFlow 1's names. These make operations
inside ``Graph().as_default()``, in a `model_fn`, and after ``disable_eager_execution()``.
"""

from ndistribute.compat import namespaces as _namespaces
from ndistribute.compat.programs import Program as _Program
from ndistribute.compat.tables import TF1 as _TF1
from ndistribute.compat.tables import TF2 as _TF2
from ndistribute.version import __version__ as _version

__version__ = f"2.16.0+ndistribute.{_version}"  # Programs ask which generation it is.
__all__: list[str] = []
_program = _Program(has_graphs=False)
_namespaces.build("tf", _program, _TF2)
_namespaces.build("tf.compat.v1", _program, _TF1, base="tf")
