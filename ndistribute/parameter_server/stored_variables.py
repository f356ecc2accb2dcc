"""The variables of a server, and the changes of them: updates, optimizer steps and aggregates.

Readers get snapshots; a variable that nobody reads is changed in place. A change is first planned,
with all checks and allocations, and cannot fail when it is then made. A server plans all changes
of a transaction before it makes the first one.
"""

from __future__ import annotations

import functools
from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from ndistribute.dtypes import PORTABLE, computing_dtype, dtype_named, kind_of
from ndistribute.indexed_slices import IndexedSlices, sum_rows
from ndistribute.mistakes import count_of
from ndistribute.ownership import ArrayOwner, read_only
from ndistribute.parameter_server import messages as m
from ndistribute.parameter_server.messages import Apply, Done, Gradient
from ndistribute.transport.codec import Array
from ndistribute.update_rules import Rule, can_train, rule_named, update_rows, update_whole

Planned = Callable[[], m.Outcome]

_MOST_PARTS = 16  # The number of sparse gradients held before repeated rows are added.
_LAST_STEP = 1 << 62
_COUNT = np.dtype(np.int64)  # The dtype of the counters of steps.


class Refused(Exception):  # noqa: N818 - caught where it becomes a reply, never seen by a user.
    """The request is refused: the client gets a `Failure`, and nothing has changed."""

    def __init__(self, message: str, kind: m.Refusal = "mismatch") -> None:
        super().__init__(message)
        self.kind = kind


class Cell(ArrayOwner):
    """The value and the version of a variable, copied on write while a reader holds the value.

    The array owns its memory, and only the cell refers to it.
    """

    __slots__ = ("keeps_shape", "lock", "version")

    def __init__(self, array: Any, version: int, lock: Any = None) -> None:
        super().__init__(array)
        self.version = version
        self.lock = lock  # The lock of a variable that graphs share.
        self.keeps_shape = True

    def snapshot(self) -> Array:
        """Return a read-only view of the value, which never changes."""
        view: Array = read_only(self.array)
        return view

    def open(self) -> None:
        if self.is_shared():
            self.array = self.array.copy()


