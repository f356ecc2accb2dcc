"""Recurrent layers, and layers around a layer for sequences of shape ``(batch, time, ...)``.

A cell is a layer for one time step, and `RNN` calls it for each step. The cells of this file
compute all time steps as one operation, see `ndistribute.models.operations`. Where a mask is False,
the state does not change, so padding at the end of a sequence has no effect.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from ndistribute import tree
from ndistribute.autodiff.rules.placing import as_operand
from ndistribute.autodiff.rules.unbroadcast import zeros
from ndistribute.devices import as_array
from ndistribute.exports import export as _export
from ndistribute.mistakes import accepting
from ndistribute.models import activations, operations
from ndistribute.models.functional import cloned
from ndistribute.models.layers.arguments import (
    as_floats,
    dropout_factors,
    numbered,
    one_of,
    positive,
    rate_of,
)
from ndistribute.models.layers.layer import Layer
from ndistribute.models.masks import attach_mask, mask_of

_ignored = accepting("implementation", "unroll", "use_cudnn")
_Function = str | Callable[[Any], Any] | None


class SimpleRNNCell(Layer):
    """The time step of a `SimpleRNN`: ``activation(x @ kernel + h @ recurrent_kernel + bias)``.

    Args:
        units: the length of the output's last axis.
        activation: a name, a function, or None. ``"tanh"``, ``"sigmoid"``, ``"relu"`` and None are
            computed as one operation, which is faster than the many operations of others.
        use_bias: whether to add a bias.
        dropout: the share of the input's features to drop in training, the same in all time steps.
        recurrent_dropout: must be 0.
        options: `kernel_initializer`, `recurrent_initializer` and `bias_initializer`, and the same
            with `regularizer`, as for `Dense`; `name`, `trainable` and `dtype`, see `Layer`;
            `implementation`, `unroll` and `use_cudnn` have no effect.

    >>> h = np.zeros((2, 4), np.float32)
    >>> y, states = SimpleRNNCell(4)(np.ones((2, 3), np.float32), [h])
    >>> y.shape, len(states)
    ((2, 4), 1)
    """

    axes = "batch of one time step", "features"
    fixes_last_axis = True
    weights_of_kind: ClassVar = {
        "kernel": "glorot_uniform",
        "recurrent_kernel": "orthogonal",
        "bias": "zeros",
    }
    _bias_rows: tuple[int, ...] = ()

    @_ignored
    def __init__(
        self,
        units: int,
        activation: _Function = "tanh",
        use_bias: bool = True,
        *,
        dropout: float = 0.0,
        recurrent_dropout: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if recurrent_dropout:
            what = f"{self.name}: recurrent_dropout={recurrent_dropout}"
            raise ValueError(f"{what} is not supported: use dropout.")
        self.units = self.output_size = positive(units, f"{self.name}: units")
        self.step = operations.RecurrentStep(activations.get(activation))
        self.dropout, self._use_bias = rate_of(dropout, f"{self.name}: dropout"), use_bias

    @property
    def state_size(self) -> list[int]:
        """The length of each state."""
        return [self.units] * self.step.states

    def build(self, input_shape: Sequence[int]) -> None:
        """Create the kernels and the bias."""
        width = self.step.gates * self.units
        self.kernel = self.add_weight("kernel", (input_shape[-1], width))
        self.recurrent_kernel = self.add_weight("recurrent_kernel", (self.units, width))
        self.bias: Any = None
        if self._use_bias:
            self.bias = self.add_weight("bias", (*self._bias_rows, width))

    def call(self, inputs: Any, states: Any, training: bool = False) -> tuple[Any, Any]:
        """Return the output and the new states, an array or a list as the former ones are."""
        is_list = isinstance(states, Sequence)
        y, new = self.scan(inputs[:, None], states if is_list else [states], training=training)
        return y[:, 0], new if is_list else new[0]

    def scan(
        self, inputs: Any, states: Sequence[Any], mask: Any = None, training: bool = False
    ) -> tuple[Any, list[Any]]:
        """Return the outputs of all time steps, and the last states; None stands for zeros."""
        shape = inputs.shape[0], self.units
        if len(states) != self.step.states or any(np.shape(s) not in ((), shape) for s in states):
            raise ValueError(
                f"{self.name}: initial_state has the shapes {[np.shape(s) for s in states]}, but "
                f"{self.step.states} of shape {shape} are needed."
            )
        x = as_floats(inputs, self.kernel)
        kept = dropout_factors(x, (x.shape[0], 1, x.shape[2]), self.dropout) if training else None
        weights = x if kept is None else x * kept, self.kernel, self.recurrent_kernel, self.bias
        states = [s if s is None else as_operand(s).astype(x.dtype) for s in states]
        y, *others = operations.recurrent(*weights, *states, step=self.step, mask=mask)
        return y, [y[:, -1], *others]


class LSTMCell(SimpleRNNCell):
    """The time step of an `LSTM`, whose states are the output and the cell's state.

    Args:
        units: the length of the output's last axis.
        activation: of the candidate and of the state: as for `SimpleRNNCell`.
        recurrent_activation: of the gates.
        use_bias: whether to add a bias.
        unit_forget_bias: whether the bias of the forget gate starts at 1.
        reset_after: must be True; see `GRUCell`.
        options: as for `SimpleRNNCell`.
    """

    _kind: ClassVar[type[operations.RecurrentStep]] = operations.LSTMStep

    def __init__(
        self,
        units: int,
        activation: _Function = "tanh",
        recurrent_activation: _Function = "sigmoid",
        use_bias: bool = True,
        *,
        unit_forget_bias: bool = True,
        reset_after: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(units, activation, use_bias, **options)
        if not reset_after:
            raise ValueError(f"{self.name}: reset_after=False is not supported: leave it out.")
        self.step = self._kind(self.step.activation, activations.get(recurrent_activation))
        has_forget_gate = self._kind is operations.LSTMStep
        if not (unit_forget_bias or has_forget_gate):
            raise ValueError(f"{self.name}: unit_forget_bias is for LSTM: leave it out.")
        if unit_forget_bias and has_forget_gate:
            self._starts["bias"] = functools.partial(self._forgetting, self._starts["bias"])

    def _forgetting(self, start: Callable[..., Any], shape: Any, dtype: Any) -> Any:
        bias = np.array(start(shape, dtype))
        bias[self.units : 2 * self.units] = 1
        return bias


class GRUCell(LSTMCell):
    """The time step of a `GRU`.

    Args:
        units: the length of the output's last axis.
        activation: of the candidate: as for `SimpleRNNCell`.
        recurrent_activation: of the gates.
        use_bias: whether to add a bias.
        reset_after: must be True: the reset gate is applied to the product with the recurrent
            kernel, which has its own bias.
        options: as for `SimpleRNNCell`.
    """

    _kind = operations.GRUStep
    _bias_rows = (2,)


class RNN(Layer):
    """A layer that calls a cell for each time step.

    A cell is a layer. It is called on a time step and the list of the last states, and returns its
    output and the new states. It has a `state_size`, which is the length or the shape of the state,
    or a list of these. Instead it may have a method ``get_initial_state(batch_size=...)``.

    Args:
        cell: the cell.
        return_sequences: whether to return the outputs of all time steps, not only the last.
        return_state: whether to return the output and the last states, in a list.
        go_backwards: whether to start at the last time step; the outputs are in that order, too.
        stateful: must be False.
        zero_output_for_mask: whether the output of a time step that a mask leaves out is 0; if
            False, it is the output of the step before.
        options: `name`, `trainable` and `dtype`, see `Layer`; `unroll` changes nothing.

    Raises:
        ValueError: an argument is out of range, or asks for a feature that does not exist here.

    >>> class Sum(Layer):
    ...     state_size = 3
    ...
    ...     def call(self, inputs, states):
    ...         total = states[0] + inputs
    ...         return total, [total]
    >>> RNN(Sum(), return_sequences=True)(np.ones((1, 2, 3)))[0].tolist()
    [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]
    """

    fixes_last_axis = True

    @_ignored
    def __init__(
        self,
        cell: Any,
        return_sequences: bool = False,
        return_state: bool = False,
        go_backwards: bool = False,
        stateful: bool = False,
        zero_output_for_mask: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if stateful:
            raise ValueError(
                f"{self.name}: stateful=True is not supported: use return_state=True and pass "
                "initial_state to a call."
            )
        if not hasattr(cell, "state_size"):
            problem = f"{self.name}: a cell needs a state_size, but {cell!r} has none."
            raise ValueError(f"{problem} Put an RNN around each of several cells.")
        self.cell = cell
        self.return_sequences, self.return_state = bool(return_sequences), bool(return_state)
        self.go_backwards, self.zero_output_for_mask = bool(go_backwards), zero_output_for_mask

    def get_initial_state(self, inputs: Any) -> list[Any]:
        """Return the states before the first time step, for a batch of inputs or for its length."""
        like = np.zeros((inputs,), self.compute_dtype) if isinstance(inputs, int) else inputs
        cell, count = self.cell, like.shape[0]
        if hasattr(cell, "get_initial_state"):
            states = cell.get_initial_state(batch_size=count)
            return list(states) if isinstance(states, Sequence) else [states]
        sizes = cell.state_size if isinstance(cell.state_size, Sequence) else [cell.state_size]
        shapes = [(*size,) if isinstance(size, Sequence) else (size,) for size in sizes]
        dtype = getattr(cell, "compute_dtype", np.float32)
        return [zeros(as_array(like), (count, *shape), dtype) for shape in shapes]

    def build(self, input_shape: Any) -> None:
        """Create the variables of the cell."""
        is_nest = not all(length is None or isinstance(length, int) for length in input_shape)
        if not is_nest and len(input_shape) < 3:
            raise ValueError(
                f"{self.name}: the input has shape {tuple(input_shape)}, but a recurrent layer "
                "needs three axes, (batch, time, features). Write x[..., np.newaxis] for one "
                "feature."
            )
        if isinstance(self.cell, Layer) and not (self.cell.built or is_nest):
            self.cell.build((None, *input_shape[2:]))

    def call(
        self, inputs: Any, initial_state: Any = None, mask: Any = None, training: bool = False
    ) -> Any:
        """Return the output, and the last states with `return_state`.

        Args:
            inputs: an array of shape ``(batch, time, features)``, or a nest of them.
            initial_state: the states before the first time step, an array or a list; None: zeros.
            mask: booleans of shape ``(batch, time)``; None: the mask of the input.
            training: whether to drop features.
        """
        first = tree.flatten(inputs)[0]
        if not first.shape[1]:
            raise ValueError(f"{self.name}: the input of shape {first.shape} has no time step.")
        states = self.get_initial_state(first) if initial_state is None else initial_state
        states = states if isinstance(states, Sequence) else [states]
        mask = tree.flatten(mask)[0]  # Of the first input.
        mask = None if mask is None else as_operand(mask).astype(bool)
        if self.go_backwards:
            inputs = tree.map_leaves(lambda x: x[:, ::-1], inputs)
            mask = None if mask is None else mask[:, ::-1]
        y, states = _scan(self.cell, inputs, states, mask=mask, training=training)
        if not self.return_sequences:
            y = tree.map_leaves(lambda steps: steps[:, -1], y)
        elif mask is not None and self.zero_output_for_mask:
            y = tree.map_leaves(lambda steps: np.where(_like(mask, steps), steps, 0), y)
        return [y, *states] if self.return_state else y

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Return the mask of the input, if the outputs of all time steps are returned."""
        if mask is None or not self.return_sequences:
            return None
        return mask[:, ::-1] if self.go_backwards else mask


