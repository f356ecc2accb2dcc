"""What a store holds that requests read and change: variables and what belongs to them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ndistribute.cluster.store.accumulator import Accumulator
from ndistribute.cluster.store.cell import Cell
from ndistribute.cluster.store.refusal import Refused

__all__ = ["OptimizerState", "State"]


@dataclass
class OptimizerState:
    """Hold what an optimizer keeps: its rule's name, the steps done, slots by variable."""

    rule: str
    count: int = 0
    slots: dict[str, tuple[Cell, ...]] = field(default_factory=dict)


@dataclass
class State:
    """Hold everything by its name."""

    variables: dict[str, Cell] = field(default_factory=dict)
    optimizers: dict[str, OptimizerState] = field(default_factory=dict)
    accumulators: dict[str, Accumulator] = field(default_factory=dict)
    queues: dict[str, deque[int]] = field(default_factory=dict)
    step: int = 0

    def variable(self, name: str) -> Cell:
        """Return a variable.

        Raises:
            Refused: there is none of that name.
        """
        cell = self.variables.get(name)
        if cell is None:
            raise Refused("unknown", f"there is no variable {name!r} on this server; create it.")
        return cell
