"""An optimizer's step where the variables lie on parameter servers: the servers make it.

What is kept beside a variable lies on its server, under a name that all workers agree on. What goes
over the wire is the gradient, and the name and numbers of the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ndistribute import context
from ndistribute.collective.indexed_slices import IndexedSlices
from ndistribute.device import to_host
from ndistribute.parameter_server.messages import Apply, Gradient
from ndistribute.update_rules import Rule, hyperparameters_of
from ndistribute.variables.policy import (
    VariableAggregation,
    VariablePolicy,
    VariableSynchronization,
)
from ndistribute.variables.remote import RemoteVariable
from ndistribute.variables.served import ServedVariable

__all__ = [
    "Kept",
    "are_on_servers",
    "counter_of",
    "rule_for_servers",
    "serving_strategy",
    "update_on_servers",
]


def serving_strategy() -> Any:
    """Return the strategy of this scope if it keeps variables on servers, else None.

    An optimizer that is made there, and used in other processes alone, still knows its count.
    """
    strategy = context.current_frame().strategy
    return strategy if hasattr(type(strategy), "servers") else None


def counter_of(strategy: Any, name: str) -> RemoteVariable:
    """Return how many steps an optimizer of this name made, a variable of all servers."""
    return RemoteVariable.make_at(
        strategy,
        np.array(0, np.int64),
        _policy("iterations"),
        f"{strategy.namespace}{name}/iterations",
        range(len(strategy.servers)),
    )


def are_on_servers(variables: Sequence[Any]) -> bool:
    """Say whether variables lie on parameter servers.

    Raises:
        ValueError: some do and some do not.
    """
    found = [isinstance(variable, ServedVariable) for variable in variables]
    if any(found) and not all(found):
        here = [v.name for v, remote in zip(variables, found, strict=True) if not remote]
        raise ValueError(
            f"some of the variables are on parameter servers, {', '.join(map(repr, here))} are "
            "not: create all variables in the scope of one strategy."
        )
    return all(found)


def rule_for_servers(optimizer: Any, base: type) -> Rule:
    """Return the rule that servers shall apply.

    Args:
        optimizer: whose.
        base: the class whose methods apply the rule and nothing else.

    Raises:
        TypeError: the optimizer is more than a rule that they know.
    """
    kind = type(optimizer)
    methods = ("update", "rates", "initial_slot")
    own = [name for name in methods if getattr(kind, name) is not getattr(base, name)]
    if optimizer.rule is None or own:
        why = f"has its own {own[0]}" if own else "has no rule"
        raise TypeError(
            f"{kind.__name__} {why}, which parameter servers can not run: they apply the rules of "
            "SGD, Adagrad and Adam. Use one of these, or another strategy."
        )
    rule: Rule = optimizer.rule
    return rule


@dataclass(frozen=True, slots=True)
class Kept:
    """What an optimizer keeps: for which variables, beside each of them by its id, and the count.

    The first two are extended where variables are new.
    """

    variables: list[Any]
    slots: dict[int, tuple[Any, ...]]
    counter: Any


@dataclass(frozen=True, slots=True)
class _Part:
    """What lies on one server of a variable, of its gradient and of what is kept beside it."""

    variable: RemoteVariable
    gradient: Any
    slots: tuple[RemoteVariable, ...]


def update_on_servers(
    name: str,
    rule: Rule,
    pairs: Sequence[tuple[ServedVariable, Any]],
    kept: Kept,
    learning_rate: float | Callable[[int], float],
) -> RemoteVariable:
    """Let each server make the step for the variables that it holds, and return the count.

    Args:
        name: of the optimizer.
        rule: what the servers apply; all of them count the step.
        pairs: the variables and their gradients.
        kept: what the optimizer keeps.
        learning_rate: a number, or a function from the number of steps done to one.
    """
    strategy: Any = pairs[0][0].distribute_strategy
    for variable, _ in pairs:
        if id(variable) not in kept.slots:
            kept.slots[id(variable)] = _new_slots(name, rule, variable)
            kept.variables.append(variable)
    parts = [part for v, gradient in pairs for part in _parts(v, gradient, kept.slots[id(v)])]
    counter: RemoteVariable = kept.counter
    if counter is None:
        counter = counter_of(strategy, name)
    rate = learning_rate(int(counter)) if callable(learning_rate) else learning_rate
    by_server: dict[int, list[_Part]] = {server: [] for server in counter.servers}
    for part in parts:
        by_server[part.variable.servers[0]].append(part)
    applies = {
        server: _apply(rule, some, counter.server_name, float(rate))
        for server, some in by_server.items()
    }
    copies = {i: [part.variable.local_copy for part in some] for i, some in by_server.items()}
    strategy.push(name, applies, copies)
    beside = [slot.local_copy for part in parts for slot in part.slots]
    strategy.copies.changed([*beside, counter.local_copy])
    return counter


def _parts(
    variable: ServedVariable, gradient: Any, slots: Sequence[ServedVariable]
) -> Iterator[_Part]:
    for k, (part, piece) in enumerate(variable.parts_of(gradient)):
        yield _Part(part, piece, tuple(slot.variables[k] for slot in slots))


def _apply(rule: Rule, parts: Sequence[_Part], counter: str, rate: float) -> Apply:
    title, numbers = hyperparameters_of(rule)
    return Apply(
        names=tuple(part.variable.server_name for part in parts),
        gradients=tuple(_sent(part.gradient) for part in parts),
        slots=tuple(tuple(slot.server_name for slot in part.slots) for part in parts),
        counter=counter,
        rule=title,
        learning_rate=rate,
        hyperparameters=numbers,
    )


def _new_slots(name: str, rule: Rule, variable: ServedVariable) -> tuple[ServedVariable, ...]:
    return tuple(
        variable.beside(
            f"{name}/{slot}", rule.initial_slot(slot), _policy(f"{variable.name}/{slot}")
        )
        for slot in rule.slot_names
    )


def _sent(gradient: Any) -> Gradient:
    if isinstance(gradient, IndexedSlices):
        return Gradient(to_host(gradient.values), to_host(gradient.indices))
    return Gradient(to_host(gradient))


def _policy(name: str) -> VariablePolicy:
    return VariablePolicy(
        trainable=False,
        name=name,
        synchronization=VariableSynchronization.ON_WRITE,
        aggregation=VariableAggregation.NONE,
    )