def _scan(
    cell: Any, inputs: Any, states: Any, *, mask: Any = None, training: bool = False
) -> tuple[Any, Any]:
    """Return the outputs of all time steps, and the last states, by `scan` or calls of a cell."""
    kinds = (kind for kind in type(cell).__mro__ if {"call", "scan"} & vars(kind).keys())
    if "scan" in vars(next(kinds, object)):  # Otherwise a subclass has its own `call`.
        return cell.scan(inputs, states, mask=mask, training=training)  # type: ignore[no-any-return]
    outputs: list[Any] = []
    for t in range(tree.flatten(inputs)[0].shape[1]):
        y, new = cell(tree.map_leaves(lambda x, t=t: x[:, t], inputs), states)
        new = list(new) if isinstance(new, Sequence) else [new]
        if mask is not None:
            last = outputs[-1] if outputs else tree.map_leaves(np.zeros_like, y)
            y, new = tree.map_leaves(
                lambda a, b, t=t: np.where(_like(mask[:, t], a), a, b), (y, new), (last, states)
            )
        outputs.append(y)
        states = new
    return tree.map_leaves(lambda *steps: np.stack(steps, axis=1), *outputs), states


def _like(mask: Any, array: Any) -> Any:
    """Return a mask with as many axes as an array."""
    return mask.reshape(*mask.shape, *(1,) * (array.ndim - mask.ndim))


