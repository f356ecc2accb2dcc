"""Dense layers, attention, shapes, activations, dropout and embeddings.

A dense layer may be divided among the replicas, which have different parts of the batch. It gathers
the inputs of the whole batch. Each replica stores its part of the layer and computes it for all
inputs. The results then go back to the replicas of the examples. If a layer has many more weights
than a batch has activations, this costs less than the all-reduce of its gradient. The rest of a
model, such as convolutions, stays data-parallel.

References:
    A. Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014.
    M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
    Parallelism", 2019, for the names.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ndistribute.autodiff import softmax
from ndistribute.context import current_trace, get_replica_context, part_of
from ndistribute.devices import as_array
from ndistribute.exports import export as _export
from ndistribute.models import activations, operations
from ndistribute.models.layers.arguments import as_floats, dropout_factors, positive, rate_of
from ndistribute.models.layers.layer import Layer
from ndistribute.variables.mirrored import sharded_variable


class KernelLayer(Layer):
    """The base class of layers with a kernel, a bias and an activation; see `Dense`."""

    kernel: Any = None
    bias: Any = None
    fixes_last_axis = True
    weights_of_kind: ClassVar = {"kernel": "glorot_uniform", "bias": "zeros"}

    def __init__(
        self, activation: str | Callable[[Any], Any] | None, use_bias: bool, **options: Any
    ) -> None:
        super().__init__(**options)
        self.activation, self._use_bias = activations.get(activation), use_bias

    def add_kernel(self, *shape: int, outputs: int | None = None) -> None:
        """Create the kernel of a shape, and the bias, by default of the length of the last axis."""
        self.kernel = self.add_weight("kernel", shape)
        self.add_bias(shape[-1] if outputs is None else outputs)

    def add_bias(self, length: int) -> None:
        """Create the bias, if the layer has one."""
        if self._use_bias:
            self.bias = self.add_weight("bias", (length,))


class Dense(KernelLayer):
    """A layer that computes ``activation(inputs @ kernel + bias)``.

    Args:
        units: the length of the output's last axis.
        activation: a name, such as ``"relu"``, a function, or None.
        use_bias: whether to add a bias.
        options: `kernel_initializer` and `bias_initializer`, by default ``"glorot_uniform"`` and
            ``"zeros"``; `kernel_regularizer` and `bias_regularizer`, by default None; and `name`,
            `trainable` and `dtype`, see `Layer`.

    >>> layer = Dense(3, activation="relu")
    >>> layer(np.zeros((2, 4), np.float32)).shape, layer.kernel.shape
    ((2, 3), (4, 3))
    """

    supports_masking = True

    def __init__(
        self,
        units: int,
        activation: str | Callable[[Any], Any] | None = None,
        use_bias: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(activation, use_bias, **options)
        self.units = positive(units, f"{type(self).__name__}: units")

    def build(self, input_shape: Sequence[int]) -> None:
        """Create the kernel and the bias."""
        if len(input_shape) < 2:
            raise ValueError(
                f"{self.name}: the input has shape {tuple(input_shape)}, but a dense layer needs a "
                "batch axis and a feature axis. Write x[:, np.newaxis] for one feature."
            )
        self.add_kernel(input_shape[-1], self.units)

    def call(self, inputs: Any) -> Any:
        """Return the output, of shape ``(*inputs.shape[:-1], units)``."""
        x = as_floats(inputs, self.kernel)
        return operations.dense(x, self.kernel, self.bias, self.activation)


class Flatten(Layer):
    """A layer that joins all axes but the first.

    >>> Flatten()(np.zeros((2, 3, 4))).shape
    (2, 12)
    """

    def call(self, inputs: Any) -> Any:
        """Return the input with two axes."""
        return inputs.reshape(inputs.shape[0], math.prod(inputs.shape[1:]))


class Reshape(Layer):
    """A layer that gives each example another shape.

    Args:
        target_shape: the shape without the batch axis; one length may be -1.
        options: `name`, `trainable` and `dtype`, see `Layer`.

    >>> Reshape((2, -1))(np.zeros((5, 6))).shape
    (5, 2, 3)
    """

    def __init__(self, target_shape: Sequence[int], **options: Any) -> None:
        super().__init__(**options)
        self.target_shape = tuple(target_shape)

    def call(self, inputs: Any) -> Any:
        """Return the input in the target shape."""
        shape, size = list(self.target_shape), math.prod(inputs.shape[1:])
        if -1 in shape:  # An empty batch does not determine it.
            others = math.prod(length for length in shape if length != -1)
            shape[shape.index(-1)] = size // max(1, others)
        return inputs.reshape(inputs.shape[0], *shape)


class Permute(Layer):
    """A layer that reorders the axes of each example.

    Args:
        dims: the numbers of the axes in their new order; 1 is the first after that of the batch.
        options: `name`, `trainable` and `dtype`, see `Layer`.

    >>> Permute((2, 1))(np.zeros((5, 3, 4))).shape
    (5, 4, 3)
    """

    def __init__(self, dims: Sequence[int], **options: Any) -> None:
        super().__init__(**options)
        self.dims = tuple(dims)
        if sorted(self.dims) != list(range(1, len(self.dims) + 1)):
            raise ValueError(f"Permute: dims must have each of 1, 2, ... once, got {dims!r}.")

    def call(self, inputs: Any) -> Any:
        """Return the input with its axes reordered."""
        return np.transpose(inputs, (0, *self.dims))


class RepeatVector(Layer):
    """A layer that repeats each vector, along a new axis after that of the batch.

    Args:
        n: the number of repetitions.
        options: `name`, `trainable` and `dtype`, see `Layer`.

    >>> RepeatVector(3)(np.zeros((5, 4))).shape
    (5, 3, 4)
    """

    def __init__(self, n: int, **options: Any) -> None:
        super().__init__(**options)
        self.n = positive(n, "RepeatVector: n")

    def call(self, inputs: Any) -> Any:
        """Return the repeated vectors."""
        return np.repeat(inputs[:, None], self.n, axis=1)


class Lambda(Layer):
    """A layer that calls a function without variables.

    Args:
        function: a function of the input; a keyword `training` receives whether the model is being
            trained. A function with a name can be exported.
        arguments: further arguments of the function, by name.
        options: `name`, `trainable` and `dtype`, see `Layer`.

    >>> Lambda(lambda x: x[:, ::-1])(np.array([[1.0, 2.0]]))
    array([[2., 1.]], dtype=float32)
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.function, self.arguments = function, dict(arguments or {})
        self._trains = "training" in inspect.signature(function).parameters

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Return the result of the function."""
        options = {"training": training} if self._trains else {}
        return self.function(inputs, **self.arguments, **options)


class Activation(Layer):
    """A layer that applies an activation.

    Args:
        activation: a name or a function.
        options: `name`, `trainable` and `dtype`, see `Layer`.
    """

    supports_masking = True

    def __init__(self, activation: str | Callable[[Any], Any], **options: Any) -> None:
        super().__init__(**options)
        self.activation = activations.get(activation)

    def call(self, inputs: Any) -> Any:
        """Return the activation of the input."""
        return self.activation(inputs)


class LeakyReLU(Activation):
    """A layer that multiplies negative elements by a slope.

    >>> LeakyReLU(0.5)(np.array([-2.0, 2.0])).tolist()
    [-1.0, 2.0]
    """

    def __init__(self, negative_slope: float = 0.3, **options: Any) -> None:
        slope = float(negative_slope)
        super().__init__(functools.partial(activations.leaky_relu, negative_slope=slope), **options)


class ELU(Activation):
    """A layer that returns ``alpha * (exp(x) - 1)`` for negative elements.

    >>> ELU()(np.array([-np.inf, 2.0])).tolist()
    [-1.0, 2.0]
    """

    def __init__(self, alpha: float = 1.0, **options: Any) -> None:
        super().__init__(functools.partial(activations.elu, alpha=float(alpha)), **options)


class ReLU(Activation):
    """A layer that returns the elements above a threshold, up to a maximum.

    Args:
        max_value: the maximum; None: no maximum.
        negative_slope: the factor of the distance to the threshold, for elements below it.
        threshold: the threshold.
        options: `name`, `trainable` and `dtype`, see `Layer`.

    >>> ReLU(max_value=6)(np.array([-2.0, 2.0, 8.0])).tolist()
    [0.0, 2.0, 6.0]
    """

    def __init__(
        self,
        max_value: float | None = None,
        negative_slope: float = 0.0,
        threshold: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__("relu", **options)
        self.max_value, self.negative_slope, self.threshold = max_value, negative_slope, threshold

    def call(self, inputs: Any) -> Any:
        """Return the activation of the input."""
        y = self.activation(inputs)
        if self.threshold or self.negative_slope:
            y = np.where(inputs > self.threshold, inputs, 0)
            y = y + self.negative_slope * np.minimum(inputs - self.threshold, 0)
        return y if self.max_value is None else np.minimum(y, self.max_value)


class Softmax(Layer):
    """A layer that turns the elements along an axis into probabilities.

    >>> Softmax()(np.array([[0.0, 0.0]])).tolist()
    [[0.5, 0.5]]
    """

    supports_masking = True

    def __init__(self, axis: int = -1, **options: Any) -> None:
        super().__init__(**options)
        self.axis = axis

    def call(self, inputs: Any, mask: Any = None) -> Any:
        """Return the probabilities; they are 0 where a mask of the input's shape is False."""
        if mask is not None and mask.ndim == inputs.ndim:
            inputs = np.where(mask, inputs, np.finfo(inputs.dtype).min)
        return softmax(inputs, axis=self.axis)


