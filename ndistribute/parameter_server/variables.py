"""The variables of a server: created once, read as snapshots, changed in place if nobody reads.

No value changes while a reader holds it. Wrong names, shapes and dtypes are refused before anything
changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ndistribute.dtypes import dtype_named
from ndistribute.ownership import ArrayOwner
from ndistribute.parameter_server.messages import Created, Item, NewVariable
from ndistribute.transport.codec import DTYPES, Array


class Refused(Exception):  # noqa: N818 - caught where it becomes a reply, never seen by a user.
    """The request is refused: the client gets a `Failure`, and nothing has changed."""

    def __init__(self, message: str, kind: Any = "mismatch") -> None:
        super().__init__(message)
        self.kind = kind


class Cell(ArrayOwner):
    """The value and the version of a variable, copied on write while a reader holds the value.

    The array owns its memory, and only the cell refers to it.
    """

    __slots__ = ("version",)

    def __init__(self, array: Array, version: int) -> None:
        super().__init__(array)
        self.version = version

    def lend(self) -> Array:
        """Return a read-only view of the value, which never changes."""
        view: Array = self.array.view()
        view.flags.writeable = False
        return view

    def open(self) -> None:
        """Copy the array if a reader holds it, so that it may be changed in place."""
        if self.is_shared():
            self.array = self.array.copy()


class Variables:
    """Variables by name; new variables get versions above `floor`."""

    def __init__(self, floor: int = 0) -> None:
        self.floor = floor
        self.adopts = False  # Whether the store may keep writable arrays of requests.
        self.cells: dict[str, Cell] = {}

    def cell(self, name: str) -> Cell:
        """Return a variable, or refuse an unknown name."""
        cell = self.cells.get(name)
        if cell is None:
            raise Refused(
                f"there is no variable {name!r} on this server; create it. If the server was "
                "started again, what it held is lost: give servers a directory for snapshots.",
                "unknown",
            )
        return cell

    def plan(self, wanted: Sequence[NewVariable]) -> tuple[dict[str, Cell], Created]:
        """Return the missing variables, and the reply after they are added to `cells`."""
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
        return made, Created(tuple(states))

    def delete(self, names: Sequence[str]) -> int:
        """Delete those variables that exist, and return their number."""
        found = [cell for name in names if (cell := self.cells.pop(name, None)) is not None]
        # A variable that is created again must have a higher version than before.
        self.floor = max([self.floor, *(cell.version for cell in found)])
        return len(found)

    def read(self, item: Item) -> tuple[int, Array | None]:
        """Return the version, and a copy of the rows, or the whole value if it is newer."""
        cell = self.cell(item.name)
        if item.rows is not None:
            check_indices(item.name, cell.array, item.rows)
            return cell.version, cell.array[item.rows]
        return cell.version, cell.lend() if cell.version > item.known else None


def check_fits(
    name: str, array: Array, shape: tuple[int, ...], dtype: Any, indices: Array | None = None
) -> None:
    """Refuse a shape or dtype that differs from the variable's, or from that of its rows."""
    wanted, rows = array.shape, ""
    if indices is not None:
        check_indices(name, array, indices)
        wanted, rows = (len(indices), *array.shape[1:]), f" for {len(indices)} row(s)"
    if (shape, dtype) != (wanted, array.dtype):
        raise Refused(
            f"variable {name!r} has shape {array.shape} and dtype {array.dtype}, got {shape} and "
            f"{dtype}{rows}. Nothing has changed."
        )


def check_indices(name: str, array: Array, indices: Array) -> None:
    """Refuse indices that are not valid row numbers of the array."""
    if not array.ndim or indices.ndim != 1 or indices.dtype.kind not in "iu":
        given = f"got {indices.dtype} of shape {indices.shape}"
        raise Refused(f"rows of {name!r} {array.shape} need integers of one dimension, {given}.")
    if len(indices) and not (indices.min() >= 0 and indices.max() < len(array)):
        given = f"got indices {indices.min()} to {indices.max()}"
        raise Refused(f"{name!r} has rows 0 to {len(array) - 1}, {given}.")


def owned(array: Array) -> Array:
    """Return a contiguous copy in native byte order that owns its memory."""
    return np.array(array, array.dtype.newbyteorder("="), order="C", copy=True)


def _initial(new: NewVariable, dtype: np.dtype[Any]) -> Array | None:
    """Return the initial value of a variable, or None if the client must send it."""
    if dtype.name not in DTYPES:
        raise TypeError(f"{dtype} is no dtype of a variable.")
    if new.initial is not None or new.fill is None:
        return owned(new.initial) if new.initial is not None else None
    with np.errstate(invalid="raise", over="raise"):
        return np.full(new.shape, new.fill, dtype)
