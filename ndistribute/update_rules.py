"""Update rules, the arithmetic by which a gradient changes a variable and its slots.

A rule depends on no replicas, servers or earlier steps: it gets arrays and a rate, and changes the
arrays in place. Optimizers and parameter servers both update through these functions, so a
variable gets the same bits wherever it is stored.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from ndistribute.devices import Array, array_namespace, is_device_array
from ndistribute.dtypes import can_cast, computing_dtype, kind_of

# Blocks of the gradient, the variable and two slots fit a core's second-level cache together.
BLOCK_ELEMENTS = 32 * 1024

_rules: dict[str, type[Rule]] = {}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The base class of update rules, which are frozen dataclasses of their hyperparameters.

    Parameter servers can apply a rule if their program has imported its class. What every rule has,
    see `Optimizer`, is done around its `update`.
    """

    weight_decay: float = field(default=0.0, repr=False)
    ema_momentum: float = field(default=0.0, repr=False)
    ema_overwrite_frequency: int = field(default=0, repr=False)

    name: ClassVar[str] = ""
    """The unique name by which a server finds the rule's class."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        name = vars(cls).get("name")
        if not name:
            raise TypeError(
                f"{cls.__name__} needs its own `name`, because servers find a rule by its name."
            )
        # Dataclasses with slots and notebooks create a class twice: the last one is used.
        known = _rules.setdefault(name, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(
                f"{known.__qualname__} and {cls.__qualname__} are both named {name!r}: give one "
                "of them another name."
            )
        _rules[name] = cls

    @property
    def slot_names(self) -> tuple[str, ...]:
        """The names of the slots, the arrays that each variable needs for the rule."""
        return ()

    @property
    def rows_alone(self) -> bool:
        """True if rows without a gradient do not change, so that sparse updates are exact."""
        return False

    @property
    def all_slots(self) -> tuple[str, ...]:
        """The names of the slots, and of the average of the variable, if there is one."""
        return (*self.slot_names, *(("average",) if self.ema_momentum else ()))

    @property
    def leaves_rows(self) -> bool:
        """True if a step leaves alone the rows without a gradient."""
        return self.rows_alone and not self.weight_decay and not self.ema_momentum

    def initial_slot(self, name: str) -> float:
        """Return the initial value of a slot."""
        return 0.0

    def rates(self, step: int, learning_rate: float) -> Any:
        """Return the result of `rate`, and what a step needs for the weight decay and averages."""
        rate = self.rate(step, learning_rate)
        if not self.weight_decay and not self.ema_momentum:
            return rate
        kept = self.ema_momentum if step > 1 else 0.0
        often = self.ema_overwrite_frequency
        overwritten = 1.0 if often and step % often == 0 else 0.0
        return rate, 1 - self.weight_decay * learning_rate, kept, overwritten

    def step(self, variable: Array, gradient: Array, slots: Sequence[Array], rates: Any) -> None:
        """Update a range by `update`, with weight decay before it and the average after it."""
        if not self.weight_decay and not self.ema_momentum:
            self.update(variable, gradient, slots, rates)
            return
        rate, left, kept, overwritten = rates
        if self.weight_decay:
            variable *= left
        self.update(variable, gradient, slots[: len(self.slot_names)], rate)
        if self.ema_momentum:
            average = slots[-1]
            average *= kept
            average += (1 - kept) * variable
            if self.ema_overwrite_frequency:
                variable *= 1 - overwritten
                variable += overwritten * average

    def rate(self, step: int, learning_rate: float) -> Any:
        """Return the rate for `update`, or several in a tuple; computed once per step.

        Args:
            step: the number of this step, from 1.
            learning_rate: the learning rate of this step.
        """
        return learning_rate

    def update(self, variable: Array, gradient: Array, slots: Sequence[Array], rate: Any) -> None:
        """Update a range of a variable and of its slots in place; may overwrite `gradient`.

        Args:
            variable: an array of real floats of 32 bits or more.
            gradient: an array of the variable's shape and dtype.
            slots: arrays of the variable's shape and dtype, in the order of `slot_names`.
            rate: the result of the method `rate` for this step.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define update.")


