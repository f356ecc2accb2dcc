"""Guests: models and functions of other libraries, under the strategies of this package.

Each file imports one library; `import ndistribute` loads none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ndistribute.devices import copy_to, device_of, is_device_array


def like(leaves: Sequence[Any]) -> Callable[[Any], Any]:
    """Return what makes an array of another library one of the kind that is among the arguments.

    That is an array in host memory, on a GPU, or of a compiled step.
    """
    first = next((leaf for leaf in leaves if is_device_array(leaf)), None)
    if first is None:
        return np.asarray
    if hasattr(first, "on_device"):
        return type(first)
    return lambda value: copy_to(np.asarray(value), device_of(first))
