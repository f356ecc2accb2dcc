"""`Optimizer`: gradients in, updated variables out, under any strategy.

Inside a replica the gradients are summed over all replicas and each replica updates the part of
the variables, and of their slots, that it owns: nothing is computed twice. Across replicas the
gradients are final, and every copy is updated. Where the variables lie on parameter servers, the
gradient travels, with the name and numbers of the rule, and the servers make the step.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np

from ndistribute.collective.indexed_slices import IndexedSlices
from ndistribute.context import current_frame
from ndistribute.device import Array, as_array, copy_to, device_of, to_host
from ndistribute.dtypes import computing_dtype, native
from ndistribute.optimizers.clipping import Clipping
from ndistribute.parameter_server.messages import Apply, Gradient
from ndistribute.stream import working_on, write_to
from ndistribute.update_rules import (
    Rule,
    can_train,
    hyperparameters_of,
    update_block,
    update_rows,
    update_whole,
)
from ndistribute.variables.cache import Place
from ndistribute.variables.mirrored import MirroredVariable
from ndistribute.variables.policy import VariablePolicy
from ndistribute.variables.served import ServedVariable
from ndistribute.variables.variable import Variable

__all__ = ["LearningRate", "Optimizer", "Options"]

LearningRate = float | Callable[[int], float]

_OF_RULES = {name for name in vars(Rule) if not name.startswith("_")} - {"name"}

_log = logging.getLogger("ndistribute")


class Options(TypedDict, total=False):
    """What every optimizer takes by name; see `Optimizer`."""

    clipnorm: float | None
    global_clipnorm: float | None
    clipvalue: float | None
    name: str | None


class Optimizer:
    """Change variables by their gradients.

    Args:
        rule: the arithmetic, and what it keeps beside each variable.
        learning_rate: a number, or a function from the number of steps done to one.
        clipnorm: each gradient, summed over replicas, is scaled down to at most this norm.
        global_clipnorm: all gradients together are scaled down to at most this norm.
        clipvalue: each element is cut to ``[-clipvalue, clipvalue]``.
        name: under which parameter servers know it, the same on all workers; None: the class in
            lower case, and a number from the second one on, in the scope of each strategy anew.

    Raises:
        ValueError: a number is not above 0, or more than one clipping is asked for.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        arithmetic = _OF_RULES & vars(cls).keys()
        if arithmetic:
            raise TypeError(
                f"{cls.__name__} defines {', '.join(sorted(arithmetic))}, which belong to the Rule "
                "that an optimizer is made with: Optimizer(rule, learning_rate)."
            )

    def __init__(
        self,
        rule: Rule,
        learning_rate: LearningRate,
        *,
        clipnorm: float | None = None,
        global_clipnorm: float | None = None,
        clipvalue: float | None = None,
        name: str | None = None,
    ) -> None:
        if not isinstance(rule, Rule):
            raise TypeError(f"an optimizer is made with a Rule, got {rule!r}.")
        if not callable(learning_rate) and not learning_rate >= 0:
            raise ValueError(f"learning_rate must be 0 or more, got {learning_rate}.")
        self.rule = rule
        self.learning_rate = learning_rate
        strategy = current_frame().strategy
        # Made in such a scope, and used in other processes alone, it still knows its count.
        self._served_by: Any = strategy if hasattr(type(strategy), "servers") else None
        label = type(self).__name__.lower()
        self.name = _names.unique(label, self._served_by) if name is None else name
        self._clipping = Clipping(clipnorm, global_clipnorm, clipvalue)
        self._slots: dict[Any, tuple[Any, ...]] = {}
        self._counter: Any = None

    @property
    def iterations(self) -> int:
        """Return how many steps were applied, on parameter servers those of all workers.

        Set it to go on from another number, after `build`.
        """
        if self._counter is None and self._served_by is not None:
            self._counter = self._make_counter(self._served_by)
        return 0 if self._counter is None else int(self._counter)

    @iterations.setter
    def iterations(self, steps: int) -> None:
        if self._counter is None:
            raise RuntimeError("there is no count of steps yet: call build(variables) first.")
        self._counter.assign(steps)

    @property
    def variables(self) -> list[Variable]:
        """Return the optimizer's own variables: the step count and the slots, once it is built.

        To save an optimizer, take the value of each; to restore one, `build` it and `assign` them.
        """
        own = [] if self._counter is None else [self._counter]
        return own + list(itertools.chain(*self._slots.values()))

    def build(self, variables: Iterable[Variable]) -> None:
        """Make the optimizer's own variables, which the first `apply_gradients` does otherwise.

        Args:
            variables: what will be trained, in an order that decides that of `Optimizer.variables`.

        Raises:
            ValueError: one can not be trained.

        >>> import ndistribute as nd
        >>> weights, optimizer = nd.Variable([1.0, 2.0], name="w"), nd.optimizers.Adam()
        >>> optimizer.build([weights])
        >>> [v.shape for v in optimizer.variables]
        [(), (2,), (2,)]
        """
        if variables := list(variables):
            for variable in variables:
                _check_is_variable(variable)
                if not can_train(variable.dtype, variable.dtype):
                    raise ValueError(
                        f"variable {variable.name!r} of dtype {variable.dtype} can not be trained: "
                        "gradients need floating or complex numbers."
                    )
            _are_on_servers(variables)
            replica, *_ = [variable.replica("update") for variable in variables]
            self._build(variables, replica)

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
                changed then. Or the variables are on servers, which do not know the rule.
        """
        pairs = _checked_pairs(grads_and_vars)
        gradients, variables = [list(column) for column in zip(*pairs, strict=True)]
        replica, *_ = [variable.replica("update") for variable in variables]
        summed = skip_gradients_aggregation
        on_servers = _are_on_servers(variables)
        self._build(variables, replica)
        if on_servers:
            self._push(variables, gradients, replica, summed)
            return
        gradients = [self._summable(gradient) for gradient in gradients]
        if replica is None:
            self._update_all(variables, self._clipping.apply(gradients))
            return
        if self._clipping and not summed:
            # A norm is known only when the whole sum is.
            gradients, summed = self._clipping.apply(replica.all_reduce("sum", gradients)), True
        self._update_owned(variables, gradients, replica, summed)

    def minimize(self, loss: Any, var_list: Sequence[Variable], tape: Any) -> None:
        """Compute the gradients of a loss and update variables by them.

        The same as `apply_gradients` of the tape's gradients.

        Args:
            loss: computed inside the tape.
            var_list: what to update.
            tape: the `GradientTape`.
        """
        self.apply_gradients(zip(tape.gradient(loss, list(var_list)), var_list, strict=True))

    def _build(self, variables: Sequence[Variable], replica: Any) -> None:
        """Make the counter, and the slots of variables seen for the first time."""

        def make_slots(optimizers: Sequence[Optimizer]) -> None:
            if any(other is not self for other in optimizers):
                raise ValueError(
                    "every replica has an optimizer of its own: make one outside of run, which all "
                    "replicas use."
                )
            if self._counter is None:
                self._counter = self._make_counter(variables[0].distribute_strategy)
            for variable in variables:
                if variable not in self._slots:
                    self._slots[variable] = tuple(
                        self._create_slot(variable, name) for name in self.rule.slot_names
                    )

        if all(variable in self._slots for variable in variables):
            return
        if replica is None:
            make_slots([self])
            return
        communicator = replica.communicator
        # Without a number: workers of which one failed before may build in different steps.
        communicator.part_of = communicator.calls_made
        try:
            communicator.merge("build", self, make_slots)
        finally:
            communicator.part_of = None

    def _create_slot(self, variable: Variable, name: str) -> Variable:
        dtype, value = computing_dtype(variable.dtype), self.rule.initial_slot(name)
        # The parts of a complex number are updated like two real ones, and start alike.
        start = complex(value, value) if dtype.kind == "c" else value
        return variable.create_slot(f"{self.name}/{name}", start, dtype)

    def _make_counter(self, strategy: Any) -> Any:
        """Make the number of steps that were made, a variable of all servers if there are any."""
        zero, policy = np.array(0, np.int64), VariablePolicy("iterations")
        if not hasattr(type(strategy), "servers"):
            return strategy.make_variable(zero, policy)
        servers = tuple(range(len(strategy.servers)))
        place = Place(f"{strategy.namespace}{self.name}/iterations", servers)
        return ServedVariable.make_at(strategy, zero, policy, [place])

    def _rate_after(self, steps: Callable[[], int]) -> float:
        rate = self.learning_rate
        return float(rate(steps()) if callable(rate) else rate)

    def _summable(self, gradient: Any) -> Any:
        """Return a gradient whose rows can be summed: wide enough, and whole if the rule asks."""
        if not isinstance(gradient, IndexedSlices):
            return gradient
        with working_on(device_of(gradient.values)):
            values = gradient.values.astype(computing_dtype(gradient.dtype), copy=False)
            wide = IndexedSlices(values, gradient.indices, gradient.dense_shape)
            return wide if self.rule.rows_alone else wide.to_dense()

    def _open(self, variables: Sequence[Any]) -> _Opened:
        """Count the step and open everything it writes; runs once for all replicas."""
        steps = int(self._counter)
        rate = self.rule.rate(steps + 1, self._rate_after(lambda: steps))
        arrays = []
        for variable in variables:
            columns = [each.begin_update() for each in (variable, *self._slots[variable])]
            arrays.append(list(zip(*columns, strict=True)))
        for counter in self._counter.begin_update():
            write_to(counter, np.asarray(steps + 1))
        return _Opened(arrays, rate)

    def _update_all(self, variables: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Update every copy with gradients that are final."""
        opened = self._open(variables)
        for copies, gradient in zip(opened.arrays, gradients, strict=True):
            for arrays in copies:
                device = device_of(arrays[0])
                with working_on(device):
                    if isinstance(gradient, IndexedSlices):
                        rows = gradient.on(device).summed()
                        update_rows(self.rule, arrays, rows.values, rows.indices, opened.rate)
                    else:
                        update_whole(self.rule, arrays, copy_to(gradient, device), opened.rate)

    def _update_owned(
        self, variables: Sequence[Any], gradients: Sequence[Any], replica: Any, summed: bool
    ) -> None:
        """Update, together with the other replicas, the part that this one owns."""
        communicator = replica.communicator
        homes = [variable.home_of(replica.local_replica_id) for variable in variables]
        dense = [i for i, g in enumerate(gradients) if not isinstance(g, IndexedSlices)]
        sparse = [i for i, g in enumerate(gradients) if isinstance(g, IndexedSlices)]
        joined = [gradients[i] for i in sparse]
        if joined and not summed:
            joined = communicator.all_reduce("sum", joined)

        def update(opened: _Opened, leaf: int, start: int, stop: int, total: Array) -> None:
            index = dense[leaf]
            home, device = homes[index]
            if summed:
                write_to(total, gradients[index].reshape(-1)[start:stop])
            with working_on(device):
                parts = [array.reshape(-1)[start:stop] for array in opened.arrays[index][home]]
                update_block(self.rule, parts, copy_to(total, device), opened.rate)

        # Gradients that are summed already still meet, but only the owner's own are used.
        opened = communicator.reduce_update(
            "sum",
            [gradients[i] for i in dense],
            lambda: self._open(variables),
            update,
            everywhere=not summed,
        )
        if not sparse:
            return
        for index, rows in zip(sparse, joined, strict=True):
            home, device = homes[index]
            with working_on(device):
                once = rows.on(device).summed()
                part = communicator.owned_part(len(once.indices))
                arrays, values = opened.arrays[index][home], once.values[part]
                update_rows(self.rule, arrays, values, once.indices[part], opened.rate)
        communicator.merge("apply_gradients", None, lambda _: None)

    def _push(
        self, variables: Sequence[Any], gradients: Sequence[Any], replica: Any, summed: bool
    ) -> None:
        """Let the servers update the variables by the gradients of this process's replicas."""
        if replica is None:
            self._step_on_servers(variables, gradients)
            return
        if not summed:
            gradients = replica.all_reduce("sum", gradients)
        replica.communicator.merge(
            "apply_gradients", gradients, lambda all_: self._step_on_servers(variables, all_[0])
        )

    def _step_on_servers(self, variables: Sequence[Any], gradients: Sequence[Any]) -> None:
        strategy, counter = variables[0].distribute_strategy, self._counter
        title, numbers = hyperparameters_of(self.rule)
        rate = self._rate_after(lambda: int(counter))
        # All servers count the step, those without a variable too.
        parts: dict[int, list[Any]] = {server: [] for server in counter.places[0].servers}
        for variable, gradient in zip(variables, self._clipping.apply(gradients), strict=True):
            slots = self._slots[variable]
            for k, piece in enumerate(variable.cut(gradient)):
                shard, kept = variable.cached[k], tuple(slot.places[k].name for slot in slots)
                parts[shard.server].append((shard, _sent(piece), kept))
        trained = {server: [shard for shard, _, _ in some] for server, some in parts.items()}
        applies = {
            server: Apply(
                names=tuple(shard.place.name for shard in trained[server]),
                gradients=tuple(gradient for _, gradient, _ in some),
                slots=tuple(slots for _, _, slots in some),
                counter=counter.places[0].name,
                rule=title,
                learning_rate=rate,
                hyperparameters=numbers,
            )
            for server, some in parts.items()
        }
        strategy.push(self.name, applies, trained)
        own = itertools.chain(*(self._slots[variable] for variable in variables), [counter])
        strategy.copies.changed(shard for variable in own for shard in variable.cached)


