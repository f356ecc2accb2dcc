"""Recurrent layers as one operation: a loop over time forward, and one back.

The products with the inputs of all time steps are one product of matrices, and so are the gradients
of the weights; a time step computes one product with the state. The gates of all steps are kept for
the way back. A `RecurrentCell` is the arithmetic of one step: `plain` in NumPy's functions, for second
derivatives, for activations without a rule in place and for compiled steps; `forward` and
`backward` on the buffers of a `Run`.

Sources: Hochreiter and Schmidhuber, "Long Short-Term Memory", 1997; Cho et al., "Learning Phrase
Representations using RNN Encoder-Decoder", 2014.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ndistribute.autodiff.custom import fused
from ndistribute.autodiff.rules.placing import as_operand, is_tracked
from ndistribute.autodiff.rules.unbroadcast import zeros
from ndistribute.devices import Array, array_namespace, as_array, jax_module
from ndistribute.models.activations import InPlace, linear
from ndistribute.models.operations.rows import column_sums, in_place, operands, wide

_LINEAR = InPlace(lambda y: None, lambda g, y: g, lambda x: x)


@dataclass(frozen=True)
class RecurrentCell:
    """The step of a simple recurrent layer, and the base class of the others."""

    activation: Callable[[Any], Any]
    recurrent_activation: Callable[[Any], Any] = linear
    gates: ClassVar[int] = 1
    states: ClassVar[int] = 1

    def rules(self) -> list[InPlace | None]:
        """Return the rules in place of both activations, None where there is none."""
        used = self.activation, self.recurrent_activation
        return [_LINEAR if each is linear else in_place(each)[0] for each in used]

    def plain(self, z: Any, states: Any, recurrent: Any, bias: Any) -> tuple[Any, ...]:
        """Return the new states from the input's part of the gates and the last states."""
        return (self.activation(z + states[0] @ recurrent),)

    def forward(self, run: Run, t: int) -> None:
        """Compute the gates and the new states of a step."""
        z = run.with_state(t)
        run.act.apply(z)
        run.states[0][t + 1] = z

    def backward(self, run: Run, t: int, changes: list[Array]) -> list[Array]:
        """Return the gradients of the last states from those of the new ones."""
        run.change[t] = run.act.before(changes[0], run.z[t])
        return [run.change[t] @ run.recurrent.T]

    def of_recurrent(self, run: Run) -> Array:
        """Return the gradient of the recurrent kernel."""
        return _product(run.states[0][:-1], run.change)


class LSTMCell(RecurrentCell):
    """The step of an LSTM: input gate, forget gate, candidate, output gate."""

    gates = 4
    states = 2

    def plain(self, z: Any, states: Any, recurrent: Any, bias: Any) -> tuple[Any, ...]:
        h, c = states
        i, f, g, o = _parts(z + h @ recurrent, 4)
        gate = self.recurrent_activation
        c = gate(f) * c + gate(i) * self.activation(g)
        return gate(o) * self.activation(c), c

    def forward(self, run: Run, t: int) -> None:
        z, n = run.with_state(t), run.units
        run.gate.apply(z[:, : 2 * n])
        run.act.apply(z[:, 2 * n : 3 * n])
        run.gate.apply(z[:, 3 * n :])
        i, f, g, o = _parts(z, 4)
        h, c = (states[t + 1] for states in run.states)
        np.multiply(f, run.states[1][t], out=c)
        c += np.multiply(i, g, out=h)
        bent = run.memo[t]
        bent[...] = c
        run.act.apply(bent)
        np.multiply(o, bent, out=h)

    def backward(self, run: Run, t: int, changes: list[Array]) -> list[Array]:
        (dh, dc), z, d, n = changes, run.z[t], run.change[t], run.units
        i, f, g, o = _parts(z, 4)
        di, df, dg, do = _parts(d, 4)
        dc += run.act.before(dh * o, run.memo[t])
        for out, x, y in ((di, dc, g), (df, dc, run.states[1][t]), (dg, dc, i)):
            np.multiply(x, y, out=out)
        np.multiply(dh, run.memo[t], out=do)
        d[:, : 2 * n] = run.gate.before(d[:, : 2 * n], z[:, : 2 * n])
        dg[...] = run.act.before(dg, g)
        do[...] = run.gate.before(do, o)
        dc *= f
        return [d @ run.recurrent.T, dc]