def _around(kind: Any) -> Any:
    """Return the constructor of a layer around a cell, which gets what `RNN` does not take."""

    @functools.wraps(kind.__init__)
    def init(self: Any, *args: Any, **options: Any) -> None:
        options["name"] = options.get("name") or numbered(type(self).__name__)
        of_cell = {name: options[name] for name in options if name not in _OF_LAYER - _OF_BOTH}
        of_layer = {name: options[name] for name in options if name in _OF_LAYER}
        RNN.__init__(self, kind(*args, **of_cell), **of_layer)

    return init


_OF_LAYER = {name for kind in (RNN, Layer) for name in inspect.signature(kind.__init__).parameters}
_OF_BOTH = {"name", "trainable", "dtype"}


class SimpleRNN(RNN):
    """A layer that computes ``h = activation(x @ kernel + h @ recurrent_kernel + bias)`` in turn.

    Args:
        units: the length of the output's last axis.
        activation: as for `SimpleRNNCell`.
        use_bias: whether to add a bias.
        options: as for `SimpleRNNCell` and `RNN`.

    >>> layer = SimpleRNN(4, return_sequences=True)
    >>> layer(np.zeros((2, 5, 3), np.float32)).shape, layer.cell.recurrent_kernel.shape
    ((2, 5, 4), (4, 4))
    """

    __init__ = _around(SimpleRNNCell)