def update_whole(rule: Rule, arrays: Sequence[Array], gradient: Array, rate: Any) -> None:
    """Update a variable and its slots, all contiguous, in blocks; `gradient` does not change."""
    flat, flats = gradient.reshape(-1), [array.reshape(-1) for array in arrays]
    dtype = computing_dtype(arrays[0].dtype)
    size = max(1, flat.size if is_device_array(flat) else BLOCK_ELEMENTS)
    for start in range(0, flat.size, size):
        block = slice(start, start + size)
        update_block(rule, [array[block] for array in flats], flat[block].astype(dtype), rate)


def update_rows(
    rule: Rule, arrays: Sequence[Array], values: Array, indices: Array, rate: Any
) -> None:
    """Update some rows of a variable and its slots; `indices` must be unique."""
    taken = [array[indices] for array in arrays]
    update_block(rule, taken, values.astype(computing_dtype(taken[0].dtype)), rate)
    for array, part in zip(arrays, taken, strict=True):
        array[indices] = part


def update_block(rule: Rule, arrays: Sequence[Array], gradient: Array, rate: Any) -> None:
    """Update contiguous parts of a variable and its slots; may overwrite `gradient`."""
    # 16-bit floats are updated in float32, which is also their slots' dtype, because the square of
    # a gradient may exceed the range of float16. A complex number is updated as two real numbers.
    variable, *slots = arrays
    if type(gradient) is not type(variable):  # A constant gradient in a compiled step.
        gradient = array_namespace(variable).asarray(gradient)
    if variable.dtype.char in "fd" and gradient.dtype == variable.dtype:
        rule.step(variable, gradient, slots, rate)
        return
    wide = variable.astype(computing_dtype(variable.dtype), copy=False)
    parts = [wide, gradient.astype(wide.dtype, copy=False), *slots]
    if wide.dtype.kind == "c":
        parts = [part.view(part.real.dtype) for part in parts]
    rule.step(parts[0], parts[1], parts[2:], rate)
    if wide is not variable:
        variable[...] = wide


def slot_start(value: float, dtype: np.dtype[Any]) -> complex:
    """Return where all elements of a slot begin: both parts of a complex number, with one value."""
    return complex(value, value) if dtype.kind == "c" else value


@functools.lru_cache(maxsize=64)
def can_train(gradient: np.dtype[Any], variable: np.dtype[Any]) -> bool:
    """Return True if gradients of a dtype can train variables of another: both are inexact."""
    inexact = kind_of(gradient) in "fc" and kind_of(variable) in "fc"
    return inexact and can_cast(gradient, variable)


def rule_named(name: str, hyperparameters: Mapping[str, float]) -> Rule:
    """Return the rule of a name; hyperparameters that are not given have their defaults."""
    kind: Any = _rules.get(name)
    if kind is None:
        raise ValueError(
            f"there is no update rule {name!r}; the known rules are {', '.join(_rules)}."
        )
    return _rule_of(kind, tuple(hyperparameters.items()))


@functools.lru_cache(maxsize=64)
def _rule_of(kind: Any, hyperparameters: tuple[tuple[str, float], ...]) -> Rule:
    name, values = kind.name, dict[str, Any](hyperparameters)
    defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(kind)}
    unknown = values.keys() - defaults.keys()
    if unknown:
        raise ValueError(f"rule {name!r} has no hyperparameter {', '.join(sorted(unknown))}.")
    for key, value in hyperparameters:
        if not isinstance(value, int | float):
            raise ValueError(f"{key} of rule {name!r} must be a number, got {value!r}.")
        whole = type(defaults[key])
        if issubclass(whole, int) and whole(value) == value:  # A message holds floats only.
            values[key] = whole(value)
    rule: Rule = kind(**values)
    return rule


def hyperparameters_of(rule: Rule) -> tuple[str, dict[str, float]]:
    """Return a rule's name and hyperparameters, from which `rule_named` makes an equal rule.

    Defaults are left out.
    """
    if _rules[rule.name] is not type(rule) or not dataclasses.is_dataclass(rule):
        raise ValueError(
            f"{rule!r} must be a dataclass, and its class the last that was defined with its name."
        )
    try:
        values = {f: getattr(rule, f.name) for f in dataclasses.fields(rule)}
        numbers = {f.name: float(value) for f, value in values.items() if value != f.default}
    except (TypeError, ValueError) as error:
        raise ValueError(f"{rule!r}: hyperparameters must be numbers ({error}).") from error
    return rule.name, numbers