class GRUCell(RecurrentCell):
    """The step of a GRU that resets the state before its product: update, reset, candidate."""

    gates = 3

    def plain(self, z: Any, states: Any, recurrent: Any, bias: Any) -> tuple[Any, ...]:
        (h,), n = states, recurrent.shape[0]
        gates = self.recurrent_activation(z[:, : 2 * n] + h @ recurrent[:, : 2 * n])
        u, r = _parts(gates, 2)
        g = self.activation(z[:, 2 * n :] + (r * h) @ recurrent[:, 2 * n :])
        return (u * h + (1 - u) * g,)

    def forward(self, run: Run, t: int) -> None:
        z, h, n = run.z[t], run.states[0][t], run.units
        z[:, : 2 * n] += h @ run.recurrent[:, : 2 * n]
        run.gate.apply(z[:, : 2 * n])
        u, r, g = _parts(z, 3)
        g += np.multiply(r, h, out=run.memo[t]) @ run.recurrent[:, 2 * n :]
        self._finish(run, t, h, u, g)

    def backward(self, run: Run, t: int, changes: list[Array]) -> list[Array]:
        (dh,), d, h, n = changes, run.change[t], run.states[0][t], run.units
        u, r, dg = self._candidate(run, t, dh)
        reset = dg @ run.recurrent[:, 2 * n :].T
        np.multiply(reset, h, out=d[:, n : 2 * n])
        d[:, : 2 * n] = run.gate.before(d[:, : 2 * n], run.z[t][:, : 2 * n])
        return [dh * u + reset * r + d[:, : 2 * n] @ run.recurrent[:, : 2 * n].T]

    def of_recurrent(self, run: Run) -> Array:
        n, total = 2 * run.units, run.xp.empty(run.recurrent.shape, run.recurrent.dtype)
        total[:, :n] = _product(run.states[0][:-1], run.change[..., :n])
        total[:, n:] = _product(run.memo, run.change[..., n:])
        return total

    def _finish(self, run: Run, t: int, h: Array, u: Array, g: Array) -> None:
        run.act.apply(g)
        new = run.states[0][t + 1]
        np.subtract(h, g, out=new)
        new *= u
        new += g

    def _candidate(self, run: Run, t: int, dh: Array) -> tuple[Array, Array, Array]:
        """Write the gradients of the update gate's activation and of the candidate."""
        u, r, g = _parts(run.z[t], 3)
        du, _, dg = _parts(run.change[t], 3)
        np.multiply(dh, run.states[0][t] - g, out=du)
        dg[...] = run.act.before(dh - dh * u, g)
        return u, r, dg


class GRUResetAfterCell(GRUCell):
    """The step of a GRU that resets the product with the state, which has a bias of its own."""

    def plain(self, z: Any, states: Any, recurrent: Any, bias: Any) -> tuple[Any, ...]:
        (h,), n = states, recurrent.shape[0]
        m = h @ recurrent if bias is None else h @ recurrent + bias[1]
        u, r = _parts(self.recurrent_activation(z[:, : 2 * n] + m[:, : 2 * n]), 2)
        g = self.activation(z[:, 2 * n :] + r * m[:, 2 * n :])
        return (u * h + (1 - u) * g,)

    def forward(self, run: Run, t: int) -> None:
        z, h, n = run.z[t], run.states[0][t], run.units
        m = h @ run.recurrent
        if run.bias is not None:
            m += run.bias[1]
        z[:, : 2 * n] += m[:, : 2 * n]
        run.gate.apply(z[:, : 2 * n])
        u, r, g = _parts(z, 3)
        run.memo[t] = m[:, 2 * n :]
        g += r * run.memo[t]
        self._finish(run, t, h, u, g)

    def backward(self, run: Run, t: int, changes: list[Array]) -> list[Array]:
        (dh,), d, n = changes, run.change[t], run.units
        u, r, dg = self._candidate(run, t, dh)
        np.multiply(dg, run.memo[t], out=d[:, n : 2 * n])
        d[:, : 2 * n] = run.gate.before(d[:, : 2 * n], run.z[t][:, : 2 * n])
        inner = run.inner[t]
        inner[:, : 2 * n] = d[:, : 2 * n]
        np.multiply(dg, r, out=inner[:, 2 * n :])
        return [dh * u + inner @ run.recurrent.T]

    def of_recurrent(self, run: Run) -> Array:
        return _product(run.states[0][:-1], run.inner)


