"""`Groups`: who takes part, so that those who wait learn that somebody left."""

from __future__ import annotations

from dataclasses import dataclass, field

from ndistribute.cluster.protocol.requests import Quorum

__all__ = ["Group", "Groups"]


@dataclass
class Group:
    """Hold the members that are there, and how many there were at most at a time."""

    members: dict[str, None] = field(default_factory=dict)
    peak: int = 0
    last_to_leave: str = ""


class Groups:
    """Hold groups by name.

    >>> groups = Groups()
    >>> for client in ("a", "b"):
    ...     groups.join("workers", client)
    >>> groups.leave("a")
    >>> groups.what_is_missing(Quorum("workers", 2))
    "group 'workers' had 2 member(s), of which 'a' left last; 1 of 2 needed are there."
    """

    def __init__(self) -> None:
        self.by_name: dict[str, Group] = {}

    def join(self, name: str, client: str) -> None:
        """Add a member; who left an empty group belongs to work that is over."""
        group = self.by_name.setdefault(name, Group())
        if not group.members:
            group.peak = 0
        group.members[client] = None
        group.peak = max(group.peak, len(group.members))

    def leave(self, client: str) -> None:
        """Take a client out of all groups."""
        for group in self.by_name.values():
            if client in group.members:
                del group.members[client]
                group.last_to_leave = client

    def what_is_missing(self, quorum: Quorum | None) -> str | None:
        """Say what a request that waits for a quorum should know, None while it may come true."""
        group = self.by_name.get(quorum.group) if quorum is not None else None
        if quorum is None or group is None:
            return None
        if group.peak < quorum.members or len(group.members) >= quorum.members:
            return None
        return (
            f"group {quorum.group!r} had {group.peak} member(s), of which {group.last_to_leave!r} "
            f"left last; {len(group.members)} of {quorum.members} needed are there."
        )
