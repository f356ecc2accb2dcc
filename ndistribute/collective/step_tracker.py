"""Where a process is in its steps and calls, and which others will not come to where it waits.

The messages that tell it may overtake data, so who has left a step, or the job, counts as missing
only where it had not made the call before.
"""

from __future__ import annotations

from collections.abc import Sequence

from ndistribute.collective.backend import Call

Place = tuple[int, int]
"""A step, as a position that rises when one begins and when it ends, and a call's number in it."""

BEFORE_ALL: Place = (0, 0)
"""What is not over even for a process that has made no call."""

END = 1 << 30
"""The number of a call that no step reaches: whoever leaves the step has skipped it."""


class StepTracker:
    """Know where this process is in its steps and calls, and what the others have said of theirs.

    Attributes:
        position: how many steps have begun and ended, odd inside a step.
        finished: the last call of this step, or else of the last one, that is over here.
        before: the last call of the step before that is over here.
        exchanged: the same of those in which each process hears of all others, or writes variables.
        total: the sum of `exchanged` over earlier steps; where it is equal, so are the calls.
        made: the last call of which it is known that this process has made it.
        departed: why, for each process that has said good-bye.

    >>> where = StepTracker()
    >>> where.position = 2
    >>> where.has_made((1, 1))
    False
    """

    def __init__(self) -> None:
        self.departed: dict[int, str] = {}
        self.start_over()

    def start_over(self) -> None:
        """Count steps from the beginning, as all processes do after a failure."""
        self.position = self.finished = self.before = self.exchanged = self.total = 0
        self.made = BEFORE_ALL
        self._reached: dict[int, Place] = {}
        self._skipped: set[tuple[int, Place]] = set()

    @property
    def anyone_gone(self) -> bool:
        """Return True if any process has said good-bye, or has left the current step."""
        return bool(self.departed or self._skipped)

    @property
    def inside(self) -> bool:
        """Return True from the begin of a step to its end."""
        return self.position % 2 == 1

    @property
    def last(self) -> Place:
        """Return the place of the last call that is over, 0 standing for the begin of its step."""
        return self.position if self.inside else self.position - 1, self.finished

    def begin_step(self) -> None:
        """Go on to the next step: who has left the last one early does not matter any more."""
        self._skipped.clear()
        self.position += 1
        self.before = self.finished
        self.finished = self.exchanged = 0

    def end_step(self) -> None:
        """End a step: a call that this process did not make, it will not make."""
        self.total += self.exchanged
        self.position += 1

    def place_of(self, call: Call) -> Place:
        """Return the place of a call of the current step."""
        return self.position, call.sequence

    def has_made(self, place: Place) -> bool | None:
        """Return True if this process has made a call, False if it has left the step without it.

        None: it may still come, or it is not known that it came.
        """
        # In this order: what it makes in a step is noted before it leaves the step.
        left = self.position > place[0]
        if self.made >= place and place[1] != END:
            return True
        return False if left else None

    def note(self, rank: int, place: Place, made: bool) -> None:
        """Take in that a process has made a call, or has left the step without it."""
        if made:
            self._reached[rank] = max(place, self._last(rank))
        else:
            self._skipped.add((rank, place))

    def note_departed(self, rank: int, reason: str, made: Place) -> None:
        """Take in that a process has left the job, and the last call that it has surely made."""
        self.note(rank, made, True)
        self.departed[rank] = reason

    def gone(self, place: Place) -> set[int]:
        """Return who will not come to a call of the current step, if its data is not here now."""
        left = {rank for rank, skipped in list(self._skipped) if skipped == place}
        return left.union(rank for rank in list(self.departed) if self._last(rank) < place)

    def late(self, place: Place, absent: Sequence[int], others: Sequence[int]) -> list[int]:
        """Return whom a call waits for in the end: those it misses may wait for somebody too."""
        silent = [rank for rank in others if self._last(rank) < place]
        return [rank for rank in absent if rank in silent] or silent or list(absent)

    def _last(self, rank: int) -> Place:
        return self._reached.get(rank, BEFORE_ALL)
