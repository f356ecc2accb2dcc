"""`ExponentialMovingAverage`: moving averages of variables and tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ndistribute.graph.graph import Operation, get_default_graph
from ndistribute.graph.operations import group
from ndistribute.graph.variables import GraphVariable, global_variables, trainable_variables


@dataclass(eq=False)
class ExponentialMovingAverage:
    """Moving averages; each update moves them by ``(1 - decay) * (value - average)``.

    The average of a variable begins with its initial value. That of a tensor begins with 0.

    Args:
        decay: between 0 and 1; near 1, the average changes slowly.
        num_updates: the number of updates so far. It limits the decay to ``(1 + num_updates) / (10
            + num_updates)``, so averages move faster at first. None: the decay is constant.
        name: the last part of the names of the averages.

    >>> from ndistribute.graph.graph import Graph
    >>> from ndistribute.graph.session import Session
    >>> from ndistribute.graph.variables import global_variables_initializer
    >>> with Graph().as_default(), Session() as session:
    ...     w = GraphVariable(np.float64(1.0), name="w")
    ...     averages = ExponentialMovingAverage(0.75)
    ...     update = averages.apply([w])
    ...     session.run(global_variables_initializer())
    ...     session.run(w.assign(5.0).op)
    ...     session.run(update)
    ...     averages.average(w).name, float(session.run(averages.average(w)))
    ('w/ExponentialMovingAverage:0', 2.0)
    """

    decay: Any
    num_updates: Any = None
    name: str = field(default="ExponentialMovingAverage", kw_only=True)
    _averages: dict[Any, GraphVariable] = field(default_factory=dict, init=False)

    def apply(self, var_list: Sequence[Any] | None = None) -> Operation:
        """Return an operation that updates the averages; the first call creates them.

        Args:
            var_list: variables and tensors; None: the trainable variables.
        """
        graph, decay = get_default_graph(), self.decay
        if self.num_updates is not None:
            updates = 1.0 * self.num_updates
            decay = np.minimum(decay, (1.0 + updates) / (10.0 + updates))
        changes = []
        for value in trainable_variables() if var_list is None else var_list:
            with graph.colocate_with(value):
                if value not in self._averages:
                    with graph.control_dependencies(None):
                        self._averages[value] = self._made(value)
                average = self._averages[value]
                changes.append(average.assign_sub((average - value) * (1.0 - decay)))
        return group(*changes, name=self.name)

    def average(self, var: Any) -> GraphVariable | None:
        """Return the variable that holds the average of a value; None if there is none."""
        return self._averages.get(var)

    def average_name(self, var: Any) -> str:
        """Return the name that the average of a variable has in checkpoints."""
        return f"{var.op.name}/{self.name}"

    def variables_to_restore(
        self, moving_avg_variables: Sequence[GraphVariable] | None = None
    ) -> dict[str, GraphVariable]:
        """Return a mapping with which a `Saver` restores averages into the variables themselves.

        Args:
            moving_avg_variables: the variables with averages; None: the trainable variables.
        """
        chosen = trainable_variables() if moving_avg_variables is None else moving_avg_variables
        kept = {self.average_name(variable): variable for variable in chosen}
        others = [variable for variable in global_variables() if variable not in set(chosen)]
        return kept | {variable.op.name: variable for variable in others}

    def _made(self, value: Any) -> GraphVariable:
        if isinstance(value, GraphVariable):
            initial: Any = value.initialized_value()
        else:
            initial = np.zeros(value.get_shape().as_list(), value.dtype)
        with get_default_graph().name_scope(None):
            return GraphVariable(initial, trainable=False, name=self.average_name(value))
