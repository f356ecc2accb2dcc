"""Recurrent layers as one operation: a forward loop over time, and a backward loop.

A time step computes one product of all weights with the input and the last output. The gates of all
steps are kept for the way back. A `RecurrentStep` is the arithmetic of one step: `plain` in NumPy's
functions, for second derivatives, other activations and compiled steps; `forward` and `backward` on
the buffers of a `RecurrentRun`.

Sources: Hochreiter and Schmidhuber, "Long Short-Term Memory", 1997; Cho et al., "Learning Phrase
Representations using RNN Encoder-Decoder", 2014.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ndistribute.autodiff.custom import fused
from ndistribute.autodiff.rules.placing import as_operand, is_tracked
from ndistribute.autodiff.rules.unbroadcast import zeros
from ndistribute.devices import Array, array_namespace, as_array, jax_module
from ndistribute.exports import export as _export
from ndistribute.models.activations import InPlace, linear
from ndistribute.models.operations.images import differentiated
from ndistribute.models.operations.rows import in_place, operands, wide

Order = tuple[tuple[int | None, int | None], ...]
# The size limit of the gradients of some steps: half of the cache of a core.
_CHANGE_BYTES = 1 << 20
_LINEAR = InPlace(lambda y: None, lambda g, y, out=None: np.positive(g, out=out), lambda x: x)


@dataclass(frozen=True)
class RecurrentStep:
    """The step of a simple recurrent layer, and the base class of the others."""

    activation: Callable[[Any], Any]
    recurrent_activation: Callable[[Any], Any] = linear
    gates: ClassVar[int] = 1
    states: ClassVar[int] = 1
    order: ClassVar[Order] = ((0, 0),)
    """For each block of a step's product, its gate in both kernels; None: in the other."""

    def rules(self) -> list[InPlace | None]:
        """Return the rules in place of both activations, None where there is none."""
        used = self.activation, self.recurrent_activation
        return [_LINEAR if each is linear else in_place(each)[0] for each in used]

    def plain(self, z: Any, states: Any, recurrent: Any, bias: Any) -> tuple[Any, ...]:
        """Return the new states from the input's part of the gates and the last states."""
        return (self.activation(z + states[0] @ recurrent),)

    def forward(self, run: RecurrentRun, t: int, z: Array, h: Array) -> None:
        """Write the output of a step, from the product, which becomes the gates."""
        run.act.apply(z)
        h[...] = z

    def backward(self, run: RecurrentRun, t: int, d: Array, dh: Array, dc: Array) -> Any:
        """Write the gradient of the product, from those of the output and of the cell's state.

        Returns the other part of the last output's gradient. The gradient of the cell changes in
        place.
        """
        run.act.before(dh, run.gates[t], out=d)
        return None


class LSTMStep(RecurrentStep):
    """The step of an LSTM, whose product has the blocks: input, forget, output, candidate."""

    gates = 4
    states = 2
    order = ((0, 0), (1, 1), (3, 3), (2, 2))

    def plain(self, z: Any, states: Any, recurrent: Any, bias: Any) -> tuple[Any, ...]:
        (h, c), gate = states, self.recurrent_activation
        i, f, g, o = _blocks((z + h @ recurrent).T, 4)
        new = gate(f.T) * c + gate(i.T) * self.activation(g.T)
        return gate(o.T) * self.activation(new), new

    def forward(self, run: RecurrentRun, t: int, z: Array, h: Array) -> None:
        n = 3 * run.units
        run.gate.apply(z[:n])
        run.act.apply(z[n:])
        i, f, o, g = _blocks(z, 4)
        c, bent = run.cells[t + 1], run.memo[t]
        np.multiply(f, run.cells[t], out=c)
        c += np.multiply(i, g, out=bent)
        bent[...] = c
        run.act.apply(bent)
        np.multiply(o, bent, out=h)

    def backward(self, run: RecurrentRun, t: int, d: Array, dh: Array, dc: Array) -> Any:
        z, n = run.gates[t], 3 * run.units
        i, f, o, g = _blocks(z, 4)
        di, df, do, dg = _blocks(d, 4)
        np.multiply(dh, o, out=do)
        dc += run.act.before(do, run.memo[t])
        np.multiply(dc, g, out=di)
        np.multiply(dc, run.cells[t], out=df)
        np.multiply(dh, run.memo[t], out=do)
        np.multiply(dc, i, out=dg)
        run.gate.before(d[:n], z[:n], out=d[:n])
        run.act.before(dg, g, out=dg)
        dc *= f
        return None