class LSTM(RNN):
    """A long short-term memory, whose gates control what its state keeps, takes in and outputs.

    Source: Hochreiter and Schmidhuber, "Long Short-Term Memory", 1997.

    Args:
        units: the length of the output's last axis.
        activation: as for `LSTMCell`.
        recurrent_activation: of the gates.
        use_bias: whether to add a bias.
        options: as for `LSTMCell` and `RNN`. The states are the output and the cell's state.

    >>> y, h, c = LSTM(4, return_state=True)(np.zeros((2, 5, 3), np.float32))
    >>> y.shape, h.shape, c.shape
    ((2, 4), (2, 4), (2, 4))
    """

    __init__ = _around(LSTMCell)


class GRU(RNN):
    """A gated recurrent unit, whose gates control how much of its state is replaced.

    Its arguments are those of `GRUCell` and `RNN`. Source: Cho et al., "Learning Phrase
    Representations using RNN Encoder-Decoder", 2014.

    >>> GRU(4)(np.zeros((2, 5, 3), np.float32)).shape
    (2, 4)
    """

    __init__ = _around(GRUCell)


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
        layer: the first layer; the second layer has the same arguments, except `go_backwards`. The
            outputs of both are 0 where a mask leaves out time steps.
        merge_mode: how the outputs are joined: ``"concat"``, ``"sum"``, ``"ave"``, ``"mul"``, or
            None for a list of both.
        options: `name`, `trainable` and `dtype`, see `Layer`.

    Raises:
        ValueError: `merge_mode` is unknown.

    >>> Bidirectional(LSTM(4))(np.zeros((2, 5, 3), np.float32)).shape
    (2, 8)
    """

    def __init__(self, layer: Any, merge_mode: str | None = "concat", **options: Any) -> None:
        super().__init__(**options)
        self.merge_mode = one_of(merge_mode, "Bidirectional: merge_mode", _MERGES)
        config = layer.get_config() | {"go_backwards": not layer.go_backwards, "name": None}
        self.forward_layer = layer
        self.backward_layer = type(layer).from_config(cloned(config, {}))
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
        results = [
            tree.flatten(each(inputs, initial_state=start, mask=mask))
            for each, start in zip((self.forward_layer, self.backward_layer), starts, strict=True)
        ]
        (first, *states), (second, *others) = results
        second = second[:, ::-1] if self.forward_layer.return_sequences else second
        merged = _MERGES[self.merge_mode]([first, second])
        joined = merged if isinstance(merged, list) else [merged]
        return [*joined, *states, *others] if states else merged

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Return the mask of the input, if the outputs of all time steps are returned."""
        if mask is None or not self.forward_layer.return_sequences:
            return None
        return mask if self.merge_mode else [mask, mask]


class TimeDistributed(Layer):
    """A layer that applies a layer to each time step of a sequence.

    If the mask has more than two axes, the layer gets the part of the mask inside the time steps.

    Args:
        layer: the layer.
        options: `name`, `trainable` and `dtype`, see `Layer`.

    >>> from ndistribute.models.layers import Conv2D
    >>> TimeDistributed(Conv2D(2, 3))(np.zeros((4, 5, 8, 8, 1), np.float32)).shape
    (4, 5, 6, 6, 2)
    """

    def __init__(self, layer: Layer, **options: Any) -> None:
        super().__init__(**options)
        self.layer = layer

    def call(self, inputs: Any, mask: Any = None) -> Any:
        """Return the outputs, of shape ``(batch, time, ...)``."""
        if len(inputs.shape) < 3:
            raise ValueError(
                f"{self.name}: the input has shape {inputs.shape}, but needs the axes (batch, "
                "time, ...)."
            )
        head = inputs.shape[:2]
        x = inputs.reshape(math.prod(head), *inputs.shape[2:])
        if mask is not None and mask.ndim > 2:
            attach_mask(x, mask.reshape(len(x), *mask.shape[2:]))
        y = self.layer(x)
        inner = mask_of(y)
        y = y.reshape(*head, *y.shape[1:])
        attach_mask(y, None if inner is None else inner.reshape(*head, *inner.shape[1:]))
        return y

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Return the mask of the time steps: those in which something counts."""
        return mask if mask is None or mask.ndim < 3 else mask.any(axis=tuple(range(2, mask.ndim)))


_export(vars())
