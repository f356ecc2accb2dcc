"""`tf.layers`: layers of graphs, whose weights are variables in a scope of the layer's name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from ndistribute import graph
from ndistribute.compat import graphs
from ndistribute.graph.graph import Symbolic
from ndistribute.graph.model_calls import build_in_graph
from ndistribute.graph.scopes import get_variable, variable_scope
from ndistribute.models import layers

_UPDATES = "update_ops"


def dense(
    inputs: Any, units: int, activation: Any = None, use_bias: bool = True, **options: Any
) -> Any:
    """Return ``activation(inputs @ kernel + bias)``.

    Args:
        inputs: a tensor whose last axis has a known length.
        units: the length of the last axis of the result.
        activation: a function of a tensor, or its name; None: none.
        use_bias: whether a bias is added.
        options: those of all layers with weights; see `_weighted`.
    """
    how = {"units": units, "use_bias": use_bias}
    return _weighted("dense", layers.Dense, inputs, how, activation, **options)


def conv2d(
    inputs: Any,
    filters: int,
    kernel_size: Any,
    strides: Any = (1, 1),
    padding: str = "valid",
    data_format: str = "channels_last",
    dilation_rate: Any = (1, 1),
    activation: Any = None,
    use_bias: bool = True,
    **options: Any,
) -> Any:
    """Return ``activation(convolution + bias)`` of images, ``(batch, height, width, channels)``."""
    graphs.check_layout(data_format, known="channels_last")
    how = {"filters": filters, "kernel_size": kernel_size, "strides": strides, "padding": padding}
    how |= {"dilation_rate": dilation_rate, "use_bias": use_bias}
    return _weighted("conv2d", layers.Conv2D, inputs, how, activation, **options)


def _weighted(
    scope: str,
    make: Callable[..., Any],
    inputs: Any,
    how: dict[str, Any],
    activation: Callable[[Any], Any] | None,
    trainable: bool = True,
    name: str | None = None,
    reuse: Any = None,
    **starts: Any,
) -> Any:
    """Return what a layer with a kernel and a bias makes of its inputs.

    Args:
        scope: the name of the scope, if the layer gets none.
        make: makes a layer of models.
        inputs: a tensor whose last axis has a known length.
        how: the arguments of the layer.
        activation: a function of the result, or its name; None: none.
        trainable: whether optimizers change the weights by default.
        name: the scope of the weights; None: a new one.
        reuse: whether the weights exist; see `variable_scope`.
        starts: ``kernel_initializer``, ``bias_initializer``, ``kernel_regularizer`` and
            ``bias_regularizer``, see `get_variable`.
    """
    inputs, is_named = graph.as_tensor(inputs), isinstance(activation, str)
    _channels(inputs)  # Which must be known.
    layer = make(**how, activation=activation if is_named else None, dtype=_dtype_of(inputs))
    weight = _weights(layer.dtype, starts, kernel=None, bias=np.zeros)
    with variable_scope(name, scope, reuse=reuse):
        build_in_graph(layer, [inputs], lambda label, shape, *_: weight(label, shape, trainable))
        outputs = layer(inputs)
        return outputs if is_named or activation is None else activation(outputs)


def _weights(dtype: Any, starts: dict[str, Any], **otherwise: Any) -> Callable[..., Any]:
    """Return a function that makes weights as the options of a layer say, or else as others do."""
    known = {f"{label}_{what}" for label in otherwise for what in ("initializer", "regularizer")}
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

    In training these are the moments of the batch, else their moving averages, which are updated
    by the operations in the collection ``"update_ops"``. After Ioffe and Szegedy (2015).

    Args:
        inputs: a tensor whose last axis has a known length.
        axis: the axis of the channels: the last one.
        momentum: of the moving averages.
        epsilon: added to the variance.
        center: whether `beta` is added.
        scale: whether the result is multiplied by `gamma`.
        training: whether to use the moments of the batch: a truth value, or a tensor of one.
        trainable: whether optimizers change `beta` and `gamma` by default.
        name: the scope of the variables; None: a new one.
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
    name: str | None = None,
) -> Any:
    """Return inputs of which a part is zero in training, and the others are scaled up.

    Args:
        inputs: a tensor.
        rate: the part that is zero.
        noise_shape: the shape of the random numbers; None: that of the inputs.
        seed: the seed of the random numbers.
        training: a truth value, or a tensor of one.
        name: ignored.
    """

    def dropped() -> Any:
        return graphs.dropout(inputs, 1.0 - rate, noise_shape, seed)

    if isinstance(training, Symbolic):
        return graph.cond(training, dropped, lambda: inputs)
    return dropped() if training else inputs


def flatten(inputs: Any, name: str | None = None) -> Any:
    """Return inputs with all axes but the first one in one."""
    inputs = graph.as_tensor(inputs)
    return layers.Flatten(dtype=_dtype_of(inputs))(inputs)


def _pooling(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls a layer of models."""

    def pooling(
        inputs: Any,
        pool_size: Any,
        strides: Any,
        padding: str = "valid",
        data_format: str = "channels_last",
        name: str | None = None,
    ) -> Any:
        graphs.check_layout(data_format, known="channels_last")
        inputs = graph.as_tensor(inputs)
        return make(pool_size, strides, padding, dtype=_dtype_of(inputs))(inputs)

    return pooling


average_pooling2d, max_pooling2d = map(_pooling, (layers.AveragePool2D, layers.MaxPool2D))


class GraphLayer:
    """A layer as an object, whose calls all use the variables that the first one makes.

    Args:
        args: those of the function after `inputs`.
        name: the scope of the variables; None: a new one.
        options: those of the function.
    """

    function: ClassVar[Any]

    def __init__(self, *args: Any, name: str | None = None, **options: Any) -> None:
        function, self.name = type(self).function, name
        self._scope: Any = None
        inspect.signature(function).bind(None, *args, **options)  # What is wrong fails here.
        self._call: Any = lambda inputs, **more: function(inputs, *args, **options, **more)

    def __call__(self, inputs: Any, **options: Any) -> Any:
        """Return what the function makes of inputs."""
        function = type(self).function
        if function not in _WITH_WEIGHTS:
            return self._call(inputs, **options)
        is_built = self._scope is not None
        if not is_built:
            with variable_scope(self.name, function.__name__) as self._scope:
                self.name = self._scope.name
        return self._call(inputs, name=self._scope, reuse=is_built, **options)

    apply = __call__

    @property
    def variables(self) -> list[Any]:
        """The variables, once the layer was called."""
        return [v for v in graph.global_variables() if v.op.name.startswith(f"{self.name}/")]

    weights = variables


_WITH_WEIGHTS = {dense, conv2d, batch_normalization}


def _class(name: str, function: Any) -> Any:
    return type(name, (GraphLayer,), {"function": staticmethod(function)})


AveragePooling2D = _class("AveragePooling2D", average_pooling2d)
BatchNormalization = _class("BatchNormalization", batch_normalization)
Conv2D = _class("Conv2D", conv2d)
Dense = _class("Dense", dense)
Dropout = _class("Dropout", dropout)
Flatten = _class("Flatten", flatten)
MaxPooling2D = _class("MaxPooling2D", max_pooling2d)


def _dtype_of(inputs: Any) -> Any:
    """Return the dtype of floats; None: a layer chooses it."""
    return inputs.dtype if inputs.dtype is not None and inputs.dtype.kind == "f" else None


def _channels(inputs: Any) -> int:
    length = inputs.get_shape()[-1]
    if length is None:
        why = f"a layer needs the length of the last axis of {inputs!r}: say it by set_shape()."
        raise ValueError(why)
    return int(length)
