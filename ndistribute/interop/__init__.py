"""Models and functions of other libraries (guests), under the strategies of this package.

Each file imports one library; `import ndistribute` loads none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ndistribute.devices import copy_to, device_of, is_device_array


def like(leaves: Sequence[Any]) -> Callable[[Any], Any]:
    """Return a function that converts another library's arrays to the kind of the arguments.

    The kinds are: arrays in host memory, on a GPU, or of a compiled step.
    """
    first = next((leaf for leaf in leaves if is_device_array(leaf)), None)
    if first is None:
        return np.asarray
    if hasattr(first, "on_device"):
        return type(first)
    return lambda value: copy_to(np.asarray(value), device_of(first))
