"""Optimizers around an optimizer: gradient accumulation, and loss scaling for 16-bit floats.

A wrapper changes the gradients and passes them to the inner optimizer, which keeps the rule, the
slots and the step count.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ndistribute.context import current_trace, get_replica_context, get_strategy
from ndistribute.devices import array_namespace, as_array
from ndistribute.errors import TracingError
from ndistribute.indexed_slices import IndexedSlices, map_values
from ndistribute.optimizers.applied import check_whole, sum_over, widened
from ndistribute.optimizers.optimizer import Optimizer
from ndistribute.variables.mirrored import divided
from ndistribute.variables.variable import Variable

Pairs = Iterable[tuple[Any, Variable]]


def _of_inner(name: str, doc: str) -> Any:
    """Return a property that reads and sets an attribute of the inner optimizer."""
    return property(
        lambda self: getattr(self.inner, name),
        lambda self, value: setattr(self.inner, name, value),
        doc=doc,
    )


class _Wrapper(Optimizer):
    """The base class of optimizers around another one, `inner`."""

    def __init__(self, inner: Optimizer) -> None:
        if not isinstance(inner, Optimizer):
            raise TypeError(f"{type(self).__name__} needs an optimizer, got {inner!r}.")
        self.inner = inner
        self.name = inner.name
        self.rule = inner.rule

    iterations = _of_inner("iterations", "The number of steps that the inner optimizer made.")
    learning_rate = _of_inner("learning_rate", "The learning rate of the inner optimizer.")
    slots = _of_inner("slots", "The slots of each trained variable, by name, once it is built.")

    @property
    def variables(self) -> list[Variable]:
        """The step count and the slots; empty before `build`."""
        slots = [slot for slots in self.slots.values() for slot in slots.values()]
        return [*self.inner.variables[:1], *slots]

    def build(self, variables: Iterable[Variable]) -> None:
        self.inner.build(variables)

    def scale_loss(self, loss: Any) -> Any:
        return self.inner.scale_loss(loss)


class GradientAccumulation(_Wrapper):
    """An optimizer that makes one step, with one all-reduce, for several batches.

    Each replica adds up its own gradients. Every n-th call of `apply_gradients` passes the mean
    over these calls to the inner optimizer. A variable without a gradient in that call keeps its
    sum. In an elastic job, each call has an all-reduce, so that no gradient is lost with its
    worker.

    Args:
        inner: the optimizer that makes the steps.
        steps: the number of calls, n.

    >>> import ndistribute as nd
    >>> v = nd.Variable([1.0])
    >>> optimizer = GradientAccumulation(nd.optimizers.SGD(1.0), steps=2)
    >>> for gradient in ([1.0], [3.0]):
    ...     optimizer.apply_gradients([(gradient, v)])
    >>> v.numpy(), optimizer.iterations
    (array([-1.]), 1)
    """

    def __init__(self, inner: Optimizer, steps: int) -> None:
        super().__init__(inner)
        if steps < 1:
            raise ValueError(f"GradientAccumulation: steps must be 1 or more, got {steps}.")
        self.steps = int(steps)
        self._sums: dict[Variable, Variable] = {}
        self._calls: dict[int, int] = {}  # For each replica of this process.
        self._before = 0

    @property
    def slots(self) -> dict[Variable, dict[str, Variable]]:
        """The slots of the inner optimizer, and the sums of the gradients."""
        built = [(v, slots) for v, slots in self.inner.slots.items() if v in self._sums]
        return {v: {**slots, "gradient_sum": self._sums[v]} for v, slots in built}

    def build(self, variables: Iterable[Variable]) -> None:
        """Create the slots and the sums now instead of in the first call."""
        wanted = list(variables)
        check_whole(wanted, "GradientAccumulation cannot accumulate its gradients.")
        self.inner.build(wanted)
        for variable in wanted:
            if variable not in self._sums:
                name = f"{variable.name}/{self.name}/gradient_sum"
                zeros, kind = np.zeros(variable.shape, variable.dtype), dict[str, Any]()
                if variable.distribute_strategy.session is None:  # Otherwise the sums are global.
                    kind = {"synchronization": "on_read", "aggregation": "sum"}
                self._sums[variable] = Variable(zeros, name=name, trainable=False, **kind)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of calls so far, and the number of calls for each step."""
        return {"calls": self._calls.get(0, self._before), "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of `state_dict`."""
        if (steps := state.get("steps", self.steps)) != self.steps:
            raise ValueError(
                f"GradientAccumulation: the state was saved with steps={steps}, but this object "
                f"has steps={self.steps}: create it with steps={steps}."
            )
        self._calls = {}
        self._before = state["calls"]

    def apply_gradients(
        self, grads_and_vars: Pairs, skip_gradients_aggregation: bool = False
    ) -> None:
        """Add gradients to the sums; at every n-th call, make a step; see `Optimizer`."""
        pairs = list(grads_and_vars)
        replica = get_replica_context()
        variables = [variable for _, variable in pairs]
        if any(variable not in self._sums for variable in variables):
            if replica is None or replica.num_replicas_in_sync == 1:
                self.build(variables)
            else:
                with replica.communicator.uncounted():
                    replica.merge_call(lambda _: self.build(variables))
        get_strategy().note_state(self)
        is_due = self._count_call()
        if replica is not None and get_strategy().session is not None:
            self._apply_elastic(pairs, replica, is_due, skip_gradients_aggregation)
            return
        for gradient, variable in pairs:
            if isinstance(gradient, IndexedSlices):
                self._sums[variable].scatter_add(gradient)
            elif gradient is not None:
                self._sums[variable].assign_add(as_array(gradient))
        if not is_due:
            return
        means = [
            (None if gradient is None else as_array(self._sums[variable]) / self.steps, variable)
            for gradient, variable in pairs
        ]
        self.inner.apply_gradients(means, skip_gradients_aggregation)
        for gradient, variable in pairs:
            if gradient is not None:
                self._sums[variable].assign(np.zeros(variable.shape, variable.dtype))

    def _apply_elastic(
        self, pairs: Sequence[tuple[Any, Variable]], replica: Any, is_due: bool, is_summed: bool
    ) -> None:
        """Add gradients to the sums over all replicas, or make a step; write the sums last."""
        here = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
        gradients, variables = map(list, zip(*here, strict=True)) if here else ([], [])
        if not is_summed:
            gradients = sum_over(replica, gradients, variables)
        dense = [g.to_dense() if isinstance(g, IndexedSlices) else as_array(g) for g in gradients]
        sums = {v: as_array(self._sums[v]) + g for v, g in zip(variables, dense, strict=True)}
        if is_due:
            means = [(sums[v] / self.steps if v in sums else None, v) for _, v in pairs]
            self.inner.apply_gradients(means, skip_gradients_aggregation=True)
            sums = {v: np.zeros_like(total) for v, total in sums.items()}

        def write(_: Any) -> None:  # Once for all replicas of this process.
            for variable, total in sums.items():
                self._sums[variable].assign(total.astype(variable.dtype, copy=False))

        replica.merge_call(write)

    def _count_call(self) -> bool:
        """Count a call of this replica, and return whether it makes a step."""
        me, trace = _local_id(), current_trace()

        def calls() -> int:
            return self._calls.get(me, self._before)

        def count() -> None:
            self._calls[me] = calls() + 1

        if trace is None:
            count()
            return not calls() % self.steps
        ahead = trace.count(self)
        trace.after.append((count, ()))
        return bool(trace.constant(lambda: not (calls() + ahead) % self.steps))


class LossScale(_Wrapper):
    """An optimizer for 16-bit losses that scales the loss, so small gradients do not become zero.

    `scale_loss` multiplies the loss by a scale, and `apply_gradients` divides the gradients by it,
    in float32. If gradients overflow, all replicas skip the step and halve the scale. After
    `growth_steps` steps without an overflow, the scale is doubled.

    Source: Micikevicius et al., "Mixed Precision Training", 2018.

    Args:
        inner: the optimizer that makes the steps.
        initial_scale: the first scale.
        growth_steps: the number of steps without an overflow before the scale is doubled.

    >>> import ndistribute as nd
    >>> v = nd.Variable(np.ones(1, np.float32))
    >>> optimizer = LossScale(nd.optimizers.SGD(1.0), initial_scale=4.0)
    >>> optimizer.apply_gradients([(np.array([np.inf], np.float32), v)])
    >>> v.numpy(), optimizer.scale
    (array([1.], dtype=float32), 2.0)
    """

    def __init__(
        self, inner: Optimizer, initial_scale: float = 2.0**15, growth_steps: int = 2000
    ) -> None:
        super().__init__(inner)
        if initial_scale < 1 or growth_steps < 1:
            raise ValueError(
                f"LossScale: initial_scale={initial_scale} and growth_steps={growth_steps} must be "
                "1 or more."
            )
        self._growth_steps = growth_steps
        self._first = float(initial_scale), 0
        # For each replica of this process, the scale and the steps since it changed; all are equal.
        self._states: dict[int, tuple[float, int]] = {}

    @property
    def scale(self) -> Any:
        """The current scale."""
        get_strategy().note_state(self)
        me, trace = _local_id(), current_trace()
        if trace is None:
            return self._states.get(me, self._first)[0]
        return trace.input(lambda: np.float32(self._states.get(me, self._first)[0]))

    def scale_loss(self, loss: Any) -> Any:
        """Return the loss times the scale in float32; differentiate this value."""
        return self.inner.scale_loss(loss.astype(np.float32) * self.scale)

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, and the number of steps since it changed."""
        scale, steps = self._states.get(0, self._first)
        return {"scale": scale, "steps": steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a result of `state_dict`."""
        self._states, self._first = {}, (state["scale"], state["steps"])

    def apply_gradients(
        self, grads_and_vars: Pairs, skip_gradients_aggregation: bool = False
    ) -> None:
        """Make a step with gradients of the scaled loss, unless they overflow; see `Optimizer`."""
        pairs = [pair for pair in grads_and_vars if pair[0] is not None]
        variables = [variable for _, variable in pairs]
        gradients = [map_values(lambda array: widened(as_array(array)), each) for each, _ in pairs]
        replica = get_replica_context()
        if replica is not None and not skip_gradients_aggregation:
            gradients = sum_over(replica, gradients, variables)  # All replicas decide the same.
        is_finite = functools.reduce(np.logical_and, map(_is_finite, gradients), np.True_)
        if replica is not None and divided(variables):  # Each has seen its shard.
            is_finite = replica.all_reduce("min", is_finite.astype(float)) > 0
        adjust, trace = functools.partial(self._adjust, _local_id()), current_trace()
        if trace is not None and trace.count(self) > 1:
            raise TracingError(
                "LossScale makes a second step in one compiled step, but that step depends on "
                "whether the first overflowed: call run for each step, or use an optimizer for "
                "each."
            )
        with contextlib.nullcontext() if trace is None else trace.only_if(is_finite):
            if trace is not None or is_finite:
                scale = self.scale
                unscaled = [map_values(lambda array: array / scale, each) for each in gradients]
                pairs = list(zip(unscaled, variables, strict=True))
                self.inner.apply_gradients(pairs, skip_gradients_aggregation=True)
        if trace is None:
            adjust(is_finite)
        else:
            trace.after.append((adjust, (is_finite,)))

    def _adjust(self, me: int, is_finite: Any) -> None:
        """Set the scale of a replica after a step."""
        scale, steps = self._states.get(me, self._first)
        if not is_finite:
            self._states[me] = max(1.0, scale / 2), 0
        else:
            grows = steps + 1 == self._growth_steps
            self._states[me] = (2 * scale, 0) if grows else (scale, steps + 1)


def _local_id() -> int:
    replica = get_replica_context()
    return 0 if replica is None else replica.local_replica_id


def _is_finite(gradient: Any) -> Any:
    values = gradient.values if isinstance(gradient, IndexedSlices) else gradient
    return array_namespace(values).isfinite(values).all()