class Variables:
    """Variables by name; new variables get versions above `floor`."""

    casts: ClassVar[bool] = False  # Whether an addition may have another dtype.

    def __init__(self, floor: int = 0) -> None:
        self.floor = floor
        self.may_keep_arrays = False  # Whether the store may keep writable arrays of requests.
        self.cells: dict[str, Cell] = {}

    def cell(self, name: str) -> Cell:
        """Return a variable, or refuse an unknown name."""
        cell = self.cells.get(name)
        if cell is None:
            raise Refused(
                f"there is no variable {name!r} on this server: create it. If the server was "
                "restarted, its variables are lost: give servers a directory for snapshots.",
                "unknown",
            )
        return cell

    def plan(self, wanted: Sequence[m.NewVariable]) -> tuple[dict[str, Cell], m.Created]:
        """Return the missing variables, and the reply for when they are added to `cells`."""
        made: dict[str, Cell] = {}
        states: list[Any] = []
        for new in wanted:
            held = self.cells.get(new.name) or made.get(new.name)
            try:
                dtype = dtype_named(new.dtype).newbyteorder("=")
                value = _initial(new, dtype) if held is None else held.array
            except (TypeError, ValueError, ArithmeticError, ImportError) as error:
                raise Refused(
                    f"variable {new.name!r} of shape {new.shape} and dtype {new.dtype}, filled "
                    f"with {new.fill}, cannot be made here: {error}"
                ) from error
            if value is not None:
                check_fits(new.name, value, new.shape, dtype)
            if held is None and value is not None:
                made[new.name] = Cell(value, self.floor + 1)
            states.append("found" if held else "wanted" if value is None else "made")
        return made, m.Created(tuple(states))

    def plan_update(self, change: m.VariableUpdate) -> Planned:
        """Return a function that writes to a variable, or refuse the change."""
        cell, values, indices = self.cell(change.name), change.values, change.indices
        dtype = cell.array.dtype if self.casts else values.dtype
        check_fits(change.name, cell.array, values.shape, dtype, indices)
        if change.how != "assign" and not _can_add(values.dtype, cell.array.dtype):
            what = f"variable {change.name!r} of {cell.array.dtype}"
            raise Refused(f"{what} cannot {change.how} {values.dtype}.")
        fresh: Array | None = None
        if indices is not None:
            cell.open()
            values = values.astype(cell.array.dtype, copy=False)
        elif change.how != "assign":
            fresh = np.empty_like(cell.array) if cell.is_shared() else None
        elif self.may_keep_arrays and values.flags.writeable:
            fresh = values
        elif cell.is_shared():  # Otherwise write in place, which needs no memory.
            fresh = owned(values)
        combine = np.add if change.how == "assign_add" else np.subtract

        def make() -> Done:
            if change.how != "assign" and indices is not None:
                combine.at(cell.array, indices, values)
            elif change.how != "assign":
                total = cell.array if fresh is None else fresh
                combine(cell.array, values, out=total, casting="unsafe")
                cell.array = total
            elif fresh is not None:
                cell.array = fresh
            else:
                cell.array[... if indices is None else indices] = values
            cell.version += 1
            return Done((cell.version,))

        return make

    def plan_change(
        self, aggregates: ChainMap[str, Aggregation], client: str, change: m.Change
    ) -> Planned:
        """Return a function that makes a client's change, or refuse the change."""
        match change:
            case m.VariableUpdate():
                return self.plan_update(change)
            case Apply():
                step = OptimizerStep(self, change)
                step.open()
                return step.prepare(change.gradients)
            case m.Aggregate():
                held = aggregates.setdefault(change.name, Aggregation())
                return self._plan_aggregate(held, client, change)

    def delete(self, names: Sequence[str]) -> int:
        deleted = [cell for name in names if (cell := self.cells.pop(name, None)) is not None]
        # A variable that is created again must have a higher version than before.
        self.floor = max([self.floor, *(cell.version for cell in deleted)])
        return len(deleted)

    def read(self, item: m.Item) -> tuple[int, Array | None]:
        """Return the version, and a copy of the rows, or the whole value if it is newer."""
        cell = self.cell(item.name)
        if item.rows is not None:
            check_indices(item.name, cell.array, item.rows)
            return cell.version, cell.array[item.rows]
        return cell.version, cell.snapshot() if cell.version > item.known else None

    def _plan_aggregate(self, aggregate: Aggregation, client: str, change: m.Aggregate) -> Planned:
        if change.count < 1 or not 0 <= change.at_step < _LAST_STEP:
            numbers = f"got {change.count} and {change.at_step}"
            raise Refused(f"{change.name!r} needs a count >= 1 and a step >= 0, {numbers}.")
        step = OptimizerStep(self, change.apply)
        aggregate.check(change.apply, change.at_step)
        others = len(aggregate.contributors) if change.at_step == aggregate.step else 0
        if others + 1 >= change.count:
            step.open()

        def add() -> m.Accumulated:
            aggregate.join(client)
            taken = aggregate.add(client, change.apply, change.at_step)
            if taken and len(aggregate.contributors) >= change.count:
                step.prepare(aggregate.finish())()
            return m.Accumulated(taken, aggregate.step)

        return add


def check_fits(
    name: str, array: Array, shape: tuple[int, ...], dtype: Any, indices: Array | None = None
) -> None:
    """Refuse a shape or dtype that differs from the variable's, or from that of its rows."""
    wanted, rows = array.shape, ""
    if indices is not None:
        check_indices(name, array, indices)
        wanted, rows = (len(indices), *array.shape[1:]), f" for {count_of(len(indices), 'row')}"
    if (shape, dtype) != (wanted, array.dtype):
        raise Refused(
            f"variable {name!r} has shape {array.shape} and dtype {array.dtype}, got {shape} and "
            f"{dtype}{rows}. Nothing has changed."
        )


def check_indices(name: str, array: Array, indices: Array) -> None:
    """Refuse indices that are not valid row numbers of the array."""
    if not array.ndim or indices.ndim != 1 or indices.dtype.kind not in "iu":
        got = f"got {indices.dtype} of shape {indices.shape}"
        raise Refused(f"rows of {name!r} {array.shape} need integers of one dimension, {got}.")
    if len(indices) and not (indices.min() >= 0 and indices.max() < len(array)):
        got = f"got indices {indices.min()} to {indices.max()}"
        raise Refused(f"{name!r} has rows 0 to {len(array) - 1}, {got}.")


def owned(array: Array) -> Array:
    """Return a contiguous copy in native byte order that owns its memory."""
    return np.array(array, array.dtype.newbyteorder("="), order="C", copy=True)