class GRUStep(RecurrentStep):
    """The step of a GRU, whose product has the blocks: update, reset, candidate of both parts."""

    gates = 3
    order = ((0, 0), (1, 1), (2, None), (None, 2))

    def plain(self, z: Any, states: Any, recurrent: Any, bias: Any) -> tuple[Any, ...]:
        (h,), n = states, 2 * recurrent.shape[0]
        m = h @ recurrent if bias is None else h @ recurrent + bias[1]
        both = self.recurrent_activation(z[:, :n] + m[:, :n])
        u, r = both[:, : n // 2], both[:, n // 2 :]
        g = self.activation(z[:, n:] + r * m[:, n:])
        return (u * h + (1 - u) * g,)

    def forward(self, run: RecurrentRun, t: int, z: Array, h: Array) -> None:
        run.gate.apply(z[: 2 * run.units])
        u, r, g, m = _blocks(z, 4)
        g += r * m
        run.act.apply(g)
        np.subtract(run.outputs[t], g, out=h)
        h *= u
        h += g

    def backward(self, run: RecurrentRun, t: int, d: Array, dh: Array, dc: Array) -> Any:
        z, n = run.gates[t], 2 * run.units
        u, r, g, m = _blocks(z, 4)
        du, dr, dg, dm = _blocks(d, 4)
        np.multiply(dh, run.outputs[t] - g, out=du)
        kept = dh * u
        run.act.before(dh - kept, g, out=dg)
        np.multiply(dg, m, out=dr)
        np.multiply(dg, r, out=dm)
        run.gate.before(d[:n], z[:n], out=d[:n])
        return kept


class RecurrentRun:
    """The buffers of a recurrent layer, with the batch on the last axis.

    So each gate is contiguous. A step multiplies all weights by a column of the features, 1 for the
    bias and the last output for each example; the gradient of all weights is one product.
    """

    def __init__(self, x: Array, weights: Sequence[Any], initial: Any, mask: Any, step: Any):
        self.xp, self.step, self.shapes = array_namespace(x), step, [np.shape(w) for w in weights]
        self.act, self.gate = (rule or _LINEAR for rule in step.rules())
        batch, steps, self.features = x.shape
        self.units, blocks = len(weights[1]), len(step.order)
        width = self.features + 1 + self.units

        def empty(*shape: int) -> Array:
            return self.xp.empty(shape, x.dtype)

        self.inputs = empty(steps + 1, width, batch)
        self.inputs[:steps, : self.features] = x.transpose(1, 2, 0)
        self.inputs[:, self.features] = 1
        self.outputs = self.inputs[:, -self.units :]
        self.gates = empty(steps, blocks * self.units, batch)
        has_cells = step.states == 2  # And the activations of their new values.
        self.memo = empty(steps * has_cells, self.units, batch)
        self.cells = empty((steps + 1) * has_cells, self.units, batch)
        for place, first in zip((self.outputs[0], *self.cells[:1]), initial, strict=True):
            place[...] = 0 if first is None else first.T
        self.weights = self.xp.zeros((width, blocks * self.units), x.dtype)
        self._copy(self.weights, weights, lambda ours, theirs: ours.__iadd__(theirs))
        self.counts = None if mask is None else mask.T
        self.results = [empty(batch, steps, self.units), *(each.T for each in self.cells[-1:])]
        for t in range(steps):
            self.xp.matmul(self.weights.T, self.inputs[t], out=self.gates[t])
            step.forward(self, t, self.gates[t], self.outputs[t + 1])
            if self.counts is not None:
                for states in (self.outputs, self.cells)[: step.states]:
                    states[t + 1] = self.xp.where(self.counts[t], states[t + 1], states[t])
            self.results[0][:, t] = self.outputs[t + 1].T

    def gradients(self, of_steps: Any, of_cell: Any, wants_x: bool) -> list[Any]:
        """Return the gradients of the input, the weights and the first states."""
        xp, (steps, width, batch) = self.xp, self.gates.shape
        dh, dc = xp.zeros((2, self.units, batch), self.gates.dtype)
        if of_cell is not None:
            dc += of_cell.T
        total = xp.zeros_like(self.weights)
        of_x = xp.empty((batch, steps, self.features), dh.dtype) if wants_x else None
        # The gradients of some steps stay in the cache until their product is added.
        count = max(1, _CHANGE_BYTES // max(1, self.gates[0].nbytes))
        for stop in range(steps, 0, -count):
            start = max(0, stop - count)
            change = xp.empty((stop - start, width, batch), dh.dtype)
            for t in range(stop - 1, start - 1, -1):
                if of_steps is not None:
                    dh += of_steps[:, t].T
                dh, dc = self._step_back(t, change[t - start], dh, dc)
            rows = change.transpose(1, 0, 2).reshape(width, -1)
            inputs = self.inputs[start:stop].transpose(1, 0, 2).reshape(len(total), -1)
            total += inputs @ rows.T
            if of_x is not None:
                part = self.weights[: self.features] @ rows
                of_x[:, start:stop] = part.reshape(self.features, stop - start, batch).transpose(
                    2, 1, 0
                )
        parts: list[Any] = [
            None if shape == () else xp.empty(shape, dh.dtype) for shape in self.shapes
        ]
        self._copy(total, parts, lambda ours, theirs: theirs.__setitem__(..., ours))
        return [of_x, *parts, *[dh.T, dc.T][: self.step.states]]

    def _step_back(self, t: int, d: Array, dh: Array, dc: Array) -> tuple[Array, Array]:
        """Write the gradient of a step's product, and return those of the last states."""
        passed: Any = None
        if self.counts is not None:
            passed = [self.xp.where(self.counts[t], 0, each) for each in (dh, dc)]
            dh, dc = dh - passed[0], dc - passed[1]
        more = self.step.backward(self, t, d, dh, dc)
        dh = self.weights[-self.units :] @ d
        if more is not None:
            dh += more
        return (dh, dc) if passed is None else (dh + passed[0], dc + passed[1])

    def _copy(self, packed: Array, weights: Sequence[Any], copy: Callable[..., Any]) -> None:
        """Copy between the weights of a step's product, by blocks of columns, and a layer's."""
        n, k = self.units, self.features
        kernel, recurrent, bias = weights
        biases = [None, None] if bias is None else [*bias] if bias.ndim == 2 else [bias, None]
        for column, places in enumerate(self.step.order):
            block = packed[:, column * n : (column + 1) * n]
            sides = (block[:k], kernel), (block[-n:], recurrent)
            for place, (part, weight), vector in zip(places, sides, biases, strict=True):
                if place is not None:
                    columns = slice(place * n, (place + 1) * n)
                    copy(part, weight[:, columns])
                    if vector is not None:
                        copy(block[k], vector[columns])


def _plain(x: Any, *weights: Any, step: RecurrentStep, mask: Any, **_: Any) -> list[Any]:
    kernel, recurrent, bias, *states = weights
    z = _of_inputs(x, kernel, bias)
    shape = x.shape[0], recurrent.shape[0]
    states = [zeros(z, shape) if first is None else first for first in states]
    outputs = []
    for t in range(x.shape[1]):
        counts = None if mask is None else mask[:, t, None]
        states = _next(step, counts, z[:, t], states, recurrent, bias)
        outputs.append(states[0])
    return [np.stack(outputs, axis=1), *states[1:]]


def _of_inputs(x: Any, kernel: Any, bias: Any) -> Any:
    """Return the part of the gates that no state changes."""
    return x @ kernel if bias is None else x @ kernel + (bias[0] if bias.ndim == 2 else bias)


def _next(step: RecurrentStep, counts: Any, z: Any, states: Any, *weights: Any) -> list[Any]:
    new = step.plain(z, states, *weights)
    if counts is None:
        return list(new)
    return [np.where(counts, each, last) for each, last in zip(new, states, strict=True)]


@fused(_plain)
def _run(x: Any, kernel: Any, *others: Any, step: RecurrentStep, mask: Any, wants_x: bool) -> Any:
    if hasattr(kernel, "on_device"):
        scan = functools.partial(_scan_of_jax, type(kernel), step, mask)
        return differentiated(scan, x, kernel, *others)
    dtype, x, kernel = operands(as_array(x), as_array(kernel))
    rest = [None if array is None else wide(as_array(array)) for array in others]
    run = RecurrentRun(x, (kernel, *rest[:2]), rest[2:], mask, step)

    def joint(g: Any) -> list[Any]:
        gradients = run.gradients(g[0], g[1] if len(g) > 1 else None, wants_x)
        arguments = zip((x, kernel, *rest), gradients, strict=True)
        return [None if argument is None else change for argument, change in arguments]

    return [result.astype(dtype, copy=False) for result in run.results], joint


def _scan_of_jax(box: Any, step: RecurrentStep, mask: Any, x: Any, *weights: Any) -> list[Any]:
    """Return the results in a compiled step, whose loop is one of XLA."""
    (kernel, recurrent, bias, *initial), jax = weights, jax_module()
    boxed = functools.partial(jax.tree.map, box)

    def body(states: Any, now: Any) -> Any:
        z, counts = boxed(now)
        new = _next(step, counts, z, boxed(states), boxed(recurrent), boxed(bias))
        values = [each.value for each in new]
        return values, values[0]

    z = jax.numpy.swapaxes(_of_inputs(x, kernel, bias), 0, 1)
    zero = jax.numpy.zeros((x.shape[0], recurrent.shape[0]), z.dtype)
    first = [zero if each is None else each for each in initial]
    counts = None if mask is None else getattr(mask, "value", mask).T[..., None]
    states, outputs = jax.lax.scan(body, first, (z, counts))
    return [jax.numpy.swapaxes(outputs, 0, 1), *states[1:]]


def recurrent(*arguments: Any, step: RecurrentStep, mask: Any) -> list[Any]:
    """Return the output of each time step, and the last states other than the output.

    Args:
        arguments: an array of shape ``(batch, time, features)``; the weights of the features, with
            all gates on the last axis; those of the output of the step before; a bias, or two in
            rows, for the features and for the output, or None; and the states before the first
            step, None for zeros.
        step: the arithmetic of a time step.
        mask: booleans of shape ``(batch, time)``; where they are False, the states stay.
    """
    x, kernel, *_ = arguments
    options: Any = {"step": step, "mask": mask, "wants_x": is_tracked(as_operand(x))}
    is_one = None not in step.rules() or hasattr(as_array(kernel), "on_device")
    return (_run if is_one else _plain)(*arguments, **options)


def _blocks(rows: Any, count: int) -> list[Any]:
    """Return equal blocks of rows."""
    n = rows.shape[0] // count
    return [rows[k * n : (k + 1) * n] for k in range(count)]


_export(vars(), but="RecurrentRun")
