"""The progress of this process through steps and calls, and the progress that others report.

The code here sends and receives no messages. The control plane does that, and asks here which
processes are late or gone.
"""

from __future__ import annotations

from collections.abc import Sequence

# A call: the position of its step, as in `StepTracker.position`, and its number in the step.
Place = tuple[int, int]

BEFORE_ALL: Place = (0, 0)
END = 1 << 30  # Above the calls of any step: every process that leaves a step has skipped it.


class StepTracker:
    """The progress of this process through steps and calls, and the reports of the others.

    Attributes:
        position: the number of step starts and step ends so far; it is odd inside a step.
        finished: the last completed call of the current step, or, outside of a step, of the last
            step.
        before: the last completed call of the step before that.
        exchanged: as `finished`, but only of calls in which all processes communicate, or which
            write variables.
        total: the sum of `exchanged` over earlier steps; equal totals mean equal calls.
        made: the last call that this process is known to have made.
        departed: the reasons of the processes that have left, by rank.
    """

    def __init__(self) -> None:
        self.departed: dict[int, str] = {}
        self.start_over()

    def start_over(self) -> None:
        """Reset all counts, as all processes do after a failure."""
        self.position = self.finished = self.before = self.exchanged = self.total = 0
        self.made = BEFORE_ALL
        self._reached: dict[int, Place] = {}
        self._skipped: set[tuple[int, Place]] = set()

    @property
    def anyone_gone(self) -> bool:
        """Whether any process has left the job, or has skipped a call of the current step."""
        return bool(self.departed or self._skipped)

    @property
    def inside(self) -> bool:
        """Whether this process is inside a step."""
        return self.position % 2 == 1

    @property
    def last(self) -> Place:
        """The place of the last completed call; call 0 is the start of the step."""
        return self.position if self.inside else self.position - 1, self.finished

    def begin_step(self) -> None:
        """Start the next step, and forget which processes skipped calls of the last one."""
        self._skipped.clear()
        self.position += 1
        self.before = self.finished
        self.finished = self.exchanged = 0

    def end_step(self) -> None:
        """End a step: this process makes no more calls in it."""
        self.total += self.exchanged
        self.position += 1

    def has_made(self, place: Place) -> bool | None:
        """Return whether this process made a call, or None while that is unknown."""
        # This order matters: a call is recorded in `made` before its step ends.
        left = self.position > place[0]
        if self.made >= place and place[1] != END:
            return True
        return False if left else None

    def note(self, rank: int, place: Place, made: bool) -> None:
        """Record that a process has made a call, or has left the step without making it."""
        if made:
            self._reached[rank] = max(place, self._last(rank))
        else:
            self._skipped.add((rank, place))

    def note_departed(self, rank: int, reason: str, made: Place) -> None:
        self.note(rank, made, True)
        self.departed[rank] = reason

    def gone(self, place: Place) -> set[int]:
        """Return the ranks that will not make a call and whose data has not arrived either."""
        left = {rank for rank, skipped in list(self._skipped) if skipped == place}
        return left.union(rank for rank in list(self.departed) if self._last(rank) < place)

    def late(self, place: Place, absent: Sequence[int], others: Sequence[int]) -> list[int]:
        """Return the ranks that delay a call: those of `absent` that have not made it."""
        silent = [rank for rank in others if self._last(rank) < place]
        return [rank for rank in absent if rank in silent] or silent or list(absent)

    def _last(self, rank: int) -> Place:
        return self._reached.get(rank, BEFORE_ALL)