@dataclass(frozen=True, slots=True)
class _Opened:
    """What an update may write to, opened once for all replicas.

    `arrays[i][home]` are variable number i and its slots in one memory space.
    """

    arrays: list[list[tuple[Array, ...]]]
    rate: float


def _sent(gradient: Any) -> Gradient:
    if isinstance(gradient, IndexedSlices):
        return Gradient(to_host(gradient.values), to_host(gradient.indices))
    return Gradient(to_host(gradient))


def _checked_pairs(grads_and_vars: Iterable[tuple[Any, Variable]]) -> list[tuple[Any, Variable]]:
    """Return the pairs that have a gradient, or refuse one that does not fit its variable."""
    pairs = list(grads_and_vars)
    kept: list[tuple[Any, Variable]] = []
    for given, variable in pairs:
        _check_is_variable(variable)
        if given is None:
            _log.warning("no gradient for variable %r: it stays as it is", variable.name)
            continue
        if isinstance(given, IndexedSlices):
            values, indices = native(given.values), native(given.indices)
            gradient: Any = IndexedSlices(values, indices, given.dense_shape)
        else:
            gradient = native(as_array(given))
        if gradient.shape != variable.shape or not can_train(gradient.dtype, variable.dtype):
            raise ValueError(
                f"the gradient of variable {variable.name!r} has shape {gradient.shape} and dtype "
                f"{gradient.dtype}, the variable {variable.shape} and {variable.dtype}: the shapes "
                "must be equal, and both floating, or the variable complex. Nothing has changed."
            )
        kept.append((gradient, variable))
    if len({id(variable) for _, variable in kept}) < len(kept):
        raise ValueError(
            "a variable is named twice: add its gradients up first. Nothing has changed."
        )
    if not kept:
        raise ValueError(
            "no variable has a gradient: check that the loss is computed inside the tape, from "
            f"the variables {[variable.name for _, variable in pairs]}."
        )
    return kept


