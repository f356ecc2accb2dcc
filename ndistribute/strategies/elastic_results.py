"""The outcome of units, and the results of steps and loops, in an elastic job.

A result of `run` has a component for each replica; the components of a lost worker are lost with
it. Values that all workers read together after a loop are the same on all workers. Members keep
these values for newcomers, which skip that loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ndistribute import tree
from ndistribute.collective.meeting import NotAMember
from ndistribute.collective.membership import WorkerReport
from ndistribute.collective.objects import pack, unpack
from ndistribute.devices import Array
from ndistribute.errors import WorkerLostError
from ndistribute.values import PerReplica

T = TypeVar("T")
_MOST_BYTES = 1 << 24  # The limit of all kept results together.

_log = logging.getLogger("ndistribute")


class UnitOutcome(NamedTuple):
    """The outcome of the unit in which the members changed."""

    commits: list[bool]  # For each member, whether its unit is complete.
    source: int  # The member that sends its state to those that lack it.
    lacks: list[bool]  # For each member, whether it lacks the state.
    uncounted: bool = False  # Whether no member knows the sums at the end of the unit.


def outcome_of(reports: Sequence[WorkerReport]) -> UnitOutcome:
    """Return the outcome of a unit, computed from the members' reports in rank order.

    If a member has passed the commit of the unit, all had completed it. Otherwise all run it again,
    with the state of a member that has written nothing or can restore its state. If all have
    completed the unit and none can restore its state, the unit is complete.

    Raises:
        WorkerLostError: members have written part of a step, and none has the state before it.

    >>> a, b = WorkerReport(unit=3, prepared=True, clean=False), WorkerReport(unit=3)
    >>> outcome_of([a, b])  # The second gives its state to the first, and both run the unit again.
    UnitOutcome(commits=[False, False], source=1, lacks=[True, False], uncounted=False)
    """
    present = [k for k, report in enumerate(reports) if not report.newcomer]
    last = max(reports[k].unit for k in present)
    ahead = [k for k in present if reports[k].unit == last]
    newcomers = [report.newcomer for report in reports]
    if len(ahead) < len(present):
        commits = [k in present and k not in ahead for k in range(len(reports))]
        counted = [k for k in ahead if not reports[k].uncounted]
        return UnitOutcome(commits, (counted or ahead)[0], newcomers, uncounted=not counted)
    whole = [k for k in present if reports[k].clean or reports[k].kept]
    if whole:
        lacks = [k not in whole for k in range(len(reports))]
        counted = [k for k in whole if not reports[k].uncounted]
        source = (counted or whole)[0]
        return UnitOutcome([False] * len(reports), source, lacks, uncounted=not counted)
    if all(reports[k].prepared for k in present):
        return UnitOutcome([not new for new in newcomers], present[0], newcomers, uncounted=True)
    raise WorkerLostError(
        "a worker was lost between two updates of one step. No worker has kept the state before "
        "this step, because earlier calls of its function made only one update. Restore the last "
        "checkpoint."
    )


def checked_step(session: Any, step: Callable[[], T], *args: Any) -> Callable[[], T]:
    """Return a step that checks its arguments, and marks its results with their membership.

    Args:
        session: the session of the strategy.
        step: the step.
        args: its arguments.
    """
    changes = session.changes

    def run() -> T:
        if session.changes:
            check_complete(session, args, raises=True)
        values = _per_replica(args) if session.changes != changes else ()
        if values and not (session.input is not None and session.input.holds(values)):
            raise WorkerLostError(
                "the workers have changed, and the arguments of this step cannot be divided "
                "again, because they are not parts of its loop's batch. Iterate over "
                "strategy.elastic(batches), and pass its elements to run."
            )
        results = step()
        for value in _per_replica(results):
            value._changes = session.changes
        return results

    return run


def check_complete(session: Any, value: Any, *, raises: bool) -> None:
    """Raise, or warn once per change, if results of `run` were made before members changed."""
    now = session.changes
    if all(getattr(each, "_changes", now) == now for each in _per_replica(value)):
        return
    text = (
        f"run returned these results before the workers changed ({session.last_change}): the "
        "results of lost workers are missing, and new workers have none. Use results in the step "
        "that makes them, by all_reduce or all_gather of its replica context, or keep them in a "
        "variable or a metric."
    )
    if raises:
        raise WorkerLostError(text)
    if session.warned != now:
        session.warned = now
        _log.warning("%s", text)


def _per_replica(nest: Any) -> list[Any]:
    return [leaf for leaf in tree.flatten(nest) if isinstance(leaf, PerReplica)]


class LoopResults:
    """The values that all workers read together after each loop, by name, in reading order.

    >>> member, newcomer = LoopResults(), LoopResults()
    >>> member.note("a reduction", np.float64(0.5))
    >>> member.end(1)
    >>> newcomer.replay(1, member.of(1))
    >>> float(newcomer.next("a reduction"))
    0.5

    Attributes:
        theirs: the values that others read after a loop that this worker skipped, or None.
    """

    def __init__(self) -> None:
        self._noted: dict[str, list[Array | None]] = {}  # Since the last loop was begun.
        self.theirs: dict[str, list[Array | None]] | None = None
        self._kept: dict[int, bytes] = {}  # By loop.
        self._size, self._room = 0, _MOST_BYTES

    def of(self, loop: int) -> bytes:
        """Return the results of a loop, once a later one has begun."""
        return self._kept.get(loop, b"")

    def note(self, what: str, value: Any) -> None:
        """Record a value or, if it does not fit, only that there was a value."""
        size = sum(getattr(leaf, "nbytes", 0) for leaf in tree.flatten(value))
        data = np.frombuffer(pack(value), np.uint8) if size <= self._room else None
        self._room -= 0 if data is None else data.size
        self._noted.setdefault(what, []).append(data)

    def end(self, loop: int) -> None:
        """Keep the recorded values for newcomers, and begin an empty record."""
        if self._noted:
            self._keep(loop, pack(self._noted))
        self._noted, self.theirs, self._room = {}, None, _MOST_BYTES

    def _keep(self, loop: int, data: bytes) -> None:
        self._kept[loop], self._size = data, self._size + len(data)
        while self._size > _MOST_BYTES:  # Drop the results of the oldest loops.
            self._size -= len(self._kept.pop(next(iter(self._kept))))

    def replay(self, loop: int, data: bytes) -> None:
        """Let `next` return the values that others read after a loop."""
        self.theirs = unpack(data) if data else {}
        self._keep(loop, data)

    def next(self, what: str) -> Any:
        """Return the next value that was read under this name.

        Raises:
            NotAMember: the others have no such value.
        """
        values = (self.theirs or {}).get(what)
        data = values.pop(0) if values else None
        if data is None:
            raise NotAMember(
                f"{what} is not available: it follows a loop that ended before this worker "
                "started. The other workers did not read it there, or it is too large or too old "
                "to be kept. Let all workers read the same values between loops, and read large "
                "values in steps of the loop."
            )
        value = unpack(data.tobytes())
        return tree.map_leaves(lambda x: x.copy() if isinstance(x, np.ndarray) else x, value)
