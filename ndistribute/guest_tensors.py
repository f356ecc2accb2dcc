"""Tensors of PyTorch as arrays, and arrays as tensors, without a copy on the CPU.

A program that has a tensor has imported PyTorch, so nothing here imports it.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from ndistribute.devices import Array
from ndistribute.dtypes import dtype_named


def torch_loaded() -> Any:
    """Return the module ``torch`` if the program has imported it, else None."""
    return sys.modules.get("torch")


def steps_take_tensors() -> bool:
    """Return True if the program has imported the module that lets replicas use tensors."""
    return "ndistribute.interop.torch" in sys.modules


def is_tensor(value: Any) -> bool:
    """Return True for a tensor of PyTorch."""
    kind = getattr(torch_loaded(), "Tensor", None)
    return kind is not None and isinstance(value, kind)


def array_of(tensor: Any) -> Array:
    """Return the values of a tensor as a NumPy array."""
    host = tensor.detach().cpu().resolve_conj().resolve_neg()
    if host.dtype is not torch_loaded().bfloat16:
        return host.numpy()
    return host.view(torch_loaded().int16).numpy().view(dtype_named("bfloat16"))


def tensor_of(array: Array) -> Any:
    """Return an array as a tensor, in the same memory if the array is writable.

    Raises:
        ValueError: the program has not imported PyTorch.
    """
    torch = torch_loaded()
    if torch is None:
        raise ValueError("the state contains a tensor of PyTorch: import torch before you load it.")
    array = np.require(array, requirements="W")
    if array.dtype.name != "bfloat16":
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
