"""The state of the members of an elastic job, and how a member restores or receives it.

Mirrored variables are equal on all members between two units, so any member can send them to
another. The components of variables that are synchronized on read differ. Each member keeps the
sums that all members agreed on at the end of the last unit, so these survive the loss of a member.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ndistribute.devices import Array, to_host
from ndistribute.variables.mirrored import SnapshotArray, SyncOnReadVariable
from ndistribute.variables.policy import VariableAggregation, Write
from ndistribute.variables.variable import Variable

# Keeping this much from step to step costs less than 0.1 ms.
_SMALL_BYTES = 1 << 20

_ADDED = VariableAggregation.SUM, VariableAggregation.ONLY_FIRST_REPLICA

Key = tuple[str, int]  # The name of a variable, and the number of earlier variables with it.

_log = logging.getLogger("ndistribute")


class _Summed(NamedTuple):
    """A variable whose components are added up, and its place in a vector of all sums."""

    key: Key
    cells: Sequence[SnapshotArray]
    first_only: bool  # Whether only replica 0 of the job counts.
    place: slice


class ReplicatedState:
    """The variables of an elastic strategy, and other state that its steps change."""

    def __init__(self) -> None:
        self._variables: dict[Key, weakref.ref[Variable]] = {}
        # Freed variables stay here, because the vectors of all workers must have the same layout,
        # and each worker frees a variable at another time.
        self._counted: dict[Key, tuple[int, bool]] = {}
        self._made = Counter[str]()
        # For variables not created here yet: values of another member, and agreed initial values.
        self._received: dict[Key, Array] = {}
        self._agreed: dict[Key, Array] = {}
        self._fresh: list[Key] = []  # The variables created in this unit.
        self._kept: list[tuple[SnapshotArray, Array]] = []
        # The number of each object with plain values, and states for objects that are added later.
        self._plain = weakref.WeakKeyDictionary[Any, int]()
        self._plain_received: dict[int, Any] = {}
        self._numbers, self._adding = itertools.count(), threading.Lock()
        self._kept_states: list[tuple[Any, Any]] = []
        self._in_unit = False
        self.is_small = False  # Whether it costs little to keep all variables in each unit.
        self.keeps_all = False  # Whether `take_back` restores all variables, or only components.
        self._is_listed = False  # Whether the next three lists are up to date.
        self._cells: list[SnapshotArray] = []
        self._components: list[SnapshotArray] = []
        self._summed: list[_Summed] = []
        self._replicas, self._wide = 1, np.dtype(np.float64)
        # At the end of the last unit: the sums over all replicas, and what this process added.
        self._latest: tuple[list[_Summed], Array, Array] = [], np.zeros(1), np.zeros(1)

    def add(self, variable: Variable) -> None:
        """Add a new variable, and set it to the value that was received for it, if any."""
        key = variable.name, self._made[variable.name]
        self._made[variable.name] += 1
        self._variables[key] = weakref.ref(variable, self._list_anew)
        if isinstance(variable, SyncOnReadVariable) and variable.aggregation in _ADDED:
            first_only = variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA
            self._counted[key] = math.prod(variable._shape), first_only
        self._is_listed = False
        if (value := self._received.pop(key, None)) is not None:
            _set(variable, value, key)
        if self._in_unit:
            self._fresh.append(key)
            self._kept += [(cell, _array_of(cell)) for cell in variable._cells]

    def add_plain(self, holder: Any) -> None:
        """Add an object with a state of plain values, such as a count of calls, before a call."""
        if holder in self._plain:
            return
        with self._adding:  # Another replica of this process may also add it.
            if holder not in self._plain:
                number = next(self._numbers)
                if (state := self._plain_received.pop(number, None)) is not None:
                    holder.load_state_dict(state)
                self._kept_states.append((holder, holder.state_dict()))
                self._plain[holder] = number

    def plain_states(self) -> list[tuple[int, Any]]:
        """Return the number and the state of each object with plain values."""
        return [(number, holder.state_dict()) for holder, number in self._plain.items()]

    def receive_plain(self, states: dict[int, Any]) -> None:
        """Set the states of objects to another member's, now or when the object is added."""
        for holder, number in self._plain.items():
            if (state := states.pop(number, None)) is not None:
                holder.load_state_dict(state)
        self._plain_received = states

    def first_value(self, name: str, initial: Array) -> Array | None:
        """Return the initial value of the next variable of a name; None: all must agree on it."""
        key = name, self._made[name]
        return self._agreed.pop(key, initial if key in self._received else None)

    def fresh(self) -> list[tuple[str, int, Array]]:
        """Return name, number and value of the variables that were created in this unit."""
        alive = dict(self._each())
        return [(*key, to_host(alive[key]._cells[0].read())) for key in self._fresh if key in alive]

    def receive_fresh(self, fresh: Iterable[tuple[str, int, Array]]) -> None:
        """Keep initial values that others agreed on, until this worker creates the variables."""
        for name, number, value in fresh:
            if number >= self._made[name]:
                self._received.pop((name, number), None)
                self._agreed[name, number] = value

    def _list_anew(self, _: Any = None) -> None:
        self._is_listed = False

    def _list(self) -> None:
        """List the arrays of the variables that exist."""
        self._is_listed = True
        self._cells, self._components, self._summed, size = [], [], [], 0
        alive = dict(self._each())
        sizes = [each._dtype.itemsize * math.prod(each._shape) for each in alive.values()]
        self.is_small = sum(sizes) <= _SMALL_BYTES
        for variable in alive.values():
            self._cells += variable._cells
            if isinstance(variable, SyncOnReadVariable):
                self._components += variable._cells
        for key, (length, first_only) in self._counted.items():
            place = slice(size, size := size + length)
            cells = alive[key]._cells if key in alive else []
            self._summed.append(_Summed(key, cells, first_only, place))
        dtypes = [each.cells[0].array.dtype for each in self._summed if each.cells]
        self._wide = np.result_type(np.float64, *dtypes)
        self._replicas = max([len(each.cells) for each in self._summed], default=1)

    def _each(self) -> Iterator[tuple[Key, Any]]:
        for key, reference in list(self._variables.items()):
            if (variable := reference()) is None:
                del self._variables[key]
            else:
                yield key, variable

    # Units.

    def begin(self, *, keeps_all: bool) -> None:
        """Begin a unit; `take_back` can then restore components or, if asked, all variables."""
        self.keeps_all, self._in_unit, self._fresh = keeps_all, True, []
        self._kept_states = [(h, h.state_dict()) for h in self._plain] if self._plain else []
        if not self._is_listed:
            self._list()
        # While an array is held, the next write goes to another array.
        cells = self._cells if keeps_all else self._components
        self._kept = [(cell, _array_of(cell)) for cell in cells]

    def take_back(self) -> None:
        """Restore the kept variables and states to their values at the start of the unit."""
        for cell, array in self._kept:
            if cell.array is not array:
                cell.apply(Write("assign", array))
        for holder, state in self._kept_states:
            holder.load_state_dict(state)

    def end(self) -> None:
        """End a unit, after which `take_back` restores nothing."""
        self._kept, self._kept_states, self._fresh = [], [], []
        self.keeps_all = self._in_unit = False

    def parts_of_sums(self, rank: int) -> Array:
        """Return the vector that this process's replicas add to the sums; `rank` is its rank."""
        if not self._is_listed:
            self._list()
        parts = [self._joined(number) for number in range(self._replicas)]
        for number, part in enumerate(parts):
            for each in self._summed if number or rank else ():
                if each.first_only:
                    part[each.place] = 0
        return parts[0] if len(parts) == 1 else np.sum(parts, axis=0)

    def _joined(self, replica: int) -> Array:
        """Return a replica's components as one vector of a wide dtype, with a 0 at its end."""
        joined = self._zeros()
        for each in self._summed:
            if each.cells:
                joined[each.place] = to_host(_array_of(each.cells[replica])).ravel()
        return joined

    def _zeros(self) -> Array:
        return np.zeros(self._summed[-1].place.stop + 1 if self._summed else 1, self._wide)

    def set_sums(self, sums: Array, parts: Array) -> None:
        """Remember the sums over all replicas, and what this process added to them."""
        self._latest = self._summed, sums, parts

    def known_sums(self) -> dict[str, Array]:
        """Return the known sums, by a text that identifies each variable."""
        summed, sums, _ = self._latest
        return {_text(each.key): sums[each.place] for each in summed}

    def growth(self, rank: int) -> dict[str, Array]:
        """Return what this process has added to each known sum since the sums were known."""
        summed, _, parts = self._latest
        now, before = self.parts_of_sums(rank), {each.key: parts[each.place] for each in summed}
        return {_text(s.key): now[s.place] - before.get(s.key, 0) for s in self._summed}

    # Changes of members.

    def give_out_sums(
        self, sums: dict[str, Array], growths: Iterable[dict[str, Array]], rank: int
    ) -> None:
        """Give the sums of all members to replica 0 of a new group, and zeros to the others.

        Args:
            sums: the known sums.
            growths: what each member has added to them since they were known.
            rank: the rank of this process in the new group.
        """
        self._list()
        given_out, totals = list[_Summed](), self._zeros()
        for each in self._summed:
            if (known := sums.get(_text(each.key))) is None:
                continue
            total = sum((grown[_text(each.key)] for grown in growths if grown), start=known)
            for number, cell in enumerate(each.cells):
                if rank == 0 and number == 0:
                    value = total.reshape(cell.array.shape).astype(cell.array.dtype)
                    cell.apply(Write("assign", value))
                elif not each.first_only:
                    cell.apply(Write("assign", np.zeros_like(to_host(cell.array))))
            given_out.append(each)
            totals[each.place] = total
        self._latest = given_out, totals, self.parts_of_sums(rank)

    def described(self) -> list[tuple[str, int, str, tuple[int, ...]]]:
        """Return name, number, dtype and shape of each variable, in the order of `values`."""
        return [(*key, v.dtype.str, v._shape) for key, v in self._each()]

    def values(self) -> list[Array]:
        """Return each variable's value, on the first replica if replicas differ."""
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
    if isinstance(variable, SyncOnReadVariable) and variable.aggregation in _ADDED:
        value = np.zeros_like(value)
    for cell in variable._cells:
        cell.apply(Write("assign", value))


def _array_of(cell: SnapshotArray) -> Array:
    if cell.is_elsewhere:
        cell.read()  # Fetches what a compiled step has left on its device.
    return cell.array


def _text(key: Key) -> str:
    return f"{key[0]}#{key[1]}"
