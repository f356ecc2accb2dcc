"""Recurrent layers, and layers around a layer for sequences of shape ``(batch, time, ...)``.

A recurrent layer is one operation, see `ndistribute.models.operations`. Where a mask is False, the
state stays what it was, so padding at the end of a sequence changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from ndistribute.autodiff.rules.placing import as_operand
from ndistribute.devices import as_array
from ndistribute.mistakes import accepting
from ndistribute.models import activations, initializers, operations, regularizers
from ndistribute.models.layers.core import as_floats, dropout_factors, positive, rate_of
from ndistribute.models.layers.layer import Layer

_ignored = accepting("implementation", "unroll", "use_cudnn")


class SimpleRNN(Layer):
    """A layer that computes ``h = activation(x @ kernel + h @ recurrent_kernel + bias)`` in turn.

    Args:
        units: the length of the output's last axis.
        activation: a name, a function, or None. ``"tanh"``, ``"sigmoid"``, ``"relu"`` and None are
            computed as one operation, others by many.
        use_bias: whether to add a bias.
        kernel_initializer: the initializer of the weights of the input.
        recurrent_initializer: the initializer of the weights of the last output.
        bias_initializer: the initializer of the bias.
        kernel_regularizer: a penalty of the kernel, as in `Dense`.
        recurrent_regularizer: a penalty of the recurrent kernel.
        bias_regularizer: a penalty of the bias.
        dropout: the share of the input's features to drop in training, the same in all time steps.
        recurrent_dropout: must be 0.
        return_sequences: whether to return the outputs of all time steps, not only the last.
        return_state: whether to return the output and the last states, in a list.
        go_backwards: whether to start at the last time step; outputs are in that order, too.
        stateful: must be False.
        zero_output_for_mask: whether the outputs of time steps that a mask leaves out are 0; else
            they are those of the step before.
        options: `name`, `trainable` and `dtype`, see `Layer`; `implementation`, `unroll` and
            `use_cudnn` change nothing.

    Raises:
        ValueError: an argument is out of range, or what does not exist here is wanted.

    >>> layer = SimpleRNN(4, return_sequences=True)
    >>> layer(np.zeros((2, 5, 3), np.float32)).shape, layer.recurrent_kernel.shape
    ((2, 5, 4), (4, 4))
    """

    @_ignored
    def __init__(
        self,
        units: int,
        activation: str | Callable[[Any], Any] | None = "tanh",
        use_bias: bool = True,
        kernel_initializer: str | Callable[..., Any] = "glorot_uniform",
        recurrent_initializer: str | Callable[..., Any] = "orthogonal",
        bias_initializer: str | Callable[..., Any] = "zeros",
        *,
        kernel_regularizer: str | Callable[[Any], Any] | None = None,
        recurrent_regularizer: str | Callable[[Any], Any] | None = None,
        bias_regularizer: str | Callable[[Any], Any] | None = None,
        dropout: float = 0.0,
        recurrent_dropout: float = 0.0,
        return_sequences: bool = False,
        return_state: bool = False,
        go_backwards: bool = False,
        stateful: bool = False,
        zero_output_for_mask: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        kind = type(self).__name__
        if recurrent_dropout or stateful:
            what, instead = ("stateful=True", "return_state=True and pass initial_state to a call")
            if recurrent_dropout:
                what, instead = (f"recurrent_dropout={recurrent_dropout}", "dropout")
            raise ValueError(f"{kind}: {what} does not exist here: use {instead}.")
        self.units = positive(units, f"{kind}: units")
        self.cell = operations.RecurrentCell(activations.get(activation))
        self.kernel_regularizer = regularizers.get(kernel_regularizer)
        self.recurrent_kernel_regularizer = regularizers.get(recurrent_regularizer)
        self.bias_regularizer = regularizers.get(bias_regularizer)
        self.dropout = rate_of(dropout, f"{kind}: dropout")
        self.return_sequences, self.return_state = bool(return_sequences), bool(return_state)
        self.go_backwards = bool(go_backwards)
        self.zero_output_for_mask = bool(zero_output_for_mask)
        self._use_bias, self._bias_start = use_bias, initializers.get(bias_initializer)
        self._initializers = kernel_initializer, recurrent_initializer
        self._bias_rows: tuple[int, ...] = ()

    def build(self, input_shape: Sequence[int]) -> None:
        """Create the kernels and the bias."""
        if len(input_shape) != 3:
            raise ValueError(
                f"{self.name}: the input has shape {tuple(input_shape)}, but a recurrent layer "
                "needs three axes, (batch, time, features). Write x[..., np.newaxis] for one "
                "feature."
            )
        width = self.cell.gates * self.units
        self.kernel = self.add_weight("kernel", (input_shape[-1], width), self._initializers[0])
        shape = self.units, width
        self.recurrent_kernel = self.add_weight("recurrent_kernel", shape, self._initializers[1])
        self.bias: Any = None
        if self._use_bias:
            self.bias = self.add_weight("bias", (*self._bias_rows, width), self._bias_start)

    def call(
        self, inputs: Any, initial_state: Any = None, mask: Any = None, training: bool = False
    ) -> Any:
        """Return the output, and the last states with `return_state`.

        Args:
            inputs: an array of shape ``(batch, time, features)``.
            initial_state: the states before the first time step, an array or a list; None: zeros.
            mask: booleans of shape ``(batch, time)``; None: the mask of the input.
            training: whether to drop features.
        """
        states = initial_state if isinstance(initial_state, Sequence) else [initial_state]
        if initial_state is None:
            states = [None] * self.cell.states
        shape = inputs.shape[0], self.units
        if len(states) != self.cell.states or any(np.shape(s) not in ((), shape) for s in states):
            raise ValueError(
                f"{self.name}: initial_state has the shapes {[np.shape(s) for s in states]}, but "
                f"{self.cell.states} of shape {shape} are needed."
            )
        if not inputs.shape[1]:
            raise ValueError(f"{self.name}: the input has shape {inputs.shape}, without a step.")
        x = as_floats(inputs, self.kernel)
        kept = dropout_factors(x, (x.shape[0], 1, x.shape[2]), self.dropout) if training else None
        x = x if kept is None else x * kept
        if self.go_backwards:
            x, mask = x[:, ::-1], None if mask is None else mask[:, ::-1]
        weights = self.kernel, self.recurrent_kernel, self.bias
        states = [s if s is None else as_operand(s).astype(x.dtype) for s in states]
        mask = None if mask is None else as_operand(mask).astype(bool)
        y, *others = operations.recurrent(x, *weights, states, cell=self.cell, mask=mask)
        last = y[:, -1]
        output = y if self.return_sequences else last
        if mask is not None and self.return_sequences and self.zero_output_for_mask:
            output = y * mask[:, :, None].astype(y.dtype)
        return [output, last, *others] if self.return_state else output

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Return the mask of the input, if the outputs of all time steps are returned."""
        if mask is None or not self.return_sequences:
            return None
        return mask[:, ::-1] if self.go_backwards else mask


