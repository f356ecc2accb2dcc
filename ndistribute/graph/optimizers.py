"""Optimizers of graph programs, which update variables on their tasks, and decaying rates.

For the loss of a graph, an optimizer of `nd.optimizers` makes such operations too. The optimizers
with the names of TensorFlow 1 have a rule, other defaults, and initial values of slots. If the
replicas of a strategy run copies of a graph at the same time, they combine their gradients where
these are applied. Each step uses the collectives of the replica whose thread runs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from ndistribute.context import get_replica_context
from ndistribute.dtypes import computing_dtype
from ndistribute.errors import InvalidArgumentError
from ndistribute.exports import export as _export
from ndistribute.graph.gradients import HINTS, gradients
from ndistribute.graph.graph import Graph, Operation, Symbolic, Tensor, as_tensor, get_default_graph
from ndistribute.graph.operations import group
from ndistribute.graph.ops import kernel
from ndistribute.graph.step import Node, Step
from ndistribute.graph.variables import GraphVariable, trainable_variables
from ndistribute.mistakes import accepting
from ndistribute.optimizers import algorithms, schedules
from ndistribute.optimizers.applied import clipped
from ndistribute.optimizers.optimizer import Optimizer, optimizer_for
from ndistribute.update_rules import Rule, hyperparameters_of, slot_start

Pairs = Sequence[tuple[Any, GraphVariable]]
GlobalStep = GraphVariable | None
"""The variable that counts the steps, or None if nothing counts them."""


class GraphOptimizer:
    """The base class of the optimizers of graphs.

    Args:
        rule: the `Rule`, which computes the update.
        learning_rate: a number, a tensor, or a function of the step that returns one.
        name: the name of its operations, and the middle part of the names of its slots.
        bound: the kind and the size of a bound of gradients; None: no clipping.
    """

    _starts: ClassVar[Mapping[str, float]] = {}
    """Where slots begin, if not where the rule says."""
    _rows_alone: ClassVar[bool] = False
    """Whether rows without gradient stay, though the rule would change them."""

    def __init__(
        self, rule: Rule, learning_rate: Any, name: str, bound: tuple[str, float] | None = None
    ) -> None:
        self._rule, self._learning_rate, self._name, self._scope = rule, learning_rate, name, name
        self._bound = bound
        self._slots: dict[GraphVariable, dict[str, GraphVariable]] = {}

    @accepting(*HINTS)
    def minimize(
        self,
        loss: Tensor,
        global_step: GlobalStep = None,
        var_list: Sequence[GraphVariable] | None = None,
        name: str | None = None,
        grad_loss: Any = None,
    ) -> Operation:
        """Return the operation of a training step: it applies the gradients of a loss.

        Args:
            loss: the tensor to minimise.
            global_step: a variable to increment by 1 after the update; or None.
            var_list: the variables to update; None: the trainable ones of the graph.
            name: the operation's name; None: that of the optimizer.
            grad_loss: the gradient of another value with respect to the loss; None: ones.

        Raises:
            ValueError: no variable has a gradient.
        """
        pairs = self.compute_gradients(loss, var_list, grad_loss)
        return self.apply_gradients(pairs, global_step, name)

    @accepting(*HINTS)
    def compute_gradients(
        self, loss: Tensor, var_list: Sequence[GraphVariable] | None = None, grad_loss: Any = None
    ) -> list[tuple[Any, GraphVariable]]:
        """Return pairs of a gradient and a variable; the gradient is None if there is none."""
        with loss.graph.as_default():
            variables = list(trainable_variables() if var_list is None else var_list)
        return list(zip(gradients(loss, variables, grad_loss), variables, strict=True))

    def apply_gradients(
        self, grads_and_vars: Pairs, global_step: GlobalStep = None, name: str | None = None
    ) -> Operation:
        """Return the operation that updates variables by gradients, on the variables' devices.

        Args:
            grads_and_vars: pairs of a gradient, or None, and a variable.
            global_step: a variable to increment by 1 after the update; or None.
            name: the operation's name; None: that of the optimizer.

        Raises:
            ValueError: no variable has a gradient.
        """
        pairs = with_gradients(grads_and_vars)
        graph = pairs[0][1].graph
        with graph.as_default(), graph.name_scope(name or self._scope):
            changed, variables = zip(*pairs, strict=True)
            if graph.replicated:
                # The step of all replicas follows the gradient of the mean of their losses,
                # whatever the number of examples of each.
                changed = _together("all_reduce", changed)
            if self._bound is not None:
                changed = _together("clip_gradients", changed, bound=[*self._bound])
            return self.add_updates(graph, list(zip(changed, variables, strict=True)), global_step)

    def add_updates(self, graph: Graph, pairs: Pairs, global_step: GlobalStep) -> Operation:
        """Return the operation for `apply_gradients`, made in its scope of names."""
        rate = self.rate_at(global_step)
        updates = [self.add_update("apply_rule", [by], rate, variable) for by, variable in pairs]
        if global_step is None:
            return group(*updates, name="update")
        with graph.colocate_with(global_step.op):
            updated = group(*updates, name="update")
        with graph.control_dependencies([updated]):
            return global_step.assign_add(1).op

    def get_slot(self, var: GraphVariable, name: str) -> GraphVariable | None:
        """Return the slot of a variable; None if it has none of this name."""
        return self._slots.get(var, {}).get(name)

    def variables(self) -> list[GraphVariable]:
        """Return the slots of all variables."""
        return [slot for slots in self._slots.values() for slot in slots.values()]

    def rate_at(self, global_step: GlobalStep) -> Any:
        """Return the learning rate of a step, a number or a tensor.

        Raises:
            ValueError: the rate is a function of the step, and there is no `global_step`.
        """
        rate = self._learning_rate
        if not callable(rate):
            return rate
        if global_step is None:
            why = "pass global_step, such as get_or_create_global_step()."
            raise ValueError(f"the learning rate {rate!r} is a function of the step: {why}")
        return rate(global_step.value())

    def add_update(
        self,
        kind: str,
        inputs: Sequence[Any],
        rate: Any,
        variable: GraphVariable,
        outputs: int = 0,
        **attributes: Any,
    ) -> Operation:
        """Return a new operation that applies the rule to a variable, on its device."""
        slots = self._slots_of(variable)
        rule, hyperparameters = hyperparameters_of(self._rule)
        attributes |= {
            "variable": variable.op.name,
            "slots": [slots[name].op.name for name in self._rule.all_slots],
            "count": slots["step"].op.name if "step" in slots else None,
            "rule": rule,
            "hyperparameters": hyperparameters,
            "rows_alone": self._rows_alone or self._rule.leaves_rows,
        }
        with variable.graph.colocate_with(variable.op):  # Not sent in each step.
            rate = as_tensor(rate, name="learning_rate")
        return variable.graph.add(
            kind,
            [*inputs, rate],
            name=f"update_{variable.op.name.replace('/', '_')}",
            outputs=outputs,
            attributes=attributes,
            device=variable.device,
        )

    def _slots_of(self, variable: GraphVariable) -> dict[str, GraphVariable]:
        if variable in self._slots:
            return self._slots[variable]
        slots = self._slots[variable] = {}
        rule, prefix = self._rule, f"{variable.op.name}/{self._name}"
        dtype = None if variable.dtype is None else computing_dtype(variable.dtype)
        graph = variable.graph
        op = variable.op
        with graph.name_scope(None), graph.control_dependencies(None), graph.colocate_with(op):
            for name in rule.all_slots:
                start: Any = self._starts.get(name, rule.initial_slot(name))
                start = start if dtype is None else slot_start(start, dtype)
                # Only a run may know the shape of the variable.
                value: Any = np.zeros_like(variable.initial_value) + start
                value = value if dtype is None else value.astype(dtype)
                slots[name] = GraphVariable(value, False, f"{prefix}/{name}")
                slots[name].shape = variable.shape
            # The rate of Adam depends on the number of updates, which its variable's task counts.
            if type(rule).rate is not Rule.rate or rule.ema_momentum:
                slots["step"] = GraphVariable(np.int64(0), False, f"{prefix}/step")
        return slots


def in_graph(optimizer: Any) -> GraphOptimizer:
    """Return the graph optimizer for an optimizer, which may be one of `nd.optimizers`.

    Raises:
        TypeError: it is not an optimizer, or it is a wrapper around an optimizer.
    """
    if isinstance(optimizer, GraphOptimizer):
        return optimizer
    if not isinstance(optimizer, Optimizer) or hasattr(optimizer, "inner"):
        raise TypeError(
            f"a graph needs an optimizer that does not wrap another one, got {optimizer!r}."
        )
    kept: dict[str, Any] = vars(optimizer)
    rule, rate = optimizer.rule, optimizer.learning_rate
    updater = GraphOptimizer(rule, rate, optimizer.name, kept["_bound"])
    # All updates by one optimizer use the same slots, and its rate at the time of the call.
    updater._slots = kept.setdefault("_slots_in_graphs", updater._slots)
    return updater


class OptimizerOfScopes(GraphOptimizer):
    """An optimizer that updates the variables of each name scope by another optimizer, in one step.

    Args:
        optimizers: the optimizers by the first part of the variables' names.

    Raises:
        ValueError: one of them clips gradients: it would clip only its own.
    """

    def __init__(self, optimizers: Mapping[str, Any]) -> None:
        self._optimizers = {scope: in_graph(each) for scope, each in optimizers.items()}
        if any(each._bound for each in self._optimizers.values()):
            raise ValueError(
                "optimizers that share a step cannot clip gradients: create them without clipnorm, "
                "global_clipnorm and clipvalue."
            )
        super().__init__(algorithms.SGDRule(), 0.0, "scopes")

    def rate_at(self, global_step: GlobalStep) -> Any:
        """Return the step; `add_update` asks each optimizer for its rate at this step."""
        return global_step

    def add_update(
        self, kind: str, inputs: Any, rate: Any, variable: GraphVariable, *args: Any, **more: Any
    ) -> Operation:
        """Return the operation of the optimizer of a variable's scope."""
        optimizer = self._optimizers[variable.op.name.partition("/")[0]]
        return optimizer.add_update(kind, inputs, optimizer.rate_at(rate), variable, *args, **more)


