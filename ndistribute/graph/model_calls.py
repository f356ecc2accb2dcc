"""Layers and losses of models on tensors of graphs.

A call is one operation. It has the arguments that created the layer or loss, and creates it again
where it runs. The weights of a layer are variables of the graph. A model, or a layer that a program
defines, runs its own `call`, which calls its layers on tensors.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from ndistribute import tree
from ndistribute.graph.graph import Symbolic, apply_named, as_tensor, get_default_graph
from ndistribute.graph.scopes import get_variable, glorot_uniform, variable_scope
from ndistribute.graph.variables import GraphVariable
from ndistribute.models import Model, initializers, layers, losses
from ndistribute.models.export import Architecture
from ndistribute.models.layers.layer import Layer
from ndistribute.names import snake_case
from ndistribute.numpy_functions import register
from ndistribute.variables import Variable

_IN_TRAINING = layers.Dropout, layers.GaussianNoise, layers.BatchNormalization
"""What then draws random numbers, or changes variables."""


def call_in_graph(called: Any, args: Sequence[Any], training: bool = False, **options: Any) -> Any:
    """Return the result of a layer or loss for tensors; NotImplemented: it calls other layers.

    Raises:
        ValueError: it does more than compute, it has layers although a program does not define it,
            or it has variables of another graph.
    """
    if isinstance(called, losses.Loss):
        return _loss(called, *args, **options)
    holder, step = _holder(called), args[0]
    if holder is not called:
        step = tree.map_leaves(lambda steps: steps[:, 0], args[0])
    if not holder.built or any(isinstance(held, Variable) for held in vars(holder).values()):
        is_named = called._arguments[1].get("name") is not None
        with variable_scope(None, called.name if is_named else snake_case(type(called).__name__)):
            build_in_graph(holder, [step], _new_variable)
        called.built = True
    if any(isinstance(held, Variable) for _, held in called._own()):
        why = "keep each variable in an attribute of its own."
        raise ValueError(f"{called!r} was called on a tensor of a graph: {why}")
    package = type(called).__module__.partition(".")[0]
    if isinstance(called, Model) or package != __name__.partition(".")[0]:
        return NotImplemented
    held = vars(holder).items()
    weights = {name: value for name, value in held if isinstance(value, GraphVariable)}
    others = [each.name for each in weights.values() if each.graph is not get_default_graph()]
    does_more = training and isinstance(called, _IN_TRAINING)
    if does_more or others or not {*called.walk()} <= {called, holder}:
        why = "use tf.compat.v1.layers in training, or a new layer in each graph"
        raise ValueError(f"{called!r} cannot be called on a tensor of a graph in this way: {why}.")
    return _operation(called, args, weights, options)


def _holder(called: Any) -> Any:
    """Return the layer that has the weights: the cell of a recurrent layer, or the layer itself."""
    is_around = isinstance(called, layers.RNN) and isinstance(called.cell, Layer)
    return called.cell if is_around else called


def build_in_graph(layer: Any, args: Sequence[Any], new_variable: Any) -> None:
    """Build a layer whose weights a function creates.

    The function gets the name; the shape; the initial value, or a function of shape and dtype that
    returns it; whether optimizers change the weight; and the dtype.
    """
    for attribute, held in [*vars(layer).items()]:  # It was built for an `input_shape`.
        if isinstance(held, Variable):
            what = held.numpy(), held.trainable, held.dtype
            new = new_variable(held.name.rpartition("/")[2], held.shape, *what)
            vars(layer)[attribute] = new
            pairs = [(penalty, new if v is held else v) for penalty, v in layer._penalized]
            layer._penalized = pairs
    if not layer.built:
        vars(layer)["_new_variable"], layer._builds = new_variable, True
        try:
            layer.build(tree.map_leaves(lambda value: as_tensor(value).get_shape(), args[0]))
        finally:
            del layer._builds, layer._new_variable
        layer.built = True


def _new_variable(name: str, shape: Any, make: Any, trainable: bool, dtype: Any, *_: Any) -> Any:
    if isinstance(make, initializers.GlorotUniform):
        make = glorot_uniform  # By the seed of the graph.
    return get_variable(name, shape, dtype, make, trainable)


def _loss(loss: losses.Loss, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
    """Return a loss with its reduction; a mean is over the examples of this graph."""
    labels = as_tensor(y_true)
    if hasattr(losses, type(loss).__name__):
        of_each = copy.copy(loss)
        of_each._arguments = (), loss.get_config() | {"reduction": "none"}
        values = _operation(of_each, (labels, y_pred), {}, {"sample_weight": sample_weight})
    else:  # A program defines this loss.
        values = loss.call(labels, y_pred) * (1 if sample_weight is None else sample_weight)
    if loss.reduction == "none":
        return values
    return np.sum(values) if loss.reduction == "sum" else np.mean(values)


def _operation(called: Any, args: Sequence[Any], weights: Any, options: Any) -> Any:
    made = json.dumps(Architecture("a graph").encode(called))
    return apply_named("models.call", (made, [*weights], [*weights.values()], [*args]), options)


def _call(made: str, names: list[Any], weights: list[Any], args: list[Any], **options: Any) -> Any:
    """Return the result of a layer with weights, or of a loss, for arrays."""
    called = copy.copy(_made(made))
    if _holder(called) is not called:
        called.cell, called.built = copy.copy(called.cell), True
    vars(_holder(called)).update(zip(names, weights, strict=True), built=True)
    return called(*args, **options)


register("models.call", _call)
Symbolic.__call_model__ = lambda self, called, args, options: call_in_graph(called, args, **options)


@functools.lru_cache(1024)
def _made(description: str) -> Any:
    return Architecture("a graph").decode(json.loads(description))