class PReLU(Layer):
    """A layer that multiplies negative elements by slopes that it learns.

    Args:
        alpha_initializer: the initializer of the slopes, one for each element of an example.
        shared_axes: axes along which elements have one slope, such as ``[1, 2]`` for images.
        options: `name`, `trainable` and `dtype`, see `Layer`.

    >>> PReLU(alpha_initializer="ones")(np.array([[-2.0, 2.0]])).tolist()
    [[-2.0, 2.0]]
    """

    supports_masking = True
    fixes_last_axis = True
    weights_of_kind: ClassVar = {"alpha": "zeros"}

    def __init__(
        self,
        alpha_initializer: str | Callable[..., Any] = "zeros",
        shared_axes: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(alpha_initializer=alpha_initializer, **options)
        self.shared_axes = shared_axes or ()

    def build(self, input_shape: Sequence[int]) -> None:
        """Create the slopes."""
        shape = [1 if k in self.shared_axes else n for k, n in enumerate(input_shape)][1:]
        self.alpha = self.add_weight("alpha", shape)

    def call(self, inputs: Any) -> Any:
        """Return the activation of the input."""
        return np.maximum(inputs, 0) + self.alpha * np.minimum(inputs, 0)


class Dropout(Layer):
    """A layer that in training sets random elements to zero, and scales the others up.

    Every replica draws from its own generator. Source: Srivastava et al., "Dropout: A Simple Way to
    Prevent Neural Networks from Overfitting", 2014.

    Args:
        rate: the share of elements to drop, in ``[0, 1)``.
        noise_shape: the shape of the random mask. A length of 1 drops the elements along this axis
            together; None means the length of the input. None instead of a shape: each element is
            dropped by itself.
        options: `name`, `trainable` and `dtype`, see `Layer`.

    >>> Dropout(0.5)(np.ones(4, np.float32))
    array([1., 1., 1., 1.], dtype=float32)
    """

    supports_masking = True

    def __init__(
        self, rate: float, noise_shape: Sequence[int | None] | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self.rate, self.noise_shape = rate_of(rate, f"{type(self).__name__}: rate"), noise_shape

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Return the input, in training with elements dropped."""
        drawn = inputs.shape if self.noise_shape is None else self.noise_shape
        shape = [n if k is None else k for n, k in zip(inputs.shape, drawn, strict=True)]
        factors = dropout_factors(inputs, shape, self.rate) if training else None
        return inputs if factors is None else inputs * factors


class SpatialDropout1D(Dropout):
    """A layer that drops whole features of sequences in training; see `Dropout`."""

    def __init__(self, rate: float, **options: Any) -> None:
        super().__init__(rate, (None, 1, None), **options)


class SpatialDropout2D(Dropout):
    """A layer that drops whole channels of images in training; see `Dropout`."""

    def __init__(self, rate: float, **options: Any) -> None:
        super().__init__(rate, (None, 1, 1, None), **options)


class Embedding(Layer):
    """A layer that turns integers into rows of a table.

    The gradient of the table has only the rows that a batch uses.

    Args:
        input_dim: the number of rows.
        output_dim: the length of a row.
        mask_zero: whether the input 0 is padding, which layers, losses and metrics after this layer
            leave out.
        options: `embeddings_initializer` and `embeddings_regularizer`, as for the kernel of
            `Dense`; and `name`, `trainable` and `dtype`, see `Layer`.

    >>> Embedding(10, 3)(np.array([[1, 2], [3, 4]])).shape
    (2, 2, 3)
    """

    weights_of_kind: ClassVar = {"embeddings": "random_uniform"}

    def __init__(
        self, input_dim: int, output_dim: int, mask_zero: bool = False, **options: Any
    ) -> None:
        super().__init__(**options)
        self.input_dim = positive(input_dim, "Embedding: input_dim")
        self.output_dim = positive(output_dim, "Embedding: output_dim")
        self.mask_zero = bool(mask_zero)

    def build(self, input_shape: Sequence[int]) -> None:
        """Create the table."""
        self.embeddings = self.add_weight("embeddings", (self.input_dim, self.output_dim))

    def call(self, inputs: Any) -> Any:
        """Return the rows, of shape ``(*inputs.shape, output_dim)``."""
        if inputs.dtype.kind not in "iu":
            inputs = inputs.astype(np.int64)
        what = f"{self.name}: indices must be in [0, {self.input_dim})"
        advice = "Increase input_dim, or map unknown words to one index."
        operations.check_range(inputs, self.input_dim, what, advice)
        return self.embeddings[inputs]

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Return where the input is not 0, if `mask_zero`."""
        return inputs != 0 if self.mask_zero else None


class Masking(Layer):
    """A layer that masks time steps whose features all equal a value, and sets them to 0.

    Args:
        mask_value: the value.
        options: `name`, `trainable` and `dtype`, see `Layer`.

    >>> Masking(9.0)(np.array([[[1.0, 9.0], [9.0, 9.0]]])).tolist()
    [[[1.0, 9.0], [0.0, 0.0]]]
    """

    def __init__(self, mask_value: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self.mask_value = mask_value

    def call(self, inputs: Any) -> Any:
        """Return the input, with 0 where it is masked."""
        return inputs * self.compute_mask(inputs)[..., None].astype(inputs.dtype)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Return where a feature has another value."""
        return (as_array(inputs) != self.mask_value).any(axis=-1)


class _ParallelDense(Dense):
    """A dense layer with weights in shards."""

    _axis: ClassVar[int]
    """The axis of the kernel that is divided."""

    def build(self, input_shape: Sequence[int]) -> None:
        """Create the kernel and the bias, which is divided with the units."""
        self.kernel = self._sharded("kernel", (input_shape[-1], self.units), self._axis)
        if self._use_bias:
            make = self._sharded if self._axis else self.add_weight
            self.bias = make("bias", (self.units,))

    def _whole_batch(self, inputs: Any, context: Any) -> tuple[Any, Any]:
        """Return all replicas' examples, and which are this replica's; None if it is alone."""
        if inputs.ndim != 2:
            raise ValueError(
                f"{self.name}: a parallel dense layer needs an input of two axes, got shape "
                f"{inputs.shape}: put a Flatten before it."
            )
        inputs = as_floats(inputs, self.kernel)
        if context is None or context.num_replicas_in_sync == 1:
            return inputs, None
        rank, whole = context.replica_id_in_sync_group, context.all_gather(inputs, axis=0)
        if current_trace() is not None:
            return whole, part_of(len(whole), rank, context.num_replicas_in_sync)
        lengths = context.all_gather(np.array([len(inputs)]), axis=0)
        start = int(lengths[:rank].sum())
        return whole, slice(start, start + len(inputs))

    def _sharded(self, name: str, shape: Sequence[int], axis: int = 0) -> Any:
        if any(self._regularizers.values()):
            raise ValueError(
                f"{self.name}: a parallel dense layer cannot be regularized, as each replica would "
                "penalize a part of the weights."
            )
        make = self._starts[name]
        dtype, name = self.dtype, f"{self.name}/{name}"
        return sharded_variable(lambda: make(tuple(shape), dtype), axis, name=name, dtype=dtype)


class ColumnParallelDense(_ParallelDense):
    """A dense layer whose units are divided among replicas: each has some columns of the kernel.

    The result and the gradients are those of `Dense`. Each replica updates its own part. The layer
    takes and returns the examples of its replica, with all features.

    Args:
        units: the length of the output's last axis, at least the number of replicas.
        activation: as for `Dense`.
        use_bias: as for `Dense`.
        options: as for `Dense`, without regularizers.

    >>> ColumnParallelDense(4)(np.ones((2, 3), np.float32)).shape
    (2, 4)
    """

    _axis = 1

    def call(self, inputs: Any) -> Any:
        """Return the output, of shape ``(batch, units)``."""
        context: Any = get_replica_context()
        whole, rows = self._whole_batch(inputs, context)
        part = operations.dense(whole, self.kernel, self.bias, activations.get(None))
        if rows is not None:
            part = context.all_gather(part, axis=1)[rows]
        return self.activation(part)


class RowParallelDense(_ParallelDense):
    """A dense layer whose inputs are divided among replicas: each has some rows of the kernel.

    The result and the gradients are those of `Dense`; see `ColumnParallelDense`. Use it for a layer
    with more inputs than units.

    Args:
        units: the length of the output's last axis.
        activation: as for `Dense`.
        use_bias: as for `Dense`.
        options: as for `Dense`, without regularizers.

    >>> RowParallelDense(2)(np.ones((2, 3), np.float32)).shape
    (2, 2)
    """

    _axis = 0

    def call(self, inputs: Any) -> Any:
        """Return the output, of shape ``(batch, units)``."""
        context: Any = get_replica_context()
        whole, rows = self._whole_batch(inputs, context)
        if rows is None:
            total = whole @ self.kernel
        else:
            part, *_ = self.kernel.cut(context.replica_id_in_sync_group)
            total = context.all_reduce("sum", whole[:, part] @ self.kernel)[rows]
        return self.activation(total if self.bias is None else total + self.bias)


_export(vars(), but="KernelLayer")