@optimizer_for.register
def _(value: Symbolic, optimizer: Optimizer) -> GraphOptimizer:
    return in_graph(optimizer)


class GradientDescentOptimizer(GraphOptimizer):
    """Gradient descent: the step is ``-learning_rate * gradient``.

    >>> from ndistribute.graph.graph import Graph
    >>> from ndistribute.graph.session import Session
    >>> from ndistribute.graph.variables import global_variables_initializer
    >>> with Graph().as_default(), Session() as session:
    ...     w = GraphVariable([1.0, -2.0], name="w")
    ...     step = GradientDescentOptimizer(0.5).minimize(np.sum(w * w))
    ...     _ = session.run(global_variables_initializer())
    ...     _ = session.run(step)
    ...     session.run(w)
    array([0., 0.], dtype=float32)
    """

    def __init__(
        self, learning_rate: Any, use_locking: bool = False, name: str = "GradientDescent"
    ) -> None:
        super().__init__(algorithms.SGDRule(), learning_rate, name)


class MomentumOptimizer(GraphOptimizer):
    """Gradient descent with momentum: the step is the rate times a sum of gradients.

    If only rows of a variable were read, the other rows and their sums do not change.

    Args:
        learning_rate: a number or a tensor.
        momentum: the share of the last sum that each step keeps.
        use_locking: ignored: updates always hold the variable's lock.
        name: see `GraphOptimizer`.
        use_nesterov: whether to use Nesterov's correction.
    """

    _rows_alone = True

    def __init__(
        self,
        learning_rate: Any,
        momentum: float,
        use_locking: bool = False,
        name: str = "Momentum",
        use_nesterov: bool = False,
    ) -> None:
        super().__init__(algorithms.MomentumRule(momentum, use_nesterov), learning_rate, name)


