"""`tf.layers`: layers of graphs; their weights are variables in a scope with the layer's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from ndistribute import graph
from ndistribute.compat import graphs
from ndistribute.graph.graph import Symbolic
from ndistribute.graph.model_calls import build_in_graph
from ndistribute.graph.scopes import get_variable, variable_scope
from ndistribute.models import layers

_STARTS, _UPDATES = ("_initializer", "_regularizer"), "update_ops"


def _of_models(scope: str, make: Callable[..., Any], *order: str) -> Any:
    """Return a function that calls a layer of models, with its arguments in another order.

    It also accepts the arguments for variables that `batch_normalization` has. An activation may be
    a function of a tensor of a graph.

    Args:
        scope: the name of the scope, if the layer gets no name.
        make: a function that makes a layer of models.
        order: the names of the arguments after `inputs`.
    """

    def function(
        inputs: Any,
        *args: Any,
        trainable: bool = True,
        name: Any = None,
        reuse: Any = None,
        **options: Any,
    ) -> Any:
        options |= dict(zip(order, args, strict=False))
        graphs.check_layout(options.pop("data_format", None), known="channels_last")
        starts = {key: options.pop(key) for key in [*options] if key.endswith(_STARTS)}
        is_named, inputs = not callable(options.get("activation")), graph.as_tensor(inputs)
        activation: Any = None if is_named else options.pop("activation")
        layer = make(*args[len(order) :], **options, dtype=_dtype_of(inputs))
        if "use_bias" in order:
            _channels(inputs)  # The length must be known.
        weight = _weights(layer.dtype, starts, kernel=None, bias=np.zeros)
        with variable_scope(name, scope, reuse=reuse):
            new_variable = lambda label, shape, *_: weight(label, shape, trainable)  # noqa: E731
            build_in_graph(layer, [inputs], new_variable)
            outputs = layer(inputs)
            return outputs if is_named else activation(outputs)

    function.__name__ = scope
    return function


def _weights(dtype: Any, starts: dict[str, Any], **otherwise: Any) -> Callable[..., Any]:
    """Return a function that makes weights as a layer's options say, or with the defaults."""
    known = {f"{label}{end}" for label in otherwise for end in _STARTS}
    if unknown := sorted(starts.keys() - known):
        raise TypeError(f"a layer got the unknown arguments {unknown}: it takes {sorted(known)}.")

    def weight(label: str, shape: Any, trains: bool) -> Any:
        start = starts.get(f"{label}_initializer", otherwise[label])
        regularizer = starts.get(f"{label}_regularizer")
        return get_variable(label, shape, dtype, start, trains, None, regularizer)

    return weight


def batch_normalization(
    inputs: Any,
    axis: int = -1,
    momentum: float = 0.99,
    epsilon: float = 1e-3,
    center: bool = True,
    scale: bool = True,
    *,
    training: Any = False,
    trainable: bool = True,
    name: str | None = None,
    reuse: Any = None,
    fused: bool | None = None,
    **starts: Any,
) -> Any:
    """Return inputs with the mean 0 and variance 1 in each channel, scaled and moved.

    In training, the moments of the batch are used; otherwise their moving averages, which the
    operations in the collection ``"update_ops"`` update. After Ioffe and Szegedy (2015).

    Args:
        inputs: a tensor whose last axis has a known length.
        axis: the axis of the channels: the last one.
        momentum: the momentum of the moving averages.
        epsilon: the number that is added to the variance.
        center: whether `beta` is added.
        scale: whether the result is multiplied by `gamma`.
        training: whether to use the moments of the batch: a boolean, or a tensor of a boolean.
        trainable: whether optimizers change `beta` and `gamma` by default.
        name: the scope of the variables; None means a new scope.
        reuse: whether the variables exist; see `variable_scope`.
        fused: ignored.
        starts: ``beta_initializer``, ``beta_regularizer`` and so on, see `get_variable`, of `beta`,
            `gamma`, `moving_mean` and `moving_variance`.
    """
    inputs = graph.as_tensor(inputs)
    channels = [_channels(inputs)]
    if axis not in (-1, len(inputs.shape) - 1):
        raise ValueError(f"batch_normalization: axis must be the last one, got {axis}.")
    others = {"moving_mean": np.zeros, "moving_variance": np.ones}
    weight = _weights(inputs.dtype, starts, gamma=np.ones, beta=np.zeros, **others)
    with variable_scope(name, "batch_normalization", reuse=reuse):
        gamma = weight("gamma", channels, trainable) if scale else 1.0
        beta = weight("beta", channels, trainable) if center else 0.0
        moving = [weight(label, channels, False) for label in others]
        moments: list[Any] = moving
        if training is not False:
            axes = tuple(range(len(inputs.shape) - 1))
            of_batch: list[Any] = [np.mean(inputs, axis=axes), np.var(inputs, axis=axes)]
            if isinstance(training, Symbolic):
                moments = [np.where(training, *pair) for pair in zip(of_batch, moving, strict=True)]
            elif training:
                moments = of_batch
            for average, moment in zip(moving, moments, strict=True):
                if moment is not average:
                    update = average.assign_sub((average - moment) * (1.0 - momentum))
                    graph.get_default_graph().add_to_collection(_UPDATES, update)
        mean, variance = moments
        return (inputs - mean) * (gamma / np.sqrt(variance + epsilon)) + beta


