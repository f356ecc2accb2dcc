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
from ndistribute.models import Model, initializers, layers, losses
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
    if not called.built or any(isinstance(held, Variable) for held in vars(called).values()):
        is_named = called._arguments[1].get("name") is not None
        with variable_scope(None, called.name if is_named else snake_case(type(called).__name__)):
            build_in_graph(called, args, functools.partial(_add_weight, called))
    if any(isinstance(held, Variable) for _, held in called._own()):
        why = "keep each variable in an attribute of its own."
        raise ValueError(f"{called!r} was called on a tensor of a graph: {why}")
    if isinstance(called, Model) or not type(called).__module__.startswith(layers.__name__):
        return NotImplemented
    held = vars(called).items()
    weights = {name: value for name, value in held if isinstance(value, GraphVariable)}
    others = [each.name for each in weights.values() if each.graph is not get_default_graph()]
    does_more = training and isinstance(called, _IN_TRAINING)
    if does_more or others or len([*called.walk()]) > 1:
        why = "use tf.compat.v1.layers in training, or a new layer in each graph"
        raise ValueError(f"{called!r} cannot be called on a tensor of a graph so: {why}.")
    return _operation(called, args, weights, options)


def build_in_graph(layer: Layer, args: Sequence[Any], add_weight: AddWeight) -> None:
    """Let the weights of a layer be what a function with the arguments of `add_weight` returns."""
    for attribute, held in [*vars(layer).items()]:  # It was built for an `input_shape`.
        if isinstance(held, Variable):
            name, start = held.name.rpartition("/")[2], functools.partial(_constant, held.numpy())
            vars(layer)[attribute] = add_weight(name, held.shape, start, trainable=held.trainable)
    if not layer.built:
        vars(layer)["add_weight"], layer._builds = add_weight, True
        try:
            layer.build(tree.map_leaves(lambda value: as_tensor(value).get_shape(), args[0]))
        finally:
            del layer._builds, layer.add_weight
        layer.built = True


def _constant(value: Any, shape: Any, dtype: Any) -> Any:
    return value


@accepting("aggregation", "synchronization")
def _add_weight(
    layer: Layer,
    name: str = "weight",
    shape: Sequence[int] = (),
    initializer: Any = "glorot_uniform",
    *,
    trainable: bool = True,
    dtype: Any = None,
) -> GraphVariable:
    wanted = np.dtype(layer.dtype if dtype is None else dtype)
    make: Any = initializers.get(initializer)
    if isinstance(make, initializers.GlorotUniform):
        make = glorot_uniform  # By the seed of the graph.
    return get_variable(name, shape, wanted, make, trainable and layer.trainable)


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


def _call(made: str, names: list[str], weights: list[Any], args: list[Any], **options: Any) -> Any:
    """Return what a layer with weights, or a loss, computes of arrays."""
    called = copy.copy(_made(made))
    vars(called).update(zip(names, weights, strict=True), built=True)
    return called(*args, **options)


register("models.call", _call)
Symbolic.__call_model__ = lambda self, called, args, options: call_in_graph(called, args, **options)


@functools.lru_cache(1024)
def _made(description: str) -> Any:
    return Architecture("a graph").decode(json.loads(description))
