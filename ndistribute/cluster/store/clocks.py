"""`Clocks`: how far each member of a group is, so that none gets too far ahead of the last.

The clock of stale synchronous training: a member says which step it is about to begin. A client's
name up to a ``#`` says which member it is, so one that starts again takes its own place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ndistribute.cluster.protocol.requests import AwaitClock
from ndistribute.cluster.store.refusal import Refused

__all__ = ["Clock", "Clocks", "Group"]


@dataclass
class Clock:
    """Hold how far a member is: what it said, and by how much it is counted as further."""

    client: str
    said: int
    ahead: int = 0

    @property
    def value(self) -> int:
        """Return the step with which the member is counted."""
        return self.said + self.ahead


@dataclass
class Group:
    """Hold the clocks of the members that are there, and all members that ever came."""

    present: dict[str, Clock] = field(default_factory=dict)
    came: dict[str, None] = field(default_factory=dict)


class Clocks:
    """Hold groups of clocks by name.

    >>> from ndistribute.cluster.protocol.requests import Origin
    >>> clocks = Clocks()
    >>> step = [AwaitClock(Origin("any", 1), "g", clock, slack=1, count=2) for clock in range(3)]
    >>> clocks.arrive("a#1", step[0])
    >>> clocks.reached("a#1", step[0]) is None
    True
    >>> clocks.arrive("b#1", step[0])
    >>> clocks.arrive("a#1", step[1])
    >>> clocks.reached("a#1", step[1])
    2
    """

    def __init__(self) -> None:
        self.by_name: dict[str, Group] = {}

    def arrive(self, client: str, request: AwaitClock) -> None:
        """Note that a client is about to begin a step.

        Raises:
            Refused: the numbers make no sense.
        """
        if request.clock < 0 or request.slack < 0 or request.count < 1:
            raise Refused(
                "mismatch",
                f"clock {request.name!r} takes steps and a slack from 0 and a count from 1, got "
                f"{request.clock}, {request.slack} and {request.count}.",
            )
        group = self.by_name.setdefault(request.name, Group())
        member = _member(client)
        held = group.present.get(member)
        if held is not None and held.client == client:
            held.said = max(held.said, request.clock)
            return
        others = [clock.value for name, clock in group.present.items() if name != member]
        # Counted on from the others' steps: else they would wait while it repeats what they did.
        ahead = max(0, min(others, default=0) - request.clock)
        group.present[member] = Clock(client, request.clock, ahead)
        group.came[member] = None

    def reached(self, client: str, request: AwaitClock) -> int | None:
        """Return how many members there are once a request can be answered, else None."""
        group = self.by_name[request.name]
        clock = group.present.get(_member(client))
        if clock is None or len(group.came) < request.count:
            return None
        if min(held.value for held in group.present.values()) < clock.value - request.slack:
            return None
        return len(group.present)

    def restore(self, name: str, came: Iterable[str], present: Iterable[Clock]) -> None:
        """Hold what a snapshot holds of a group."""
        clocks = {_member(clock.client): clock for clock in present}
        self.by_name[name] = Group(clocks, dict.fromkeys(came))

    def leave(self, client: str) -> None:
        """Count on a client no more."""
        member = _member(client)
        for group in self.by_name.values():
            held = group.present.get(member)
            # Its successor may have come before it was known that it left.
            if held is not None and held.client == client:
                del group.present[member]


def _member(client: str) -> str:
    return client.partition("#")[0]
