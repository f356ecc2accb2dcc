"""`tf.layers`: layers of graphs, whose weights are variables in a scope of the layer's name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any, ClassVar

import numpy as np

from ndistribute import graph
from ndistribute.compat import graphs
from ndistribute.graph.graph import Symbolic
from ndistribute.graph.scopes import get_variable, variable_scope
from ndistribute.models import nn

_UPDATES = "update_ops"


def dense(inputs: Any, units: int, activation: Any = None, **options: Any) -> Any:
    """Return ``activation(inputs @ kernel + bias)``.

    Args:
        inputs: a tensor whose last axis has a known length.
        units: the length of the last axis of the result.
        activation: a function of a tensor; None: none.
        options: those of all layers with weights; see `_weighted`.
    """
    return _weighted("dense", inputs, (), units, np.matmul, activation, **options)


def conv2d(
    inputs: Any,
    filters: int,
    kernel_size: Any,
    strides: Any = (1, 1),
    padding: str = "valid",
    data_format: str = "channels_last",
    dilation_rate: Any = (1, 1),
    activation: Any = None,
    **options: Any,
) -> Any:
    """Return ``activation(convolution + bias)`` of images, ``(batch, height, width, channels)``."""
    graphs.check_layout(data_format, dilation_rate, "channels_last")

    def convolve(images: Any, kernel: Any) -> Any:
        return nn.conv2d(images, kernel, strides=graphs.windows(strides), padding=padding.lower())

    size = graphs.windows(kernel_size)
    return _weighted("conv2d", inputs, size, filters, convolve, activation, **options)


def _weighted(
    kind: str,
    inputs: Any,
    size: tuple[int, ...],
    units: int,
    combine: Callable[[Any, Any], Any],
    activation: Callable[[Any], Any] | None,
    use_bias: bool = True,
    kernel_initializer: Any = None,
    bias_initializer: Any = np.zeros,
    kernel_regularizer: Any = None,
    bias_regularizer: Any = None,
    trainable: bool = True,
    name: str | None = None,
    reuse: Any = None,
) -> Any:
    """Return what a layer with a kernel and a bias makes of its inputs.

    Args:
        kind: its name, if it gets none.
        inputs: a tensor whose last axis has a known length.
        size: the first lengths of the kernel.
        units: the length of the last axis of the result.
        combine: a function of the inputs and the kernel.
        activation: a function of the result, or its name in `tf.nn`; None: none.
        use_bias: whether a bias is added.
        kernel_initializer: see `get_variable`, as are those below.
        bias_initializer: None or not given: zeros.
        kernel_regularizer: a function whose result is one of the regularization losses.
        bias_regularizer: the same for the bias.
        trainable: whether optimizers change the weights by default.
        name: the scope of the weights; None: a new one.
        reuse: whether the weights exist; see `variable_scope`.
    """
    inputs = graph.as_tensor(inputs)
    shape = [*size, _channels(inputs), units]
    with variable_scope(name, kind, reuse=reuse):

        def weight(label: str, shape: list[int], start: Any, regularizer: Any) -> Any:
            return get_variable(label, shape, inputs.dtype, start, trainable, None, regularizer)

        kernel = weight("kernel", shape, kernel_initializer, kernel_regularizer)
        outputs = combine(inputs, kernel)
        if use_bias:
            outputs = outputs + weight("bias", [units], bias_initializer, bias_regularizer)
        if isinstance(activation, str):
            known = import_module("ndistribute.compat.tf.nn")
            activation = None if activation == "linear" else getattr(known, activation)
        return outputs if activation is None else activation(outputs)


def batch_normalization(
    inputs: Any,
    axis: int = -1,
    momentum: float = 0.99,
    epsilon: float = 1e-3,
    center: bool = True,
    scale: bool = True,
    beta_initializer: Any = np.zeros,
    gamma_initializer: Any = np.ones,
    moving_mean_initializer: Any = np.zeros,
    moving_variance_initializer: Any = np.ones,
    beta_regularizer: Any = None,
    gamma_regularizer: Any = None,
    *,
    training: Any = False,
    trainable: bool = True,
    name: str | None = None,
    reuse: Any = None,
    fused: bool | None = None,
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
        beta_initializer: see `get_variable`, as are those below.
        gamma_initializer: the same.
        moving_mean_initializer: the same.
        moving_variance_initializer: the same.
        beta_regularizer: a function whose result is one of the regularization losses.
        gamma_regularizer: the same.
        training: whether to use the moments of the batch: a truth value, or a tensor of one.
        trainable: whether optimizers change `beta` and `gamma` by default.
        name: the scope of the variables; None: a new one.
        reuse: whether the variables exist; see `variable_scope`.
        fused: ignored.
    """
    inputs = graph.as_tensor(inputs)
    channels = _channels(inputs)
    if axis not in (-1, len(inputs.shape) - 1):
        raise ValueError(f"batch_normalization: axis must be the last one, got {axis}.")
    with variable_scope(name, "batch_normalization", reuse=reuse):

        def weight(label: str, start: Any, trains: bool, regularizer: Any = None) -> Any:
            return get_variable(label, [channels], inputs.dtype, start, trains, None, regularizer)

        gamma = weight("gamma", gamma_initializer, trainable, gamma_regularizer) if scale else 1.0
        beta = weight("beta", beta_initializer, trainable, beta_regularizer) if center else 0.0
        moving = [
            weight("moving_mean", moving_mean_initializer, False),
            weight("moving_variance", moving_variance_initializer, False),
        ]
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
    length = inputs.get_shape()[1:].num_elements()
    return inputs.reshape(np.shape(inputs)[0] if length is None else -1, length or -1)


def _pooling(pool: Callable[..., Any]) -> Callable[..., Any]:
    """Return a layer that calls a function of images, windows, strides and padding."""

    def layer(
        inputs: Any,
        pool_size: Any,
        strides: Any,
        padding: str = "valid",
        data_format: str = "channels_last",
        name: str | None = None,
    ) -> Any:
        graphs.check_layout(data_format, known="channels_last")
        sizes = graphs.windows(pool_size), graphs.windows(strides)
        return pool(inputs, *sizes, padding.lower())

    return layer


average_pooling2d = _pooling(nn.average_pool2d)
max_pooling2d = _pooling(nn.max_pool2d)


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


def _channels(inputs: Any) -> int:
    length = inputs.get_shape()[-1]
    if length is None:
        why = f"a layer needs the length of the last axis of {inputs!r}: say it by set_shape()."
        raise ValueError(why)
    return int(length)
