"""`Optimizer`: what all optimizers share.

Inside a replica the gradients are summed over all replicas and each replica updates the part of
the variables, and of their slots, that it owns: nothing is computed twice. Across replicas the
gradients are final, and every copy is updated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np

from ndistribute import context
from ndistribute.collective.indexed_slices import IndexedSlices
from ndistribute.device import Array, copy_to, device_of
from ndistribute.models.optimizers import on_servers, ranges
from ndistribute.models.optimizers.clipping import Clipping
from ndistribute.models.optimizers.naming import unique_name
from ndistribute.models.optimizers.pairs import checked_pairs, opened_arrays, trainable_kind
from ndistribute.stream import working_on, write_to
from ndistribute.update_rules import Rule
from ndistribute.variables.variable import Variable

__all__ = ["Optimizer"]

LearningRate = float | Callable[[int], float]


class Optimizer:
    """Change variables by their gradients.

    Args:
        learning_rate: a number, or a function from the number of steps done to one.
        clipnorm: each gradient, summed over replicas, is scaled down to at most this norm.
        global_clipnorm: all gradients together are scaled down to at most this norm.
        clipvalue: each element is cut to ``[-clipvalue, clipvalue]``.
        name: under which parameter servers know it, the same on all workers; None: the class in
            lower case, and a number from the second one on, in the scope of each strategy anew.

    Raises:
        ValueError: a number is not above 0, or more than one clipping is asked for.
    """

    rule: Rule | None = None
    """The arithmetic, where it is one that parameter servers know; else `update` does it."""
    slot_names: ClassVar[tuple[str, ...]] = ()
    rows_alone: ClassVar[bool] = False
    """Whether a row without gradient stays as it is, so that sparse updates touch few rows."""

    def __init__(
        self,
        learning_rate: LearningRate,
        *,
        clipnorm: float | None = None,
        global_clipnorm: float | None = None,
        clipvalue: float | None = None,
        name: str | None = None,
    ) -> None:
        if not callable(learning_rate) and not learning_rate >= 0:
            raise ValueError(f"learning_rate must be 0 or more, got {learning_rate}.")
        self.learning_rate = learning_rate
        self._served_by = on_servers.serving_strategy()
        label = type(self).__name__.lower()
        self.name = unique_name(label, self._served_by) if name is None else name
        self._clipping = Clipping(clipnorm, global_clipnorm, clipvalue)
        self._slots: dict[int, tuple[Variable, ...]] = {}
        self._variables: list[Variable] = []
        self._iterations: Variable | None = None

    def initial_slot(self, name: str) -> float:
        """Return the value with which a slot starts."""
        return 0.0 if self.rule is None else self.rule.initial_slot(name)

    def rates(self, step: int, learning_rate: float) -> Any:
        """Return the numbers that an update needs, computed once a step.

        Args:
            step: the number of this step, from 1.
            learning_rate: in this step.
        """
        return learning_rate if self.rule is None else self.rule.rate(step, learning_rate)

    def update(self, variable: Array, gradient: Array, slots: Sequence[Array], rates: Any) -> None:
        """Change a range of a variable and of its slots in place; `gradient` may be changed."""
        if self.rule is None:
            raise NotImplementedError(f"{type(self).__name__} defines no update.")
        self.rule.update(variable, gradient, slots, rates)

    @property
    def iterations(self) -> int:
        """Return how many steps were applied, on parameter servers those of all workers."""
        if self._iterations is None and self._served_by is not None:
            self._iterations = on_servers.counter_of(self._served_by, self.name)
        return 0 if self._iterations is None else int(self._iterations)

    @property
    def variables(self) -> list[Variable]:
        """Return the optimizer's own variables: the step count and the slots."""
        own = [] if self._iterations is None else [self._iterations]
        return own + [slot for v in self._variables for slot in self._slots[id(v)]]

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Variable]],
        skip_gradients_aggregation: bool = False,
    ) -> None:
        """Update variables by their gradients.

        Args:
            grads_and_vars: pairs of a gradient (array or `IndexedSlices`) and its variable; pairs
                without a gradient are left out.
            skip_gradients_aggregation: whether the gradients are summed over replicas already.

        Raises:
            ValueError: no variable has a gradient, or a shape or dtype does not fit; nothing has
                changed then.
            TypeError: the variables are on parameter servers, which know no such optimizer.
        """
        pairs = checked_pairs(grads_and_vars)
        variables = [variable for _, variable in pairs]
        if on_servers.are_on_servers(variables):
            self._push(variables, [gradient for gradient, _ in pairs], skip_gradients_aggregation)
            return
        gradients = [self._dense_if_needed(gradient) for gradient, _ in pairs]
        replica = variables[0].replica("update")
        self._build(variables, replica)
        if replica is None:
            self._update_all(variables, self._clipping.apply(gradients))
            return
        if self._clipping and not skip_gradients_aggregation:
            # A norm is known only when the whole sum is.
            gradients = self._clipping.apply(replica.all_reduce("sum", gradients))
            skip_gradients_aggregation = True
        self._update_owned(variables, gradients, replica, skip_gradients_aggregation)

    def minimize(self, loss: Any, var_list: Sequence[Variable], tape: Any) -> None:
        """Compute the gradients of a loss and update variables by them.

        The same as `apply_gradients` of the tape's gradients.

        Args:
            loss: computed inside the tape.
            var_list: what to update.
            tape: the `GradientTape`.
        """
        self.apply_gradients(zip(tape.gradient(loss, list(var_list)), var_list, strict=True))

    def _push(self, variables: Sequence[Any], gradients: Sequence[Any], summed: bool) -> None:
        """Let the servers update the variables by the gradients of this process's replicas."""
        rule = on_servers.rule_for_servers(self, Optimizer)
        replica = variables[0].replica("update")
        if replica is not None and not summed:
            gradients = replica.all_reduce("sum", list(gradients))

        def update(gradients: Sequence[Any]) -> None:
            pairs = list(zip(variables, self._clipping.apply(gradients), strict=True))
            known = on_servers.Kept(self._variables, self._slots, self._iterations)
            self._iterations = on_servers.update_on_servers(
                self.name, rule, pairs, known, self.learning_rate
            )

        if replica is None:
            update(gradients)
        else:
            replica.communicator.merge("apply_gradients", gradients, lambda all_: update(all_[0]))

    def _dense_if_needed(self, gradient: Any) -> Any:
        if self.rows_alone or not isinstance(gradient, IndexedSlices):
            return gradient
        with working_on(device_of(gradient.values)):
            return gradient.to_dense()

    def _build(self, variables: Sequence[Variable], replica: Any) -> None:
        """Make the slots of variables seen for the first time."""
        if all(id(variable) in self._slots for variable in variables):
            return
        if replica is not None:
            replica.merge_call(lambda _: self._make_slots(variables))
            return
        if context.current_frame().replica is not None:
            self._make_slots(variables)  # The only replica there is.
            return
        with variables[0].distribute_strategy.scope():
            self._make_slots(variables)

    def _make_slots(self, variables: Sequence[Variable]) -> None:
        if self._iterations is None:
            self._iterations = Variable(np.int64(0), trainable=False, name="iterations")
        for variable in variables:
            if id(variable) not in self._slots:
                self._variables.append(variable)
                self._slots[id(variable)] = tuple(
                    Variable(
                        np.full(variable.shape, self.initial_slot(name), variable.dtype),
                        trainable=False,
                        name=f"{variable.name}/{name}",
                    )
                    for name in self.slot_names
                )

    def _open(self, variables: Sequence[Variable]) -> ranges.Targets:
        """Count the step and open everything it writes; runs once for all replicas."""
        step = self.iterations + 1
        for counter in opened_arrays(self._iterations):
            write_to(counter, np.asarray(step))
        rate = self.learning_rate(step - 1) if callable(self.learning_rate) else self.learning_rate
        opened = []
        for variable in variables:
            columns = [opened_arrays(v) for v in (variable, *self._slots[id(variable)])]
            opened.append(list(zip(*columns, strict=True)))
        return ranges.Targets(opened, self.rates(step, float(rate)))

    def _update_all(self, variables: Sequence[Variable], gradients: Sequence[Any]) -> None:
        """Update every copy with gradients that are final."""
        targets = self._open(variables)
        for copies, gradient in zip(targets.arrays, gradients, strict=True):
            for arrays in copies:
                device = device_of(arrays[0])
                with working_on(device):
                    if isinstance(gradient, IndexedSlices):
                        ranges.update_rows(
                            self.update, arrays, gradient.on(device).summed(), targets.rates
                        )
                    else:
                        ranges.update_whole(
                            self.update, arrays, copy_to(gradient, device), targets.rates
                        )

    def _update_owned(
        self,
        variables: Sequence[Variable],
        gradients: Sequence[Any],
        replica: Any,
        aggregated: bool,
    ) -> None:
        """Update, together with the other replicas, the part that this one owns."""
        communicator = replica.communicator
        rank = replica.local_replica_id
        homes = [trainable_kind(variable).home_of(rank) for variable in variables]
        dense = [i for i, g in enumerate(gradients) if not isinstance(g, IndexedSlices)]
        sparse = [i for i, g in enumerate(gradients) if isinstance(g, IndexedSlices)]
        joined = [gradients[i] for i in sparse]
        if joined and not aggregated:
            joined = communicator.all_reduce("sum", joined)

        def update(targets: ranges.Targets, leaf: int, start: int, stop: int, total: Array) -> None:
            index = dense[leaf]
            arrays = targets.arrays[index][homes[index]]
            if aggregated:
                total = ranges.block_of(gradients[index], start, stop, total)
            device = device_of(arrays[0])
            with working_on(device):
                ranges.update_range(
                    self.update, arrays, start, stop, copy_to(total, device), targets.rates
                )

        # Gradients that are summed already still meet, but only the owner's own are used.
        targets = communicator.reduce_update(
            "sum",
            [gradients[i] for i in dense],
            lambda: self._open(variables),
            update,
            everywhere=not aggregated,
        )
        if not sparse:
            return
        for index, rows in zip(sparse, joined, strict=True):
            once = rows.summed()
            part = communicator.owned_part(len(once.indices))
            mine = IndexedSlices(once.values[part], once.indices[part], once.dense_shape)
            ranges.update_rows(
                self.update, targets.arrays[index][homes[index]], mine, targets.rates
            )
        communicator.merge("apply_gradients", None, lambda _: None)

    def __getstate__(self) -> dict[str, Any]:
        slots = [self._slots[id(variable)] for variable in self._variables]
        return {**vars(self), "_slots": slots}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        known = zip(self._variables, state["_slots"], strict=True)
        self._slots = {id(variable): slots for variable, slots in known}