def _initial(new: m.NewVariable, dtype: np.dtype[Any]) -> Array | None:
    """Return the initial value of a variable, or None if the client must send it."""
    if dtype.name not in PORTABLE:
        raise TypeError(f"a variable cannot have the dtype {dtype}.")
    if new.initial is not None or new.fill is None:
        return owned(new.initial) if new.initial is not None else None
    with np.errstate(invalid="raise", over="raise"):
        return np.full(new.shape, new.fill, dtype)


@functools.lru_cache(maxsize=64)
def _can_add(added: np.dtype[Any], dtype: np.dtype[Any]) -> bool:
    """Return False if an addition would fail while it writes, after it was logged."""
    try:
        np.result_type(added, dtype)
    except TypeError:
        return False
    return kind_of(added) in "biufc" and kind_of(dtype) in "iufc"


class OptimizerStep:
    """One step of an update rule; the constructor refuses what does not fit."""

    def __init__(self, variables: Variables, change: Apply) -> None:
        try:
            self._rule = rule_named(change.rule, change.hyperparameters)
        except ValueError as error:
            raise Refused(str(error)) from error
        needed, count = len(self._rule.all_slots), len(change.gradients)
        _check_names(change.rule, needed, count, change.names, change.slots, change.written)
        self._change, self._written = change, []
        if change.counter is not None:
            self._written = [variables.cell(change.counter)]
            check_fits(change.counter, self._written[0].array, (), _COUNT)
        self._targets: list[list[Cell]] = []  # Per variable: itself and its slots.
        for name, gradient, slots in zip(change.names, change.gradients, change.slots, strict=True):
            cells = [variables.cell(name), *map(variables.cell, slots)]
            array, dtype = cells[0].array, gradient.values.dtype
            if not can_train(dtype, array.dtype):
                raise Refused(f"a gradient of {dtype} cannot train {name!r} of {array.dtype}.")
            check_fits(name, array, gradient.values.shape, array.dtype, gradient.indices)
            dtype = computing_dtype(array.dtype)
            for slot, cell in zip(slots, cells[1:], strict=True):
                check_fits(slot, cell.array, array.shape, dtype)
            self._targets.append(cells)
            self._written += cells

    def open(self) -> None:
        for cell in self._written:
            cell.open()

    def prepare(self, gradients: Sequence[Gradient]) -> Planned:
        """Return a function that makes the step with gradients of the checked shapes and dtypes."""
        pairs = zip(self._targets, gradients, strict=True)
        fitted = [_fitted(self._rule, target[0].array, gradient) for target, gradient in pairs]
        return functools.partial(self.make, fitted)

    def make(self, fitted: Sequence[Gradient]) -> Done:
        """Make the step; sparse gradients have unique rows, and only these rows change."""
        count = 1
        if self._change.counter is not None:
            counter = self._written[0].array
            counter += 1
            count = max(1, int(counter))  # Any client may have written to it.
        rate = self._rule.rates(count, self._change.learning_rate)
        try:
            for target, gradient in zip(self._targets, fitted, strict=True):
                arrays, indices = [cell.array for cell in target], gradient.indices
                if indices is None:
                    update_whole(self._rule, arrays, gradient.values, rate)
                else:
                    update_rows(self._rule, arrays, gradient.values, indices, rate)
        finally:  # If a user's rule raises, readers see its changes so far.
            for cell in self._written:
                cell.version += 1
        return Done(tuple(target[0].version for target in self._targets))