def _check_is_variable(variable: Any) -> None:
    if not isinstance(variable, Variable):
        raise TypeError(f"an optimizer trains variables, got {type(variable).__name__}.")


def _are_on_servers(variables: Sequence[Any]) -> bool:
    """Return True if variables lie on parameter servers; refuse those that can not be trained."""
    here = [variable for variable in variables if not isinstance(variable, ServedVariable)]
    for variable in here:
        if not isinstance(variable, MirroredVariable):
            raise ValueError(
                f"variable {getattr(variable, 'name', variable)!r} is synchronized on read: its "
                "replicas have values of their own, which an optimizer can not train."
            )
    if here and len(here) < len(variables):
        raise ValueError(
            "some of the variables are on parameter servers, "
            f"{', '.join(repr(v.name) for v in here)} are not: create all variables in the scope "
            "of one strategy."
        )
    return not here


class _Names:
    """Know which names optimizers have, in the scope of each strategy and outside of any.

    A name is the same in every process that runs the same script. Each strategy counts from the
    beginning, so that one that goes on with another's variables finds what its optimizers kept.
    """

    def __init__(self) -> None:
        self._outside: set[str] = set()  # Those may be used with any strategy.
        self._scoped: set[str] = set()  # Those of all strategies, also of ones that are gone.
        self._inside: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def unique(self, label: str, strategy: Any) -> str:
        """Return the label the first time it is asked for, and with a number from then on."""
        with self._lock:
            if strategy is None:
                own, others = self._outside, self._scoped
            else:
                own, others = self._inside.setdefault(strategy, set()), self._outside
            numbered = (f"{label}_{number}" if number else label for number in itertools.count())
            name = next(one for one in numbered if one not in own and one not in others)
            own.add(name)
            if strategy is not None:
                self._scoped.add(name)
            return name


_names = _Names()
