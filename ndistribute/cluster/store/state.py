"""What a store holds that requests read and change: variables and what belongs to them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ndistribute.cluster.shelf.shelf import Shelf
from ndistribute.cluster.store.accumulator import Accumulator
from ndistribute.cluster.store.aggregation import Aggregation
from ndistribute.cluster.store.cell import Cell, make_cell
from ndistribute.cluster.store.refusal import Refused
from ndistribute.cluster.wire.tensors import Array

__all__ = ["State"]


@dataclass
class State:
    """Hold everything by its name.

    Args:
        shelf: where variables lie, if not anywhere.
        variables: by name.
        accumulators: by name.
        aggregates: by name.
        queues: by name.
        step: the global step.
        total: how many transactions were made, in earlier lives as well.
        began: how many of them in earlier lives.
        restored: whether this began as a snapshot, so that clients may know of more than is here.
    """

    shelf: Shelf | None = None
    variables: dict[str, Cell] = field(default_factory=dict)
    accumulators: dict[str, Accumulator] = field(default_factory=dict)
    aggregates: dict[str, Aggregation] = field(default_factory=dict)
    queues: dict[str, deque[int]] = field(default_factory=dict)
    step: int = 0
    total: int = 0
    began: int = 0
    restored: bool = False
    _writing: bool = field(default=False, init=False)

    def variable(self, name: str) -> Cell:
        """Return a variable.

        Raises:
            Refused: there is none of that name.
        """
        cell = self.variables.get(name)
        if cell is None:
            raise Refused("unknown", f"there is no variable {name!r} on this server; create it.")
        return cell

    def create(self, name: str, array: Array, version: int = 1) -> Cell:
        """Make a variable that holds a copy of an array."""
        cell = self.variables[name] = make_cell(array, version, self.shelf)
        return cell

    def begin_writing(self) -> None:
        """Say that variables are about to change, if that was not said in this transaction."""
        if self.shelf is not None and not self._writing:
            self._writing = True
            self.shelf.begin()

    def end_writing(self) -> None:
        """Say that a transaction is whole."""
        if self.shelf is not None and self._writing:
            self._writing = False
            self.shelf.end()
