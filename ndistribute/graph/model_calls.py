"""Layers and losses of models on tensors of graphs.

A call is one operation, which has the arguments that made the layer or loss, and makes it again
where it runs. The weights of a layer are variables of the graph. A model, or a layer that a program
defines, computes as ever, and so calls its layers on tensors.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ndistribute import tree
from ndistribute.graph.graph import Symbolic, apply_named, as_tensor, get_default_graph
from ndistribute.graph.scopes import get_variable, glorot_uniform, variable_scope
from ndistribute.graph.variables import GraphVariable
from ndistribute.mistakes import accepting
from ndistribute.models import Model, initializers, layers, losses, regularizers
from ndistribute.models.export import Architecture
from ndistribute.models.layers.layer import Layer
from ndistribute.names import snake_case
from ndistribute.numpy_functions import register
from ndistribute.variables import Variable

_IN_TRAINING = layers.Dropout, layers.GaussianNoise, layers.BatchNormalization
"""What then draws random numbers, or changes variables."""

AddWeight = Callable[..., GraphVariable]


def call_in_graph(called: Any, args: Sequence[Any], training: bool = False, **options: Any) -> Any:
    """Return what a layer or a loss computes of tensors; NotImplemented: it calls others on them.

    Raises:
        ValueError: it does more than compute, has layers although it is none of a program, or has
            variables of another graph.
    """
    if isinstance(called, losses.Loss):
        return _loss(called, *args, **options)
    if not called.built or any(isinstance(held, Variable) for _, held in _held(called)):
        is_named = called._arguments[1].get("name") is not None
        with variable_scope(None, called.name if is_named else snake_case(type(called).__name__)):
            build_in_graph(called, args, _add_weight)
    if any(isinstance(held, Variable) for _, held in called._own()):
        why = "keep each variable in an attribute of its own."
        raise ValueError(f"{called!r} was called on a tensor of a graph: {why}")
    owner = next(base for base in type(called).__mro__ if "call" in vars(base))
    if isinstance(called, Model) or not owner.__module__.startswith(layers.__name__):
        return NotImplemented
    weights = {path: value for path, value in _held(called) if isinstance(value, GraphVariable)}
    others = [each.name for each in weights.values() if each.graph is not get_default_graph()]
    does_more = training and isinstance(called, _IN_TRAINING)
    has_layers = len([*called.walk()]) > len(_parts(called))
    if does_more or others or has_layers:
        why = "use tf.compat.v1.layers in training, or a new layer in each graph"
        raise ValueError(f"{called!r} cannot be called on a tensor of a graph so: {why}.")
    return _operation(called, args, weights, options)


def _parts(layer: Layer) -> list[Layer]:
    """Return a layer, and the cell that it repeats."""
    return [layer, *(part for part in [getattr(layer, "cell", None)] if isinstance(part, Layer))]


def _held(layer: Layer) -> list[tuple[tuple[int, str], Any]]:
    """Return what a layer and its cell hold, by the number of the part and the attribute."""
    parts = enumerate(map(vars, _parts(layer)))
    return [((number, name), value) for number, held in parts for name, value in held.items()]


def build_in_graph(layer: Layer, args: Sequence[Any], add_weight: AddWeight) -> None:
    """Let the weights of a layer be what a function with the arguments of `add_weight` returns."""
    parts = _parts(layer)
    for part in parts:
        for attribute, held in [*vars(part).items()]:  # It was built for an `input_shape`.
            if isinstance(held, Variable):
                name = held.name.rpartition("/")[2]
                start = functools.partial(_constant, held.numpy())
                trains = held.trainable
                vars(part)[attribute] = add_weight(part, name, held.shape, start, trainable=trains)
    if not layer.built:
        for part in parts:
            vars(part)["add_weight"] = functools.partial(add_weight, part)
            part._builds = True
        try:
            layer.build(tree.map_leaves(lambda value: as_tensor(value).get_shape(), args[0]))
        finally:
            for part in parts:
                del part._builds, part.add_weight
                part.built = True


def _constant(value: Any, shape: Any, dtype: Any) -> Any:
    return value


@accepting("aggregation", "synchronization")
def _add_weight(
    layer: Layer,
    name: str = "weight",
    shape: Sequence[int] = (),
    initializer: Any = None,
    *,
    trainable: bool = True,
    dtype: Any = None,
    regularizer: Any = None,
) -> GraphVariable:
    wanted = np.dtype(layer.dtype if dtype is None else dtype)
    make: Any = initializers.get(initializer or layer._starts.get(name, "glorot_uniform"))
    penalty = regularizers.get(regularizer) or layer._regularizers.get(name)
    if isinstance(make, initializers.GlorotUniform):
        make = glorot_uniform  # By the seed of the graph.
    variable = get_variable(name, shape, wanted, make, trainable and layer.trainable)
    if penalty is not None:
        layer._penalized.append(functools.partial(penalty, variable))
    return variable


def _loss(loss: losses.Loss, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
    """Return a loss, reduced as it says; the mean is that over the examples of this graph."""
    labels = as_tensor(y_true)
    if hasattr(losses, type(loss).__name__):
        of_each = copy.copy(loss)
        of_each._arguments = (), loss.get_config() | {"reduction": "none"}
        values = _operation(of_each, (labels, y_pred), {}, {"sample_weight": sample_weight})
    else:  # It is one of a program.
        values = loss.call(labels, y_pred) * (1 if sample_weight is None else sample_weight)
    if loss.reduction == "none":
        return values
    return np.sum(values) if loss.reduction == "sum" else np.mean(values)


def _operation(called: Any, args: Sequence[Any], weights: Any, options: Any) -> Any:
    made = json.dumps(Architecture("a graph").encode(called))
    return apply_named("models.call", (made, [*weights], [*weights.values()], [*args]), options)


def _call(made: str, names: list[Any], weights: list[Any], args: list[Any], **options: Any) -> Any:
    """Return what a layer with weights, or a loss, computes of arrays."""
    called = copy.copy(_made(made))
    if len(_parts(called)) > 1:
        called.cell = copy.copy(called.cell)
    parts = _parts(called)
    for (number, name), weight in zip(names, weights, strict=True):
        vars(parts[number])[name] = weight
    for part in parts:
        part.built = True
    return called(*args, **options)


register("models.call", _call)
Symbolic.__call_model__ = lambda self, called, args, options: call_in_graph(called, args, **options)


@functools.lru_cache(1024)
def _made(description: str) -> Any:
    return Architecture("a graph").decode(json.loads(description))
