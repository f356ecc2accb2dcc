"""The states of PyTorch's modules, optimizers and schedulers, as plain values and arrays.

Workers send each other these states, and elastic workers restore them. Nothing here imports
PyTorch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ndistribute import guest_tensors
from ndistribute.guest_tensors import is_tensor, tensor_of


class HeldStates:
    """The states of this process's modules, optimizers and schedulers, for elastic workers.

    Args:
        parts: for each replica, its modules, optimizers and schedulers; only weak references are
            kept.
    """

    def __init__(self, parts: Sequence[Sequence[Any]]) -> None:
        self._parts = [[weakref.ref(each) for each in part] for part in parts]

    def state_dict(self) -> dict[str, Any]:
        """Return the states of each replica; they differ only in their gradients."""
        return {
            str(k): [None if (thing := each()) is None else plain_state(thing) for each in part]
            for k, part in enumerate(self._parts)
        }

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        """Set the states of the replicas; another worker may have saved fewer."""
        for k, part in enumerate(self._parts):
            for each, state in zip(part, states.get(str(k), states["0"]), strict=True):
                if (thing := each()) is not None and state is not None:
                    load_plain_state(thing, state)


def plain_state(thing: Any) -> Any:
    """Return a copy of a state: a module's with all buffers, an optimizer's with its parameters."""
    state = dict(thing.state_dict())
    if hasattr(thing, "reduction"):
        tensors = [[each, each.grad] for each in thing.reduction.parameters.values()]
        state = {"state": state, "passes": thing.reduction.passes, "tensors": tensors}
    elif hasattr(thing, "buffers"):
        state = {"state": state, "buffers": list(thing.buffers())}
    return mapped(state, _copied)


def load_plain_state(thing: Any, state: Any) -> None:
    """Set the state of a module, optimizer or scheduler to one that `plain_state` returned."""
    state = mapped(state, lambda x: tensor_of(x) if isinstance(x, np.ndarray | np.generic) else x)
    if hasattr(thing, "reduction"):
        parameters = thing.reduction.parameters.values()
        for parameter, (value, gradient) in zip(parameters, state["tensors"], strict=True):
            parameter.detach().copy_(value)
            parameter.grad = gradient
            if gradient is not None:
                gradient.is_reduced = True  # Otherwise some passes are not reduced.
        thing.reduction.passes, state = state["passes"], state["state"]
    elif hasattr(thing, "buffers"):
        for buffer, value in zip(thing.buffers(), state["buffers"], strict=True):
            buffer.copy_(value)  # The state lacks some values.
        state = state["state"]
    thing.load_state_dict(state)


def mapped(nest: Any, change: Callable[[Any], Any]) -> Any:
    """Return a nest with changed leaves, in plain dicts, lists and tuples."""
    if isinstance(nest, dict):  # Dicts may also be of a class that the receiver does not know.
        return {key: mapped(value, change) for key, value in nest.items()}
    if type(nest) in (list, tuple):
        return type(nest)(mapped(value, change) for value in nest)
    return change(nest)


def _copied(leaf: Any) -> Any:
    leaf = leaf.item() if isinstance(leaf, np.generic) else leaf  # Tensors come back as tensors.
    return array_of(leaf).copy() if is_tensor(leaf) else leaf


def array_of(tensor: Any) -> np.ndarray[Any, Any]:
    """Return a tensor as an array in the same memory, which must be host memory."""
    if tensor.device.type != "cpu":
        what = f"got a tensor on {tensor.device}, but tensors must be in host memory"
        raise TypeError(f"{what}: move the module with .cpu(), or use CuPy's arrays for GPUs.")
    return guest_tensors.array_of(tensor)  # type: ignore[no-any-return]