class AdagradOptimizer(GraphOptimizer):
    """Adagrad, which divides by the root of the sum of the squares of gradients (Duchi, 2011).

    Raises:
        ValueError: the initial sum is not above 0: a gradient of 0 would be divided by 0.
    """

    def __init__(
        self,
        learning_rate: Any,
        initial_accumulator_value: float = 0.1,
        use_locking: bool = False,
        name: str = "Adagrad",
    ) -> None:
        start = initial_accumulator_value
        if not start > 0:
            raise ValueError(f"initial_accumulator_value must be above 0, got {start}.")
        super().__init__(algorithms.AdagradRule(start, epsilon=0.0), learning_rate, name)


class RMSPropOptimizer(GraphOptimizer):
    """RMSProp, which divides by the root of a moving mean of squared gradients (Hinton, 2012).

    The mean begins at 1, so the first steps are small. If only rows of a variable were read, the
    other rows and their means do not change.
    """

    _starts: ClassVar = {"square": 1.0}
    _rows_alone = True

    def __init__(
        self,
        learning_rate: Any,
        decay: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-10,
        use_locking: bool = False,
        centered: bool = False,
        name: str = "RMSProp",
    ) -> None:
        rule = algorithms.RMSpropRule(decay, momentum, epsilon, centered)
        super().__init__(rule, learning_rate, name)