def dropout(
    inputs: Any,
    rate: float = 0.5,
    noise_shape: Any = None,
    seed: int | None = None,
    training: Any = False,
    name: Any = None,
    reuse: Any = None,
) -> Any:
    """Return inputs; in training, a fraction is set to zero and the others are scaled up.

    Args:
        inputs: a tensor.
        rate: the fraction that is set to zero.
        noise_shape: the shape of the random numbers; None means that of the inputs.
        seed: the seed of the random numbers.
        training: a boolean, or a tensor of a boolean.
        name: ignored.
        reuse: ignored.
    """

    def dropped() -> Any:
        return graphs.dropout(inputs, 1.0 - rate, noise_shape, seed)

    if isinstance(training, Symbolic):
        return graph.cond(training, dropped, lambda: inputs)
    return dropped() if training else inputs


dense = _of_models("dense", layers.Dense, "units", "activation", "use_bias")
conv2d = _of_models(
    "conv2d",
    layers.Conv2D,
    *"filters kernel_size strides padding data_format dilation_rate activation use_bias".split(),
)
flatten = _of_models("flatten", layers.Flatten)
_WINDOWS = "pool_size", "strides", "padding", "data_format"
average_pooling2d = _of_models("average_pooling2d", layers.AveragePool2D, *_WINDOWS)
max_pooling2d = _of_models("max_pooling2d", layers.MaxPool2D, *_WINDOWS)


class GraphLayer:
    """A layer as an object; all calls use the variables that the first call makes.

    Args:
        args: the arguments of the function after `inputs`.
        name: the scope of the variables; None means a new scope.
        options: the keywords of the function.
    """

    function: ClassVar[Any]

    def __init__(self, *args: Any, name: str | None = None, **options: Any) -> None:
        function, self.name = type(self).function, name
        self._scope: Any = None
        self._call: Any = lambda inputs, **more: function(inputs, *args, **options, **more)

    def __call__(self, inputs: Any, **options: Any) -> Any:
        """Return the result of the function for inputs."""
        is_built = self._scope is not None
        if not is_built:
            with variable_scope(self.name, type(self).function.__name__) as self._scope:
                self.name = self._scope.name
        return self._call(inputs, name=self._scope, reuse=is_built, **options)

    apply = __call__

    @property
    def variables(self) -> list[Any]:
        """The variables, once the layer was called."""
        return [v for v in graph.global_variables() if v.op.name.startswith(f"{self.name}/")]

    weights = variables


def _class(function: Any) -> Any:
    name = function.__name__.title().replace("_", "")
    return type(name, (GraphLayer,), {"function": staticmethod(function)})


AveragePooling2D, MaxPooling2D = map(_class, (average_pooling2d, max_pooling2d))
BatchNormalization, Dropout = map(_class, (batch_normalization, dropout))
Conv2D, Dense, Flatten = map(_class, (conv2d, dense, flatten))


def _dtype_of(inputs: Any) -> Any:
    """Return the dtype of floats; None lets a layer choose it."""
    return inputs.dtype if inputs.dtype is not None and inputs.dtype.kind == "f" else None


def _channels(inputs: Any) -> int:
    length = inputs.get_shape()[-1]
    if length is None:
        why = f"a layer needs the length of the last axis of {inputs!r}: set it with set_shape()."
        raise ValueError(why)
    return int(length)
