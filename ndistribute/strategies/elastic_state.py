"""The state that all members of an elastic job hold, and how a member gets back or receives it.

Mirrored variables are equal on all members between two units, so any member can give them to
another. The components of variables that are synchronized on read differ; the sums that all members
agreed on at the end of the last unit stay known to each, also when a member is lost.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ndistribute.collective.reduce_op import ReduceOp
from ndistribute.devices import Array, to_host
from ndistribute.variables.mirrored import SnapshotArray, SyncOnReadVariable
from ndistribute.variables.policy import VariableAggregation, Write
from ndistribute.variables.variable import Variable

Key = tuple[str, int]  # The name of a variable, and how many with that name were made before it.

_log = logging.getLogger("ndistribute")


class ReplicatedState:
    """The variables of an elastic strategy."""

    def __init__(self) -> None:
        self._variables: dict[Key, weakref.ref[Variable]] = {}
        self._keys: dict[int, Key] = {}  # By the variable's id.
        self._made = Counter[str]()
        self._received: dict[Key, Array] = {}  # Of variables that are not made yet.
        self._sums: dict[Key, Array] = {}  # Over all replicas, at the end of the last unit.
        self._parts: dict[Key, Array] = {}  # What this process added to them.
        self._kept: list[tuple[SnapshotArray, Array]] = []
        self.keeps_all = False  # Whether all variables can be taken back, or only components.

    def add(self, variable: Variable) -> None:
        """Add a new variable; it gets the value that was received for it."""
        key = variable.name, self._made[variable.name]
        self._made[variable.name] += 1
        self._variables[key], self._keys[id(variable)] = weakref.ref(variable), key
        if (value := self._received.pop(key, None)) is not None:
            _set(variable, value, key)

    def expects(self, name: str) -> bool:
        """Return True if a value was received for the next variable of a name."""
        return (name, self._made[name]) in self._received

    def _each(self) -> Iterator[tuple[Key, Any]]:
        for key, reference in list(self._variables.items()):
            if (variable := reference()) is None:
                del self._variables[key]
                self._sums.pop(key, None)
            else:
                yield key, variable

    # Units.

    def begin(self, *, keeps_all: bool) -> None:
        """Begin a unit, after which `take_back` sets components, and maybe all variables, back."""
        self.keeps_all = keeps_all
        self._kept = []
        for _, variable in self._each():
            if keeps_all or isinstance(variable, SyncOnReadVariable):
                # Whoever holds the array makes the next write go to another one.
                self._kept += [(cell, _array_of(cell)) for cell in variable._cells]

    def take_back(self) -> None:
        """Set what was kept to its values at the begin of the unit."""
        for cell, array in self._kept:
            if cell.array is not array:
                cell.apply(Write("assign", array))

    def end(self) -> None:
        """End a unit: nothing is taken back any more."""
        self._kept, self.keeps_all = [], False

    def parts_of_sums(self, rank: int) -> list[Array]:
        """Return what the replicas of this process, of a rank, add to the sums of all."""
        return list(self._parts_now(rank).values())

    def set_sums(self, sums: Iterable[Array], rank: int) -> None:
        """Remember the sums over all replicas, as all members know them."""
        self._parts = self._parts_now(rank)
        self._sums = dict(zip(self._parts, map(np.asarray, sums), strict=True))

    def known_sums(self) -> dict[str, Array]:
        """Return the sums that are known, by a text for each variable."""
        return {_text(key): value for key, value in self._sums.items()}

    def growth(self, rank: int) -> dict[str, Array]:
        """Return what this process added to each known sum since then."""
        now = self._parts_now(rank)
        return {_text(key): now[key] - self._parts[key] for key in self._sums}

    def _parts_now(self, rank: int) -> dict[Key, Array]:
        parts: dict[Key, Array] = {}
        for key, variable in self._summed():
            values = [to_host(cell.read()) for cell in variable._cells]
            if variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
                values = values[:1] if rank == 0 else [np.zeros_like(values[0])]
            parts[key] = values[0] if len(values) == 1 else sum(values)
        return parts

    def note_write(self, variable: Variable, write: Write) -> None:
        """Adjust the known sum of a variable that all members write outside of replicas."""
        key = self._keys[id(variable)]
        known = self._sums.pop(key, None)
        if known is None or write.sparse:
            return  # Until the next unit, each member knows its part only.
        value = np.array(to_host(write.value))
        if write.how != "assign":
            value = known + value if write.how == "assign_add" else known - value
        self._sums[key] = value

    def _summed(self) -> Iterator[tuple[Key, Any]]:
        kinds = VariableAggregation.SUM, VariableAggregation.ONLY_FIRST_REPLICA
        for key, variable in self._each():
            if isinstance(variable, SyncOnReadVariable) and variable.aggregation in kinds:
                yield key, variable

    # Changes of members.

    def give_out_sums(
        self, sums: dict[str, Array], growths: Iterable[dict[str, Array]], rank: int
    ) -> None:
        """Let replica 0 of a new group hold the sums of all, and the others nothing.

        Args:
            sums: the known sums.
            growths: what each member added to them since then.
            rank: the rank of this process in the new group.
        """
        for key, variable in self._summed():
            if (total := sums.get(_text(key))) is None:
                continue
            total = sum((each[_text(key)] for each in growths if each), start=total)
            self._sums[key] = total
            is_sum = variable.aggregation.reduce_op is ReduceOp.SUM
            for number, cell in enumerate(variable._cells):
                if rank == 0 and number == 0:
                    cell.apply(Write("assign", total.astype(variable.dtype)))
                elif is_sum:
                    cell.apply(Write("assign", np.zeros_like(total, variable.dtype)))
        self._parts = {
            key: part for key, part in self._parts_now(rank).items() if key in self._sums
        }

    def described(self) -> list[tuple[str, int, str, tuple[int, ...]]]:
        """Return name, number, dtype and shape of each variable, in the order of `values`."""
        return [(*key, v.dtype.str, v._shape) for key, v in self._each()]

    def values(self) -> list[Array]:
        """Return the value of each variable, of the first replica if they differ."""
        return [to_host(variable._cells[0].read()) for _, variable in self._each()]

    def receive(self, described: Iterable[Any], values: Iterable[Array], mirrored: bool) -> None:
        """Set variables to the values of another member; only mirrored ones if `mirrored`."""
        mine = dict(self._each())
        for (name, number, *_), value in zip(described, values, strict=True):
            key = (name, number)
            variable = mine.pop(key, None)
            if variable is None:
                self._received[key] = np.array(value)
            elif not (mirrored and isinstance(variable, SyncOnReadVariable)):
                _set(variable, value, key)
        for name, _ in itertools.chain(mine):
            _log.warning("variable %r is unknown to the other workers: it keeps its value", name)


def _set(variable: Any, value: Array, key: Key) -> None:
    if variable._shape != value.shape or variable.dtype != value.dtype:
        raise ValueError(
            f"variable {key[0]!r} is {variable.dtype}{list(variable._shape)} here, and "
            f"{value.dtype}{list(value.shape)} on the other workers: all must run the same program."
        )
    for cell in variable._cells:
        cell.apply(Write("assign", value))


def _array_of(cell: SnapshotArray) -> Array:
    cell.read()  # Fetches what a compiled step has left on its device.
    return cell.array


def _text(key: Key) -> str:
    return f"{key[0]}#{key[1]}"