class LSTM(SimpleRNN):
    """A long short-term memory, whose gates say what its state keeps, takes in and shows.

    Source: Hochreiter and Schmidhuber, "Long Short-Term Memory", 1997.

    Args:
        units: the length of the output's last axis.
        activation: of the candidate and of the state: as for `SimpleRNN`.
        recurrent_activation: of the gates.
        use_bias: whether to add a bias.
        unit_forget_bias: whether the bias of the forget gate starts at 1.
        options: as for `SimpleRNN`. The states are the output and the cell's state.

    >>> y, h, c = LSTM(4, return_state=True)(np.zeros((2, 5, 3), np.float32))
    >>> y.shape, h.shape, c.shape
    ((2, 4), (2, 4), (2, 4))
    """

    _kind: ClassVar[type[operations.RecurrentCell]] = operations.LSTMCell

    def __init__(
        self,
        units: int,
        activation: str | Callable[[Any], Any] | None = "tanh",
        recurrent_activation: str | Callable[[Any], Any] | None = "sigmoid",
        use_bias: bool = True,
        *,
        unit_forget_bias: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(units, activation, use_bias, **options)
        self.cell = self._kind(self.cell.activation, activations.get(recurrent_activation))
        if unit_forget_bias and self._kind is operations.LSTMCell:
            self._bias_start = self._forgetting(self._bias_start)

    def _forgetting(self, start: Callable[..., Any]) -> Callable[..., Any]:
        def initial(shape: Any, dtype: Any) -> Any:
            bias = np.array(start(shape, dtype))
            bias[self.units : 2 * self.units] = 1
            return bias

        return initial


class GRU(LSTM):
    """A gated recurrent unit, whose gates say how much of its state to renew.

    Source: Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder", 2014.

    Args:
        units: the length of the output's last axis.
        activation: of the candidate: as for `SimpleRNN`.
        recurrent_activation: of the gates.
        use_bias: whether to add a bias.
        reset_after: whether the reset gate is applied to the product with the recurrent kernel,
            which has a bias of its own, or to the state before the product, which is slower.
        options: as for `SimpleRNN`.

    >>> GRU(4)(np.zeros((2, 5, 3), np.float32)).shape
    (2, 4)
    """

    def __init__(
        self,
        units: int,
        activation: str | Callable[[Any], Any] | None = "tanh",
        recurrent_activation: str | Callable[[Any], Any] | None = "sigmoid",
        use_bias: bool = True,
        *,
        reset_after: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(units, activation, recurrent_activation, use_bias, **options)
        self._bias_rows = (2,) if reset_after else ()
        if not reset_after:
            self.cell = operations.GRUResetBeforeCell(*vars(self.cell).values())

    _kind = operations.GRUCell


_MERGES: dict[str | None, Callable[[list[Any]], Any]] = {
    "concat": lambda both: np.concatenate(both, axis=-1),
    "sum": lambda both: both[0] + both[1],
    "ave": lambda both: (both[0] + both[1]) / 2,
    "mul": lambda both: both[0] * both[1],
    None: list,
}


class Bidirectional(Layer):
    """Two recurrent layers, of which the second one reads the sequence from its end.

    Args:
        layer: the first layer. Its outputs, and those of the second, are 0 where a mask leaves out
            time steps.
        merge_mode: how the outputs are joined: ``"concat"``, ``"sum"``, ``"ave"``, ``"mul"``, or
            None for a list of both.
        backward_layer: the second layer; None: one with the arguments of the first, whose
            `go_backwards` is the other.
        options: `name`, `trainable` and `dtype`, see `Layer`.

    Raises:
        ValueError: `merge_mode` is unknown, or the layers do not fit together.

    >>> Bidirectional(LSTM(4))(np.zeros((2, 5, 3), np.float32)).shape
    (2, 8)
    """

    def __init__(
        self,
        layer: Any,
        merge_mode: str | None = "concat",
        backward_layer: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if merge_mode not in _MERGES:
            raise ValueError(f"merge_mode must be one of {[*_MERGES]}, got {merge_mode!r}.")
        config = layer.get_config() | {"go_backwards": not layer.go_backwards, "name": None}
        self.forward_layer, self.merge_mode = layer, merge_mode
        self.backward_layer = type(layer)(**config) if backward_layer is None else backward_layer
        for name in ("return_sequences", "return_state"):
            if getattr(layer, name) != getattr(self.backward_layer, name):
                raise ValueError(f"Bidirectional: the two layers differ in {name}.")
        if layer.go_backwards == self.backward_layer.go_backwards:
            raise ValueError("Bidirectional: one of the two layers needs go_backwards=True.")
        for each in (layer, self.backward_layer):  # The last outputs are at different steps.
            each.zero_output_for_mask = layer.return_sequences

    def call(self, inputs: Any, initial_state: Any = None, mask: Any = None) -> Any:
        """Return the joined output; with `return_state`, a list with the states of both after it.

        Args:
            inputs: an array of shape ``(batch, time, features)``.
            initial_state: the states of the first layer, and then those of the second; None: zeros.
            mask: booleans of shape ``(batch, time)``; None: the mask of the input.
        """
        half = 0 if initial_state is None else len(initial_state) // 2
        starts = (initial_state[:half], initial_state[half:]) if half else (None, None)
        both = [
            each(inputs, initial_state=start, mask=mask)
            for each, start in zip((self.forward_layer, self.backward_layer), starts, strict=True)
        ]
        states = []
        if self.forward_layer.return_state:
            states = [state for results in both for state in results[1:]]
            both = [results[0] for results in both]
        if self.forward_layer.return_sequences:
            both[1] = both[1][:, ::-1]
        merged = _MERGES[self.merge_mode](both)
        joined = merged if isinstance(merged, list) else [merged]
        return [*joined, *states] if states else merged

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Return the mask of the input, if the outputs of all time steps are returned."""
        return mask if self.forward_layer.return_sequences else None


class TimeDistributed(Layer):
    """A layer that applies a layer to each time step of a sequence.

    Args:
        layer: the layer.
        options: `name`, `trainable` and `dtype`, see `Layer`.

    >>> from ndistribute.models.layers import Conv2D
    >>> TimeDistributed(Conv2D(2, 3))(np.zeros((4, 5, 8, 8, 1), np.float32)).shape
    (4, 5, 6, 6, 2)
    """

    supports_masking = True

    def __init__(self, layer: Layer, **options: Any) -> None:
        super().__init__(**options)
        self.layer = layer

    def call(self, inputs: Any) -> Any:
        """Return the outputs, of shape ``(batch, time, ...)``."""
        if len(inputs.shape) < 3:
            raise ValueError(
                f"{self.name}: the input has shape {inputs.shape}, but needs the axes (batch, "
                "time, ...)."
            )
        head = inputs.shape[:2]
        y = self.layer(inputs.reshape(math.prod(head), *inputs.shape[2:]))
        return y.reshape(*head, *y.shape[1:])


class Masking(Layer):
    """A layer that masks the time steps all of whose features have one value, and sets them to 0.

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
