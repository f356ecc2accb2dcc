"""The state of objects in a checkpoint: its parts by path, as named tensors and plain values.

Nothing here reads files, or changes an object, except for the generators of replicas.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ndistribute.collective.objects import all_gather_object
from ndistribute.data.sources import has_state
from ndistribute.dtypes import dtype_named
from ndistribute.guest_tensors import array_of, is_tensor, tensor_of
from ndistribute.models.layers.layer import Layer
from ndistribute.models.metrics import Metric
from ndistribute.optimizers import Optimizer
from ndistribute.plain import Encoder
from ndistribute.tree import leaves
from ndistribute.values import DistributedValues
from ndistribute.variables import Variable
from ndistribute.variables.policy import fitted


def flat(prefix: str, nest: Any, saves: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield the variables, optimizers and objects with a state of a nest, by path.

    Args:
        prefix: the path of the nest.
        nest: the objects.
        saves: the attributes of models that count as their parts, besides variables.
    """
    for path, item in leaves(prefix, nest):
        if isinstance(item, Layer | Metric):
            for name, variable in item.named_variables().items():
                yield f"{path}/{name}", variable
            parts = {f"{path}/{name}": getattr(item, name, None) for name in saves}
            for part, held in parts.items():
                if held:
                    yield from flat(part, held, saves)
        elif isinstance(item, DistributedValues):  # For example a result of `replicate`.
            for same in zip(*(flat(path, value, saves) for value in item.values), strict=True):
                objects = [part for _, part in same]
                yield same[0][0], OfReplicas(objects) if all(map(has_state, objects)) else item
        elif hasattr(item, "set_state") and hasattr(item, "get_state") and not has_state(item):
            yield path, GeneratorState(item)
        else:
            yield path, item


class OfReplicas:
    """The state of objects that are the same on each replica: that of the first, set on all.

    Args:
        objects: those of the replicas, with `state_dict` and `load_state_dict`.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        self.objects = objects

    def state_dict(self) -> Any:
        return self.objects[0].state_dict()

    def load_state_dict(self, state: Any) -> None:
        for each in self.objects:  # An optimizer keeps the very tensors that it gets.
            each.load_state_dict(copy.deepcopy(state))


class GeneratorState:
    """The state of a generator with `get_state` and `set_state`, as those of PyTorch have.

    Args:
        generator: such a generator.
    """

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._generator.set_state(state["state"])


def below(paths: Iterable[str], but: Iterable[str], names: Iterable[str]) -> set[str]:
    """Return the names below some paths, but not below others."""
    inside, outside = (tuple(f"{path}/" for path in each) for each in (paths, but))
    under = {name for name in names if f"{name}/".startswith(inside)}
    return {name for name in under if not f"{name}/".startswith(outside)}


class States(Encoder):
    """Encode states for JSON, with references to arrays, which are copied to a file's tensors."""

    kinds = frozenset({"float", "tuple", "dict"})
    others = ("$tensor", "$empty", "$torch")
    refusal = (
        ValueError,
        "{path} is {value!r}, but a state contains only text, numbers, arrays, None, and nests.",
    )

    def __init__(self, tensors: Any) -> None:
        self._tensors = tensors

    def name(self, path: Any) -> str:
        return path if isinstance(path, str) else f"{self.name(path[0])}/{path[1]}"

    def encode_other(self, value: Any, path: Any) -> Any:
        if is_tensor(value):
            return {"$torch": self.encode_other(array_of(value), path)}
        if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
            return super().encode_other(value, path)
        if not value.size:
            return {"$empty": [value.shape, value.dtype.name]}
        name = self.name(path)
        if name in self._tensors:  # A key may contain a slash.
            name = f"{name}#{len(self._tensors)}"
        self._tensors[name] = value.copy()
        return {"$tensor": name}

    def decode_other(self, tag: str, node: dict[str, Any]) -> Any:
        if tag == "$tensor":
            return self._tensors[node[tag]]
        if tag == "$torch":
            return tensor_of(np.array(self.decode(node[tag])))
        shape, dtype = node[tag]
        return np.zeros(shape, dtype_named(dtype))


def slots_of(parts: Sequence[tuple[str, Any]]) -> dict[str, dict[str, dict[str, Variable]]]:
    """Return for the path of each optimizer, and that of each variable it trains, the slots.

    Raises:
        ValueError: an optimizer trains a variable that is not among the parts.
    """
    names: dict[int, str] = {}
    for path, part in parts:
        if isinstance(part, Variable):
            names.setdefault(id(part), path)
    by_path = {}
    for path, part in parts:
        if isinstance(part, Optimizer):
            others = [variable.name for variable in part.slots if id(variable) not in names]
            if others:
                raise ValueError(
                    f"optimizer {path!r} trains variable {others[0]!r}, which the checkpoint does "
                    "not contain: pass the model or the variable too."
                )
            by_path[path] = {names[id(variable)]: slots for variable, slots in part.slots.items()}
    return by_path


def variables_of(parts: Sequence[tuple[str, Any]]) -> dict[str, Variable]:
    """Return all variables by path, with those of optimizers: slots and the number of steps."""
    variables: dict[str, Variable] = {}
    for path, part in parts:
        if isinstance(part, Variable) and variables.setdefault(path, part) is not part:
            raise ValueError(f"two variables have the path {path!r}: use other keywords or keys.")
    slots = slots_of(parts)
    for path, part in parts:
        if slots.get(path):
            variables[f"{path}/iterations"] = part.variables[0]
            for name, kinds in slots[path].items():
                variables |= {f"{path}/{name}/{kind}": slot for kind, slot in kinds.items()}
    return variables


def fitting(
    variables: Mapping[str, Variable], tensors: Mapping[str, Any], wrong: list[str]
) -> list[tuple[Variable, Any]]:
    """Return each variable and its value in its dtype; add those that do not fit to `wrong`."""
    values = []
    for name, variable in variables.items():
        tensor = tensors.get(name)
        if tensor is None:
            wrong.append(f"{name} is missing")
        elif tensor.shape != variable.shape:
            wrong.append(f"{name} has shape {tensor.shape}, but the variable has {variable.shape}")
        elif (value := fitted(tensor, variable.dtype)) is None:
            wrong.append(f"{name} has {tensor.dtype} values that {variable.dtype} cannot hold")
        else:
            values.append((variable, value))
    return values


def generators_of(strategy: Any) -> list[str]:
    """Return the states of the generators of all replicas as JSON; empty for GPUs."""
    generators = [replica.generator() for replica in strategy.replica_contexts]
    states = [
        json.dumps(each.bit_generator.state) if isinstance(each, np.random.Generator) else ""
        for each in generators
    ]
    group = strategy.input_topology.workers
    return states if group is None else list(itertools.chain(*all_gather_object(group, states)))


def set_generators(strategy: Any, states: Sequence[str]) -> None:
    """Set the generators of the replicas for which there are states."""
    for replica in strategy.replica_contexts:
        generator, number = replica.generator(), replica.replica_id_in_sync_group
        if isinstance(generator, np.random.Generator) and number < len(states) and states[number]:
            generator.bit_generator.state = json.loads(states[number])
