"""`Optimizer`, which updates variables by their gradients under any strategy.

Inside a replica, the optimizer sums the gradients over all replicas. Each replica then updates the
part of the variables and slots that it owns, so no element is computed twice. Outside replicas, the
optimizer takes the gradients as final and updates every copy. Parameter servers update their
variables themselves: they receive the gradients, the name of the rule and its hyperparameters.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from ndistribute import update_rules
from ndistribute.collective.backend import Update
from ndistribute.context import current_frame, current_trace, told_apart
from ndistribute.devices import Array, as_array, copy_to, device_of
from ndistribute.dtypes import computing_dtype
from ndistribute.indexed_slices import IndexedSlices, map_values
from ndistribute.mistakes import Explaining
from ndistribute.optimizers import applied
from ndistribute.parameter_server.messages import Apply, Gradient
from ndistribute.stream import working_on, write_to
from ndistribute.update_rules import Rule
from ndistribute.values import Shown
from ndistribute.variables.mirrored import divided
from ndistribute.variables.policy import VariablePolicy
from ndistribute.variables.served import CachedShard, Place, ServedVariable, on_host
from ndistribute.variables.variable import Variable

Method = TypeVar("Method", bound=Callable[..., Any])
LearningRate = float | Callable[[int], float]
# For each variable and each memory: the writable arrays of the variable and its slots. The rate of
# the step comes last.
_Opened = tuple[list[list[tuple[Array, ...]]], float]

_OF_KERAS = (
    *("_apply_dense", "_apply_sparse", "_resource_apply_dense", "_resource_apply_sparse"),
    *("_create_slots", "apply", "get_updates", "update_step"),
)


@functools.singledispatch
def optimizer_for(value: Any, optimizer: Any) -> Any:
    """Return the optimizer that updates variables: this one, or one for graphs.

    Args:
        value: a loss, or a variable.
        optimizer: an optimizer.
    """
    return optimizer


def _also_in_graphs(method: Method) -> Method:
    """Return a method that returns an operation if its loss or variables belong to a graph.

    It then takes the arguments of that method of `ndistribute.graph.Optimizer`.
    """

    @functools.wraps(method)
    def call(self: Any, what: Any, *args: Any, **kwargs: Any) -> Any:
        what = list(what) if hasattr(what, "__next__") else what  # The pairs may come from a zip.
        is_listed = isinstance(what, (list, tuple)) and what and isinstance(what[0], tuple)
        last = what[0][-1] if is_listed else what
        updater = self if isinstance(last, Variable) else optimizer_for(last, self)
        if updater is self:
            return method(self, what, *args, **kwargs)
        return getattr(updater, method.__name__)(what, *args, **kwargs)

    return cast("Method", call)


class Optimizer(Explaining, Shown):
    """The base class of optimizers, which update variables by their gradients.

    Args:
        rule: the `Rule`, which computes the update and names the slots that it needs.
        learning_rate: a number, or a function that maps the number of steps made to a number.
        clipnorm: the maximum norm of each summed gradient; a larger gradient is scaled down.
        global_clipnorm: the maximum norm of all gradients together; if it is larger, all are scaled
            down.
        clipvalue: each element of a gradient is clipped to ``[-clipvalue, clipvalue]``.
        weight_decay: each step first subtracts this share of the variable, times the rate.
        use_ema: whether to keep a moving average of each variable, the slot ``"average"``.
            `finalize_variable_values` assigns the average to the variable; `fit` calls it at the
            end.
        ema_momentum: each step keeps this share of the moving average.
        ema_overwrite_frequency: the variables are set to their averages every this many steps;
            None: never.
        name: the name of the optimizer's slots on parameter servers; all workers must use the same.
            None: the class name in lower case; the second optimizer of a class and later ones get a
            number.

    Raises:
        TypeError: `rule` is not a `Rule`.
        ValueError: a number is out of range, or more than one kind of clipping is set.
    """

    _uncalled = dict.fromkeys(
        {name for name in (*vars(Rule), *_OF_KERAS) if not name.startswith("__")} - {"name"},
        "define update of a Rule, and pass that: Optimizer(rule, learning_rate)",
    )

    def __init__(
        self,
        rule: Rule,
        learning_rate: LearningRate,
        *,
        clipnorm: float | None = None,
        global_clipnorm: float | None = None,
        clipvalue: float | None = None,
        weight_decay: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        name: str | None = None,
    ) -> None:
        if not isinstance(rule, Rule):
            raise TypeError(f"an optimizer needs a Rule, got {rule!r}.")
        often = ema_overwrite_frequency or 0
        if (weight_decay or 0) < 0 or not 0 <= ema_momentum <= 1 or often != max(0, int(often)):
            raise ValueError(
                "weight_decay must be 0 or more, ema_momentum in [0, 1], and "
                "ema_overwrite_frequency None or a whole number, 1 or more, got "
                f"{weight_decay}, {ema_momentum} and {ema_overwrite_frequency}."
            )
        more: dict[str, Any] = {}
        if use_ema:
            more = {"ema_momentum": ema_momentum, "ema_overwrite_frequency": often}
        if weight_decay is not None:
            more["weight_decay"] = weight_decay
        rule = dataclasses.replace(rule, **more) if more else rule
        rate: Any = 0 if hasattr(learning_rate, "graph") else learning_rate  # For a graph.
        if isinstance(rate, str) or not (callable(rate) or rate >= 0):
            raise ValueError(f"learning_rate must be a number, 0 or more, got {learning_rate!r}.")
        self.rule = rule
        self.learning_rate = self._first_rate = learning_rate
        strategy = current_frame().strategy
        # This lets an optimizer that only other processes use read their step count.
        self._served_by: Any = strategy if hasattr(type(strategy), "servers") else None
        label = type(self).__name__.lower()
        self.name = _unique_name(label, self._served_by) if name is None else name
        self._bound = applied.one_bound(
            clipnorm=clipnorm, global_clipnorm=global_clipnorm, clipvalue=clipvalue
        )
        self._parameters = vars(rule) | dict([self._bound] if self._bound else [])
        self._slots: dict[Any, tuple[Any, ...]] = {}
        self._reported: set[str] = set()  # The variables that had no gradient.
        self._counter: Any = None

    @property
    def iterations(self) -> int:
        """The number of steps made; with parameter servers, the steps of all workers.

        You can set it at any time with parameter servers, and otherwise after `build`.
        """
        counter, trace = self._counter_of(self._served_by), current_trace()
        if trace is None or counter is None:
            return 0 if counter is None else int(counter)
        made = trace.counts.get(id(self), 0)  # In this compiled step.
        return trace.input(lambda: int(counter) + made)  # type: ignore[no-any-return]

    @iterations.setter
    def iterations(self, steps: int) -> None:
        counter = self._counter_of(self._served_by)
        if counter is None:
            raise RuntimeError("the optimizer has no step count yet: call build(variables) first.")
        if steps < 0:
            raise ValueError(f"iterations must be 0 or more, got {steps}.")
        counter.assign(steps)

    @property
    def variables(self) -> list[Variable]:
        """The optimizer's own variables: the step count and the slots; empty before `build`.

        To save an optimizer, save their values. To restore it, `build` it and `assign` the values.
        """
        counters = [] if self._counter is None else [self._counter]
        return counters + list(itertools.chain(*self._slots.values()))

    @property
    def slots(self) -> dict[Variable, dict[str, Variable]]:
        """The slots of each trained variable by name; empty before `build`."""
        names, slots_of = self.rule.all_slots, self._slots.items()
        return {variable: dict(zip(names, slots, strict=True)) for variable, slots in slots_of}

    def build(self, variables: Iterable[Variable]) -> None:
        """Create the optimizer's own variables now instead of in the first `apply_gradients`.

        Args:
            variables: the variables to train; `self.variables` has its slots in the same order.

        Raises:
            TypeError: an element is not a `Variable`.
            ValueError: a variable cannot be trained.

        >>> import ndistribute as nd
        >>> weights, optimizer = nd.Variable([1.0, 2.0], name="w"), nd.optimizers.Adam()
        >>> optimizer.build([weights])
        >>> [v.shape for v in optimizer.variables]
        [(), (2,), (2,)]
        """
        variables = list(variables)
        for variable in variables:
            if not isinstance(variable, Variable):
                raise TypeError(
                    f"build needs a list of variables, got one with a {type(variable).__name__}."
                )
            if not update_rules.can_train(variable.dtype, variable.dtype):
                raise ValueError(
                    f"variable {variable.name!r} of dtype {variable.dtype} cannot be trained: "
                    "gradients need floating or complex numbers."
                )
        if variables:
            self._build(variables)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments that create an equal optimizer, with the current learning rate."""
        config = super().get_config()
        if "learning_rate" in config:
            rate = self.learning_rate
            config["learning_rate"] = rate if callable(rate) else float(as_array(rate))
        return config

    def apply(
        self, grads: Iterable[Any], trainable_variables: Iterable[Variable] | None = None
    ) -> None:
        """Update variables by their gradients, like `apply_gradients`, but with two lists.

        Args:
            grads: a gradient for each variable.
            trainable_variables: the variables; None: the variables passed to `build`, in that
                order.
        """
        if trainable_variables is None and not self._slots:
            raise ValueError("apply: pass the variables, or call build(variables) first.")
        variables = list(self._slots) if trainable_variables is None else trainable_variables
        self.apply_gradients(zip(grads, variables, strict=True))

    @_also_in_graphs
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Variable]],
        skip_gradients_aggregation: bool = False,
    ) -> None:
        """Sum gradients over the replicas, and update the variables with them.

        For variables of a graph, this returns the operation that updates them; see `minimize`.

        Args:
            grads_and_vars: pairs of a gradient, an array or `IndexedSlices` of the variable's
                shape, and a variable. Pairs whose gradient is None are skipped, with a warning.
            skip_gradients_aggregation: whether the gradients are already summed over replicas.

        Raises:
            TypeError: an element is not a pair of a gradient and a variable.
            ValueError: no variable has a gradient, a shape or dtype does not fit, or the variables'
                servers do not know the rule. No variable has changed.
        """
        gradients, variables = applied.checked_pairs(grads_and_vars, self._reported)
        replica, summed = self._build(variables), skip_gradients_aggregation
        if replica is None:
            applied.check_whole(variables, "apply its gradients inside run.")
        on_servers = isinstance(variables[0], ServedVariable)
        if not on_servers:
            gradients = [self._summable(gradient) for gradient in gradients]
        if replica is not None and not summed and (on_servers or self._bound):
            # A norm needs the whole sum.
            gradients, summed = applied.sum_over(replica, gradients, variables), True
        if self._bound and (replica is None or summed):
            gradients = applied.clipped(*self._bound, gradients, variables)
        if on_servers:
            self._push(variables, gradients, replica)
        elif replica is None:
            opened, rate = self._open(variables)
            for copies, gradient in zip(opened, gradients, strict=True):
                for arrays in copies:
                    self._update_copy(arrays, gradient, rate)
        else:
            self._update_owned(variables, gradients, replica, summed)

    def finalize_variable_values(self, variables: Iterable[Variable]) -> None:
        """Assign the moving averages of `use_ema` to the variables; call this outside `run`."""
        for variable in variables:
            average = self.slots.get(variable, {}).get("average")
            if average is not None:
                variable.assign(average.numpy().astype(variable.dtype))

    def scale_loss(self, loss: Any) -> Any:
        """Return the loss to differentiate: `loss` itself; `LossScale` returns a multiple."""
        return loss

    @_also_in_graphs
    def minimize(self, loss: Any, var_list: Sequence[Variable], tape: Any) -> None:
        """Compute the gradients of a loss, and update variables with `apply_gradients`.

        For the loss of a graph, this takes the arguments of `ndistribute.graph.Optimizer` and
        returns the operation that updates the variables: ``minimize(loss, global_step=step)``.

        Args:
            loss: a value that was computed inside the tape.
            var_list: the variables to update.
            tape: the `GradientTape` that recorded the loss.

        Raises:
            TypeError: `var_list` is a single variable instead of a list.
        """
        if isinstance(var_list, Variable):
            raise TypeError("var_list is a variable, not a list of variables: write [variable].")
        self.apply_gradients(zip(tape.gradient(loss, list(var_list)), var_list, strict=True))

    def _build(self, variables: Sequence[Variable]) -> Any:
        """Create the counter and the slots of new variables; return this thread's replica."""

        def make_slots(optimizers: Sequence[Optimizer]) -> None:
            if any(other is not self for other in optimizers):
                raise ValueError(
                    "the replicas use different optimizers: create one outside of run, and use it "
                    "on all replicas."
                )
            strategy = variables[0].distribute_strategy
            owner = self._counter_of(strategy).distribute_strategy
            if owner is not strategy and not owner.is_default and not strategy.is_default:
                raise ValueError(
                    f"optimizer {self.name!r} of {told_apart(owner, strategy)} got variable "
                    f"{variables[0].name!r} of {strategy!r}: make an optimizer for each strategy."
                )
            for variable in variables:
                if variable not in self._slots:
                    self._slots[variable] = self._new_slots(variable)

        applied.check_home(variables)
        replica, *_ = [variable.replica("update") for variable in variables]
        if all(variable in self._slots for variable in variables):
            return replica
        if replica is None:
            make_slots([self])
            return None
        with replica.communicator.uncounted():  # Workers may build in different steps.
            replica.communicator.merge("apply_gradients", self, make_slots)
        return replica

    def _new_slots(self, variable: Variable) -> tuple[Variable, ...]:
        dtype, slots = computing_dtype(variable.dtype), []
        for name in self.rule.all_slots:
            start = update_rules.slot_start(self.rule.initial_slot(name), dtype)
            slots.append(variable.create_slot(f"{self.name}/{name}", start, dtype))
        return tuple(slots)

    def _counter_of(self, strategy: Any) -> Any:
        """Return the variable on all servers that counts steps; None if there is no strategy."""
        if self._counter is None and strategy is not None:
            zero, policy = np.array(0, np.int64), VariablePolicy(f"{self.name}/iterations")
            if hasattr(type(strategy), "servers"):
                servers = tuple(range(len(strategy.servers)))
                place = Place(f"{strategy.namespace}{self.name}/iterations", servers)
                self._counter = ServedVariable.make_at(strategy, zero, policy, [place])
            else:
                self._counter = strategy.make_variable(zero, policy)
        return self._counter

    def _rate(self, ahead: int = 0) -> float:
        rate = self.learning_rate
        # A tape may watch a rate that is a variable, and would refuse float(variable).
        made = int(self._counter) + ahead
        return float(as_array(rate(made) if callable(rate) else rate))

    def _summable(self, gradient: Any) -> Any:
        """Return a gradient to sum; `IndexedSlices` are widened, or dense if the rule asks."""
        if not isinstance(gradient, IndexedSlices):
            return gradient
        wide = map_values(applied.widened, gradient)
        with working_on(device_of(wide.values)):
            return wide if self.rule.leaves_rows else wide.to_dense()

    def _open(self, variables: Sequence[Any]) -> _Opened:
        """Count the step, and return the arrays to write and the rate; once for all replicas."""
        trace, counter = current_trace(), self._counter
        if trace is None:
            rate = self.rule.rates(int(counter) + 1, self._rate())
        else:
            ahead = trace.count(self)  # Steps made before the compiled step.
            rate = trace.input(lambda: self.rule.rates(int(counter) + ahead, self._rate(ahead - 1)))
        arrays = []
        for variable in variables:
            columns = [each.begin_update() for each in (variable, *self._slots[variable])]
            arrays.append(list(zip(*columns, strict=True)))
        if trace is None:
            _count_step(counter)
        else:
            trace.after.append((lambda: _count_step(counter), ()))
        return arrays, rate

    def _update_owned(
        self, variables: Sequence[Any], gradients: Sequence[Any], replica: Any, summed: bool
    ) -> None:
        """Sum gradients with the other replicas, and update the part that this replica owns."""
        communicator = replica.communicator
        homes = [variable.home_of[replica.local_replica_id] for variable in variables]
        shards = divided(variables)
        shared = [i for i in range(len(gradients)) if i not in shards]
        sparse = [i for i in shared if isinstance(gradients[i], IndexedSlices)]
        dense = [i for i in shared if i not in sparse]
        joined = [gradients[i] for i in sparse]
        if joined and not summed:
            joined = communicator.all_reduce("sum", joined)

        def update(opened: _Opened, leaf: int, start: int, stop: int, total: Array) -> None:
            (copies, rate), index = opened, dense[leaf]
            arrays = copies[index][homes[index]]
            device = device_of(arrays[0])
            if summed:
                write_to(total, gradients[index].reshape(-1)[start:stop])
            with working_on(device):
                parts = [array.reshape(-1)[start:stop] for array in arrays]
                update_rules.update_block(self.rule, parts, copy_to(total, device), rate)

        # Gradients that are summed already take part in the call too, but each owner uses only its
        # own.
        terms = [gradients[i] for i in dense]
        step = Update(lambda: self._open(variables), update)
        copies, rate = communicator.reduce_update("sum", terms, step, everywhere=not summed)
        if not sparse and not shards:
            return
        for index in shards:
            self._update_copy(copies[index][homes[index]], gradients[index], rate)
        for index, rows in zip(sparse, joined, strict=True):
            self._update_copy(copies[index][homes[index]], rows, rate, communicator.owned_part)
        communicator.merge("apply_gradients", None, lambda _: None, writes=True)

    def _update_copy(
        self,
        arrays: Sequence[Array],
        gradient: Any,
        rate: float,
        owned: Callable[[int], slice] = slice,
    ) -> None:
        """Update a copy by a final gradient; if sparse, only the part that `owned` returns."""
        device = device_of(arrays[0])
        with working_on(device):
            if isinstance(gradient, IndexedSlices):
                rows = gradient.on(device).summed()
                part = owned(len(rows.indices))
                values, indices = rows.values[part], rows.indices[part]
                update_rules.update_rows(self.rule, arrays, values, indices, rate)
            else:
                update_rules.update_whole(self.rule, arrays, copy_to(gradient, device), rate)

    def _push(self, variables: Sequence[Any], gradients: Sequence[Any], replica: Any) -> None:
        """Let the servers update the variables, once for all replicas of this process."""
        strategy = variables[0].distribute_strategy

        def push(everyone: Sequence[Sequence[Any]]) -> None:
            strategy.push(self.name, *self._applies(variables, everyone[0]))
            slots = itertools.chain(*(self._slots[variable] for variable in variables))
            strategy.copies.changed(each for v in (*slots, self._counter) for each in v.cached)

        if replica is None:
            push([gradients])
        else:
            replica.communicator.merge("apply_gradients", gradients, push)

    def _applies(
        self, variables: Sequence[Any], gradients: Sequence[Any]
    ) -> tuple[dict[int, Apply], dict[int, list[CachedShard]]]:
        """Return the request to each server, and the cached shards that the request changes."""
        counter, rate = self._counter.places[0], self._rate()
        title, numbers = update_rules.hyperparameters_of(self.rule)
        # All servers count the step, including those without a variable.
        parts: dict[int, Any] = {server: ([], [], []) for server in counter.servers}
        for variable, gradient in zip(variables, gradients, strict=True):
            slots = [slot.places for slot in self._slots[variable]]
            pieces = zip(variable.cached, variable.shards.cut(gradient), *slots, strict=True)
            for shard, piece, *kept in pieces:
                shards, sent, kept_in = parts[shard.place.servers[0]]
                shards.append(shard)
                sent.append(Gradient(*on_host(piece)))
                kept_in.append(tuple(place.name for place in kept))
        applies = {}
        for server, (shards, sent, kept_in) in parts.items():
            names = tuple(shard.place.name for shard in shards)
            update = names, tuple(sent), tuple(kept_in)
            applies[server] = Apply(*update, counter.name, title, rate, numbers)
        return applies, {server: shards for server, (shards, *_) in parts.items()}


def _count_step(counter: Any) -> None:
    steps = np.asarray(int(counter) + 1)
    for array in counter.begin_update():
        write_to(array, steps)


# The names of optimizers, each with the strategy of its scope; None: outside any scope.
_given_names: list[tuple[str, weakref.ref[Any] | None]] = []
_naming = threading.Lock()


def _unique_name(label: str, strategy: Any) -> str:
    """Return the label, with a number if it is taken; every run of a script gets the same name.

    Each strategy counts for itself, so a strategy that restores another's variables finds their
    slots.
    """
    with _naming:
        taken = {n for n, of in _given_names if strategy is None or of is None or of() is strategy}
        numbered = (f"{label}_{number}" if number else label for number in itertools.count())
        name = next(candidate for candidate in numbered if candidate not in taken)
        _given_names.append((name, None if strategy is None else weakref.ref(strategy)))
    return name
