"""The layers and metrics of `tf.keras`: those of `ndistribute.models`, returning tensors.

A kind of layer is adapted when its name is first used. Native layers stay as they are.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy as np

from ndistribute.autodiff import Tracked
from ndistribute.compat.keras_precision import policy_of
from ndistribute.compat.programs import StandIn
from ndistribute.compat.signatures import adapted, tensor_if_array
from ndistribute.compat.tensors import TrackedTensor, flavored, weight
from ndistribute.models import initializers, layers, metrics
from ndistribute.models.masks import attach_mask, mask_of
from ndistribute.tree import map_leaves
from ndistribute.variables import Variable


def _tensor_with_mask(array: Any) -> Any:
    tensor = tensor_if_array(array)
    if tensor is not array:
        attach_mask(tensor, mask_of(array))
    return tensor


@functools.cache
def _is_of_users(kind: type) -> bool:
    """Return whether the user's program defines the `call` of a kind of layer."""
    owner = next(base for base in kind.__mro__ if "call" in vars(base))
    return owner.__module__.partition(".")[0] != __name__.partition(".")[0]


def _with_methods(array: Any) -> Any:
    """Return a NumPy array as a tensor, and a tracked array with a tensor's methods."""
    if type(array) is Tracked:
        array.__class__ = TrackedTensor
    return _tensor_with_mask(array) if type(array) is np.ndarray else array


class WithTensors:
    """The additions to layers of this package: weights with methods, and tensors as outputs."""

    dtype: Any
    compute_dtype: Any
    dtype_policy = property(lambda self: policy_of(self.dtype.name, self.compute_dtype.name))

    def __call__(self, *args: Any, **options: Any) -> Any:
        kind: Any = type(self)
        if _is_of_users(kind):  # Our layers use no methods of tensors.
            args = map_leaves(_with_methods, args)
        return super().__call__(*args, **options)  # type: ignore[misc]

    def add_weight(self, *args: Any, **options: Any) -> Any:
        """Return a new variable; Keras 2 passes the name first, and Keras 3 the shape."""
        if args and not isinstance(args[0], str | None):
            args, options = args[1:], {"shape": args[0]} | options
            options |= dict(zip(("initializer", "dtype", "trainable"), args, strict=False))
            args = ()
        if len(args) < 2 and options.get("shape") is None:
            options["shape"] = ()
        variable: Any = super().add_weight(*args, **options)  # type: ignore[misc]
        if isinstance(variable, Variable):  # Otherwise it is a tensor of a graph.
            variable.__class__ = weight(type(variable))
        return variable

    def _returned(self, outputs: Any, like: Any) -> Any:
        return map_leaves(_tensor_with_mask, outputs)


Layer: Any = StandIn("Layer", (WithTensors, layers.Layer), {"native": layers.Layer})
_RENAMED = {("LeakyReLU", "alpha"): "negative_slope"}
"""The names of arguments of Keras 2 in this package, by the class."""
_ONLY: dict[str, Any] = {
    "data_format": (None, "channels_last"),
    "dilation_rate": (1, (1, 1), [1, 1]),
    "groups": (1,),
    "time_major": (False,),
}
"""The values of arguments of Keras that mean what layers without such an argument do."""
_MODES = {"binary": "multi_hot", "tf-idf": "tf_idf"}
"""Modes as they were called first."""


def _arguments(kind: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of this package for those of Keras."""
    known = {name for base in kind.__mro__ for name in _parameters(base)}
    options = dict[str, Any]()
    for name, value in keywords.items():
        if name in ("batch_input_shape", "batch_shape") and name not in known:
            options["input_shape"] = value[1:]
        elif name in known or value not in _ONLY.get(name, ()):
            options[_RENAMED.get((kind.__name__, name), name)] = value
    if kind.__name__ == "Embedding":
        length, weights = options.pop("input_length", None), options.pop("weights", None)
        if length is not None:
            options.setdefault("input_shape", (length,))
        if weights is not None:
            table: Any = np.asarray(weights[0])
            options["embeddings_initializer"] = initializers.Constant(table)
    if isinstance(options.get("output_mode"), str):
        options["output_mode"] = _MODES.get(options["output_mode"], options["output_mode"])
    if kind.__name__ == "Lambda":
        options.pop("output_shape", None)  # A call determines it.
    return options


def _parameters(kind: type) -> Any:
    return inspect.signature(vars(kind)["__init__"]).parameters if "__init__" in vars(kind) else ()


@functools.cache
def layer(kind: Any) -> Any:
    """Return a kind of layer with the additions of `WithTensors`; other classes unchanged."""
    if kind is layers.Layer:
        return Layer
    if not (isinstance(kind, type) and issubclass(kind, layers.Layer)):
        return kind

    construct: Any = kind.__init__

    @functools.wraps(construct)
    def init(self: Any, *args: Any, **options: Any) -> None:
        options = _arguments(kind, options)
        if type(self) is made:
            self._arguments = args, options  # For `get_config`.
        construct(self, *args, **options)

    made: Any = type(
        kind.__name__, (WithTensors, kind), {"__doc__": kind.__doc__, "__init__": init}
    )
    layers.Layer.known[kind.__name__] = kind  # Other programs load the native classes.
    return made


class OwnMetric(metrics.Metric, metaclass=StandIn):
    """`tf.keras.metrics.Metric`, the base class of metrics that programs define.

    Its variables have TensorFlow's methods, and `result` returns tensors. All other metrics count
    as its instances too.
    """

    native = metrics.Metric

    def __init_subclass__(cls, **options: Any) -> None:
        if "result" in vars(cls):
            cls.result = adapted(cls.result)  # type: ignore[method-assign]
        super().__init_subclass__(**options)

    def add_weight(self, *args: Any, **options: Any) -> Any:
        variable: Any = super().add_weight(*args, **options)
        variable.__class__ = flavored(type(variable))  # type: ignore[arg-type]
        return variable