@dataclass
class Aggregation:
    """The sum of the gradients of a step, and the clients that take part."""

    step: int = 0
    contributors: set[str] = field(default_factory=set)  # The clients that contributed to it.
    # Per variable: the gradients to add up. While there are no contributors, these are
    # the buffers of the last step, for reuse.
    sums: dict[str, list[Gradient]] = field(default_factory=dict)
    members: set[str] = field(default_factory=set)  # Clients that take part.
    peak: int = 0  # The largest number of members since the group was empty.
    last_to_leave: str = ""

    def begin(self, step: int) -> None:
        """Begin to collect gradients for a step, and drop those collected before."""
        self.step, self.contributors = step, set()

    def check(self, change: Apply, at_step: int) -> None:
        """Refuse gradients of other shapes or dtypes than the first ones of the step."""
        if at_step != self.step or not self.contributors:
            return
        first = {name: _kind_of(parts[0]) for name, parts in self.sums.items()}
        these = dict(zip(change.names, map(_kind_of, change.gradients), strict=True))
        if these != first:
            unlike = sorted(these.items() ^ first.items())
            raise Refused(f"gradients for step {self.step} differ from the first ones in {unlike}.")

    def add(self, client: str, change: Apply, at_step: int) -> bool:
        """Add checked gradients; return False if they are late or the client's second ones."""
        if at_step < self.step or (at_step == self.step and client in self.contributors):
            return False
        if at_step > self.step:
            self.begin(at_step)
        self.sums = {
            name: _added(self.sums.get(name, []), gradient, first=not self.contributors)
            for name, gradient in zip(change.names, change.gradients, strict=True)
        }
        self.contributors.add(client)
        return True

    def finish(self) -> list[Gradient]:
        """Begin the next step, and return the means, which are valid until the next `add`."""
        means = [_joined(parts) for parts in self.sums.values()]
        for mean in means if len(self.contributors) > 1 else ():
            np.divide(mean.values, len(self.contributors), out=mean.values)
        self.begin(self.step + 1)
        return means

    def join(self, client: str) -> None:
        """Add a member; clients that left before the group was empty do not count."""
        if not self.members:
            self.peak = 0
        self.members.add(client)
        self.peak = max(self.peak, len(self.members))

    def leave(self, client: str) -> None:
        if client in self.members:
            self.members.remove(client)
            self.last_to_leave = client

    def reply(self, client: str, request: m.AwaitStep) -> m.Number | m.Failure | None:
        """Return the reply to a wait that is over or cannot succeed, otherwise None."""
        over = self.step >= request.step or request.step > self.step + 1
        if over or client not in self.contributors:
            return m.Number(self.step)
        if self.peak < request.count or len(self.members) >= request.count:
            return None
        return m.Failure(
            "left",
            f"aggregate {request.name!r} had {count_of(self.peak, 'member')}, and "
            f"{self.last_to_leave!r} left last. It needs {request.count}, and has "
            f"{len(self.members)}.",
        )


def _added(parts: list[Gradient], gradient: Gradient, *, first: bool) -> list[Gradient]:
    """Return the gradients of a sum and another one; 16-bit floats are added in float32."""
    values, indices = gradient.values, gradient.indices
    if indices is not None:
        rows = Gradient(values.astype(computing_dtype(values.dtype)), indices.astype(np.int64))
        parts = [rows] if first else [*parts, rows]
        return [_joined(parts)] if len(parts) >= _MOST_PARTS else parts
    if not parts or _kind_of(parts[0]) != _kind_of(gradient):
        # A copy, because the sum is changed in place.
        return [Gradient(values.astype(computing_dtype(values.dtype)))]
    if first:
        np.copyto(parts[0].values, values)
    else:
        np.add(parts[0].values, values, out=parts[0].values)
    return parts


def _joined(parts: list[Gradient]) -> Gradient:
    """Return the sum of gradients from `_added`, with unique rows."""
    if parts[0].indices is None:
        return parts[0]
    values = np.concatenate([part.values for part in parts])
    indices = np.concatenate([np.asarray(part.indices) for part in parts])
    return Gradient(*sum_rows(values, indices))


def _fitted(rule: Rule, array: Array, gradient: Gradient) -> Gradient:
    if gradient.indices is None:
        return gradient
    values = gradient.values.astype(computing_dtype(gradient.values.dtype), copy=False)
    if rule.leaves_rows:
        return Gradient(*sum_rows(values, gradient.indices))
    # A rule that changes every row needs the dense gradient.
    return Gradient(IndexedSlices(values, gradient.indices, array.shape).to_dense())


@functools.lru_cache(maxsize=1024)  # Since most steps are made again and again.
def _check_names(
    rule: str,
    needed: int,
    gradients: int,
    names: tuple[str, ...],
    slots: tuple[tuple[str, ...], ...],
    written: tuple[str, ...],
) -> None:
    """Refuse a step unless each variable occurs once and has a gradient and its slots."""
    counts = [len(some) for some in slots]
    complete = gradients == len(names) == counts.count(needed) == len(slots)
    if not complete or len(set(written)) != len(written):
        raise Refused(
            f"a step of {rule!r} needs a gradient and {count_of(needed, 'slot')} for each "
            f"variable, and each name once, got {count_of(gradients, 'gradient')} and "
            f"{[*written]}."
        )


def _kind_of(gradient: Gradient) -> str:
    """Describe the form, shape and dtype that all gradients of a sum must share."""
    values = gradient.values
    form = f"dense {values.shape}" if gradient.indices is None else f"rows {values.shape[1:]}"
    return f"{form} {computing_dtype(values.dtype)}"