class Run:
    """The buffers of a recurrent layer: the time comes first, and states have one step more."""

    def __init__(self, x: Array, weights: Sequence[Any], initial: Any, mask: Any, cell: RecurrentCell):
        kernel, self.recurrent, self.bias = weights
        self.xp, self.cell, self.units = array_namespace(x, kernel), cell, len(self.recurrent)
        self.act, self.gate = (rule or _LINEAR for rule in cell.rules())
        self.x, self.kernel = self.xp.ascontiguousarray(x.transpose(1, 0, 2)), kernel
        steps, batch, features = self.x.shape
        self.z = (self.x.reshape(-1, features) @ kernel).reshape(steps, batch, kernel.shape[1])
        if self.bias is not None:
            self.z += self.bias[0] if self.bias.ndim == 2 else self.bias
        self.memo = self.xp.empty((steps, batch, self.units), x.dtype)
        self.states = [self.xp.empty((steps + 1, batch, self.units), x.dtype) for _ in initial]
        for states, first in zip(self.states, initial, strict=True):
            states[0] = 0 if first is None else first
        self.counts = None if mask is None else mask.T[..., None]
        for t in range(steps):
            cell.forward(self, t)
            if self.counts is not None:
                for states in self.states:
                    states[t + 1] = self.xp.where(self.counts[t], states[t + 1], states[t])

    def with_state(self, t: int) -> Array:
        """Return the gates of a step before their activations."""
        z: Array = self.z[t]
        z += self.states[0][t] @ self.recurrent
        return z

    def gradients(self, of_steps: Any, of_last: Any, wants_x: bool) -> list[Any]:
        """Return the gradients of the input, the weights and the first states."""
        self.change = self.xp.empty_like(self.z)
        apart = isinstance(self.cell, GRUResetAfterCell)
        self.inner = self.xp.empty_like(self.z) if apart else self.change
        changes = [self.xp.zeros(states.shape[1:], states.dtype) for states in self.states]
        if of_last is not None:
            changes[-1] += of_last
        for t in range(len(self.z) - 1, -1, -1):
            if of_steps is not None:
                changes[0] += of_steps[:, t]
            if self.counts is None:
                changes = self.cell.backward(self, t, changes)
                continue
            counted = [change * self.counts[t] for change in changes]
            passed = [change - part for change, part in zip(changes, counted, strict=True)]
            computed = self.cell.backward(self, t, counted)
            changes = [part + rest for part, rest in zip(computed, passed, strict=True)]
        rows = self.change.reshape(-1, self.change.shape[-1])
        of_x = None
        if wants_x:
            of_x = (rows @ self.kernel.T).reshape(self.x.shape).transpose(1, 0, 2)
        of_bias = column_sums(rows)
        if self.bias is not None and self.bias.ndim == 2:
            of_bias = self.xp.stack([of_bias, column_sums(self.inner.reshape(rows.shape))])
        of_recurrent = self.cell.of_recurrent(self)
        return [of_x, _product(self.x, self.change), of_recurrent, of_bias, *changes]


def _plain(
    x: Any, kernel: Any, recurrent: Any, bias: Any, *initial: Any, cell: RecurrentCell, mask: Any, **_: Any
) -> list[Any]:
    z = x @ kernel
    if bias is not None:
        z = z + (bias[0] if bias.ndim == 2 else bias)
    shape = x.shape[0], recurrent.shape[0]
    states = [zeros(z, shape) if first is None else first for first in initial]
    outputs = []
    for t in range(x.shape[1]):
        counts = None if mask is None else mask[:, t, None]
        states = _next(cell, z[:, t], states, recurrent, bias, counts)
        outputs.append(states[0])
    return [np.stack(outputs, axis=1), *states[1:]]


