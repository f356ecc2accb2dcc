"""Where a process is in its steps and calls, and which others will not come to where it waits.

The messages that tell it may overtake data, so who has left a step, or the job, counts as missing
only where it had not made the call before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ndistribute.collective.backend import Call
from ndistribute.errors import CollectiveMismatchError, DistributeError, WorkerLostError

Place = tuple[int, int]
"""A step, as a position that rises when one begins and when it ends, and a call's number in it."""

BEFORE_ALL: Place = (0, 0)
"""What is not over even for a process that has made no call."""


class StepTracker:
    """Know where this process is in its steps and calls, and what the others have said of theirs.

    Attributes:
        position: how many steps have begun and ended, odd inside a step.
        finished: the last call of this step, or else of the last one, that is over here.
        before: the last call of the step before that is over here.
        exchanged: the same of those in which each process hears of all others.
        total: the sum of `exchanged` over earlier steps; where it is equal, so are the calls.
        made: the last call of which it is known that this process has made it.
        departed: why, for each process that has said good-bye.

    >>> where = StepTracker()
    >>> where.position = 2
    >>> where.has_skipped((1, 1))
    True
    """

    def __init__(self) -> None:
        self.position = self.finished = self.before = self.exchanged = self.total = 0
        self.made = BEFORE_ALL
        self.departed: dict[int, str] = {}
        self._skipped: dict[int, Place] = {}
        self._last_made: dict[int, Place] = {}
        self._reached: dict[int, Place] = {}

    @property
    def anyone_gone(self) -> bool:
        """Return True if any process has said good-bye, or has left the current step."""
        return bool(self.departed or self._skipped)

    @property
    def last(self) -> Place:
        """Return the place of the last call that is over, 0 standing for the begin of its step."""
        inside = self.position % 2 == 1
        return self.position if inside else self.position - 1, self.finished

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

    def start_over(self) -> None:
        """Count steps from the beginning, as all processes do after a failure."""
        self.position = self.finished = self.before = self.exchanged = self.total = 0
        self.made = BEFORE_ALL
        self._skipped.clear()
        self._last_made.clear()
        self._reached.clear()

    def place_of(self, call: Call) -> Place:
        """Return the place of a call of the current step."""
        return self.position, call.sequence

    def has_skipped(self, place: Place) -> bool:
        """Return True if this process left that step without being known to have made the call."""
        # In this order: what it makes in a step is noted before it leaves the step.
        return self.position > place[0] and self.made < place

    def note_seen(self, place: Place, reached: Iterable[int], skipped: Iterable[int]) -> None:
        """Take in which processes have made a call, and which have left the step without it."""
        for rank in reached:
            self._reached[rank] = place
        for rank in skipped:
            self._skipped[rank] = place

    def note_departed(self, rank: int, reason: str, made: Place) -> None:
        """Take in that a process has left the job, and the last call that it has surely made."""
        self._last_made[rank] = made
        self.departed[rank] = reason

    def gone(self, call: Call) -> frozenset[int]:
        """Return who will not come to a call of the current step, if its data is not here now."""
        place = self.place_of(call)
        left = {rank for rank, skipped in list(self._skipped.items()) if skipped >= place}
        departed = {r for r in list(self.departed) if self._last_made.get(r, BEFORE_ALL) < place}
        return frozenset(left | departed)

    def late(self, call: Call, absent: Sequence[int], others: Sequence[int]) -> list[int]:
        """Return whom a call waits for in the end.

        Args:
            call: of the current step.
            absent: whom this process misses; they may themselves wait for somebody.
            others: all other processes.
        """
        place = self.place_of(call)
        silent = [rank for rank in others if self._reached.get(rank, BEFORE_ALL) < place]
        return [rank for rank in absent if rank in silent] or silent or list(absent)

    def given_up(self, call: Call, own: int, rank: int, name: str) -> DistributeError:
        """Return the error for a wait for a process that has gone.

        Args:
            call: what is waited in.
            own: the rank that waits.
            rank: the one that has gone.
            name: how messages call that one.
        """
        if rank in self.departed:
            return WorkerLostError(
                f"{call.title}: {name} {self.departed[rank]}, and worker {own} waits for it. "
                "Every worker must run the same number of steps.",
                rank=rank,
                op=call.kind,
                sequence=call.sequence,
            )
        return CollectiveMismatchError(
            f"{call.title}: {name} has left the step in which worker {own} made this call. Every "
            "replica must make the same calls in the same order.",
            rank=rank,
            op=call.kind,
            sequence=call.sequence,
        )
