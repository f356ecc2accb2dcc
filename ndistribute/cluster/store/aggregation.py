"""`Aggregation`: the sets of gradients that clients gave for a step, summed until enough are there.

What synchronous training over parameter servers needs: the step rises with the set that completes
it, and a set for a step that is over does no harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ndistribute.cluster.protocol.requests import Gradient
from ndistribute.cluster.store.accumulator import Accumulator
from ndistribute.cluster.store.refusal import Refused

__all__ = ["Aggregation"]


@dataclass
class Aggregation:
    """Sum the sets of a step.

    Args:
        step: for which sets are taken.
        givers: the series that gave one.
        sums: of the gradients, by variable; empty before the step's first set.
        spare: those of earlier steps, whose memory is used again.
    """

    step: int = 0
    givers: dict[str, None] = field(default_factory=dict)
    sums: dict[str, Accumulator] = field(default_factory=dict)
    spare: dict[str, Accumulator] = field(default_factory=dict)

    def check(self, names: Sequence[str], gradients: Sequence[Gradient], at_step: int) -> None:
        """Check that a set can be added to what is there.

        Raises:
            Refused: it is not like the step's first.
        """
        if at_step != self.step or not self.sums:
            for name, gradient in zip(names, gradients, strict=True):
                Accumulator().check(gradient, name)
            return
        if tuple(self.sums) != tuple(names):
            raise Refused(
                "mismatch",
                f"a set of gradients for step {self.step} is of {', '.join(names)}, the first one "
                f"was of {', '.join(self.sums)}. All must be of the same variables.",
            )
        for name, gradient in zip(names, gradients, strict=True):
            self.sums[name].check(gradient, name)

    def takes(self, series: str, at_step: int) -> bool:
        """Return whether a set would be added."""
        return at_step > self.step or (at_step == self.step and series not in self.givers)

    def completes(self, series: str, at_step: int, count: int) -> bool:
        """Return whether a set would be the last one that its step needs."""
        held = len(self.givers) if at_step == self.step else 0
        return self.takes(series, at_step) and held + 1 >= count

    def add(
        self, series: str, names: Sequence[str], gradients: Sequence[Gradient], at_step: int
    ) -> None:
        """Add a set that was checked and is taken."""
        if at_step > self.step:
            self._begin(at_step)
        for name, gradient in zip(names, gradients, strict=True):
            held = self.sums.get(name)
            if held is None:
                held = self.sums[name] = self.spare.pop(name, Accumulator())
                held.adopt(gradient)
            held.add(gradient)
        self.givers[series] = None

    def finish(self) -> list[Gradient]:
        """Return the means, valid until the next set is added, and begin the next step."""
        means = [held.finish() for held in self.sums.values()]
        self._begin(self.step + 1)
        return means

    def _begin(self, step: int) -> None:
        for held in self.sums.values():
            held.step, held.count, held.rows = 0, 0, []
        self.spare, self.sums = self.sums, {}
        self.step, self.givers = step, {}