def _next(cell: RecurrentCell, z: Any, states: Any, recurrent: Any, bias: Any, counts: Any) -> list[Any]:
    new = cell.plain(z, states, recurrent, bias)
    if counts is None:
        return list(new)
    return [np.where(counts, each, last) for each, last in zip(new, states, strict=True)]


@fused(lambda *args, **options: _plain(*args, **options)[0])
def _run(
    x: Any,
    kernel: Any,
    recurrent: Any,
    bias: Any,
    *initial: Any,
    cell: RecurrentCell,
    mask: Any,
    wants_x: bool,
) -> Any:
    if hasattr(kernel, "on_device"):
        return _run_of_jax((x, kernel, recurrent, bias, *initial), cell, mask)
    dtype, x, kernel = operands(as_array(x), as_array(kernel))
    others = [None if a is None else wide(as_array(a)) for a in (recurrent, bias, *initial)]
    run = Run(x, (kernel, *others[:2]), others[2:], mask, cell)

    def joint(g: Any) -> list[Any]:
        of_last = g[1] if len(g) > 1 else None
        gradients = run.gradients(g[0], of_last, wants_x)
        return [None if a is None else d for a, d in zip((x, kernel, *others), gradients)]

    results = [run.states[0][1:].transpose(1, 0, 2), *(states[-1] for states in run.states[1:])]
    return [result.astype(dtype, copy=False) for result in results], joint


def _run_of_jax(arguments: Sequence[Any], cell: RecurrentCell, mask: Any) -> Any:
    """Return the results and the rule for a compiled step, whose loop is one of XLA."""
    kind, jax = type(arguments[1]), jax_module()

    def boxed(values: Any) -> Any:
        return jax.tree.map(kind, values)

    def function(x: Any, kernel: Any, recurrent: Any, bias: Any, *initial: Any) -> Any:
        def body(states: Any, now: Any) -> Any:
            z, counts = boxed(now)
            new = _next(cell, z, boxed(states), boxed(recurrent), boxed(bias), counts)
            values = [each.value for each in new]
            return values, values[0]

        z = jax.numpy.swapaxes(x @ kernel, 0, 1)
        if bias is not None:
            z = z + (bias[0] if bias.ndim == 2 else bias)
        zero = jax.numpy.zeros((x.shape[0], recurrent.shape[0]), z.dtype)
        first = [zero if each is None else each for each in initial]
        counts = None if mask is None else getattr(mask, "value", mask).T[..., None]
        states, outputs = jax.lax.scan(body, first, (z, counts))
        return [jax.numpy.swapaxes(outputs, 0, 1), *states[1:]]

    results, pull = jax.vjp(function, *(getattr(each, "value", each) for each in arguments))

    def joint(g: Any) -> list[Any]:
        whole = [
            jax.numpy.zeros_like(result) if change is None else getattr(change, "value", change)
            for result, change in zip(results, g, strict=True)
        ]
        return [None if change is None else kind(change) for change in pull(whole)]

    return [kind(result) for result in results], joint


def recurrent(
    x: Any, kernel: Any, weights: Any, bias: Any, initial: Sequence[Any], *, cell: RecurrentCell, mask: Any
) -> list[Any]:
    """Return the output of each time step, and the last state but the output.

    Args:
        x: an array of shape ``(batch, time, features)``.
        kernel: the weights of the features, with all gates on the last axis.
        weights: those of the output of the step before.
        bias: a vector, or two in rows, for the features and for the output; None: none.
        initial: the states before the first step; None: zeros.
        cell: the arithmetic of a step.
        mask: booleans of shape ``(batch, time)``; where they are False, the states stay.
    """
    options: Any = {"cell": cell, "mask": mask, "wants_x": is_tracked(as_operand(x))}
    has_rules = None not in cell.rules()
    return (_run if has_rules or hasattr(as_array(kernel), "on_device") else _plain)(  # type: ignore[no-any-return]
        x, kernel, weights, bias, *initial, **options
    )


def _parts(array: Any, count: int) -> list[Any]:
    """Return equal parts of the last axis."""
    n = array.shape[-1] // count
    return [array[:, k * n : (k + 1) * n] for k in range(count)]


def _product(x: Array, y: Array) -> Array:
    """Return the sum over time and batch of the products of features."""
    return x.reshape(-1, x.shape[-1]).T @ y.reshape(-1, y.shape[-1])