class AdamOptimizer(GraphOptimizer):
    """Adam (Kingma and Ba, 2015)."""

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        use_locking: bool = False,
        name: str = "Adam",
    ) -> None:
        super().__init__(algorithms.AdamRule(beta1, beta2, epsilon), learning_rate, name)


def exponential_decay(
    learning_rate: Any,
    global_step: Any,
    decay_steps: Any,
    decay_rate: Any,
    staircase: bool = False,
    name: str = "ExponentialDecay",
) -> Any:
    """Return ``learning_rate * decay_rate ** (global_step / decay_steps)`` as a tensor.

    Args:
        learning_rate: the rate at step 0.
        global_step: the variable that counts the steps.
        decay_steps: the steps after which the rate is multiplied by `decay_rate`.
        decay_rate: a number, usually less than 1.
        staircase: whether the rate changes at multiples of `decay_steps` only.
        name: the name scope of the operations.

    >>> from ndistribute.graph.session import Session
    >>> rate = exponential_decay(0.5, 25, 10, 0.1, staircase=True)
    >>> round(float(Session().run(rate)), 6)
    0.005
    """
    schedule = schedules.ExponentialDecay(learning_rate, decay_steps, decay_rate, staircase)
    return _rate_at(schedule, global_step, name)


def piecewise_constant(
    x: Any, boundaries: Sequence[float], values: Sequence[float], name: str = "PiecewiseConstant"
) -> Any:
    """Return ``values[k]`` as a tensor, where k is the number of boundaries less than `x`.

    Raises:
        ValueError: the number of values is not the number of boundaries plus 1.

    >>> from ndistribute.graph.session import Session
    >>> float(Session().run(piecewise_constant(7, [5, 10], [1.0, 0.5, 0.1])))
    0.5
    """
    return _rate_at(schedules.PiecewiseConstantDecay(boundaries, values), x, name)


def polynomial_decay(
    learning_rate: Any,
    global_step: Any,
    decay_steps: Any,
    end_learning_rate: float = 0.0001,
    power: float = 1.0,
    cycle: bool = False,
    name: str = "PolynomialDecay",
) -> Any:
    """Return a rate that falls to `end_learning_rate` in `decay_steps`, and stays there.

    With `cycle` it jumps up instead and falls again, with the last rate at 2, 3, ... times
    `decay_steps`.

    >>> from ndistribute.graph.session import Session
    >>> float(Session().run(polynomial_decay(1.0, 5, 10, 0.0)))
    0.5
    """
    numbers = learning_rate, decay_steps, end_learning_rate, power, cycle
    return _rate_at(schedules.PolynomialDecay(*numbers), global_step, name)


def _rate_at(schedule: schedules.LearningRateSchedule, global_step: Any, name: str) -> Any:
    """Return the rate of a step as a tensor."""
    step: Any = as_tensor(global_step)
    with step.graph.name_scope(name):
        return schedule(step)


def with_gradients(pairs: Pairs) -> Pairs:
    """Return the pairs that have a gradient.

    Raises:
        ValueError: none has one.
    """
    chosen = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
    if not chosen:
        names = ", ".join(variable.name for _, variable in pairs)
        raise ValueError(f"no variable has a gradient: the loss depends on none of [{names}].")
    return chosen


def _together(kind: str, gradients: Sequence[Any], **attributes: Any) -> tuple[Tensor, ...]:
    """Return the results of one operation on all gradients, with their shapes and dtypes."""
    graph = get_default_graph()
    changed = graph.add(kind, gradients, outputs=len(gradients), attributes=attributes).outputs
    for after, before in zip(changed, gradients, strict=True):
        after.known = (before,)
    return tuple(changed)


@kernel("all_reduce", bound=True, pure=False)
def _all_reduce(step: Step, node: Node, inputs: Sequence[Any]) -> Any:
    replica = get_replica_context()
    if replica is None:
        raise InvalidArgumentError(
            f"{node.name!r} reduces over replicas, but runs outside of them: run the session in "
            "the function that strategy.run executes."
        )
    means = replica.all_reduce("mean", list(inputs))
    return means[0] if node.outputs == 1 else means


@kernel("clip_gradients")
def _clip_gradients(step: Step, node: Node, inputs: Sequence[Any]) -> Any:
    kind, bound = node.attributes["bound"]
    results = clipped(kind, bound, inputs, ())
    return results[0] if node.outputs == 1 else results


_export(vars(), but="GraphOptimizer OptimizerOfScopes in_graph with_gradients")
