"""All parameter servers of a job, as a process that uses them sees them.

What concerns several servers is asked of all at once. In a closure changes are kept back and go out
at its end, one transaction to each server; outside one they go out at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import wait
from functools import partial
from typing import TypeVar

from ndistribute.cluster.links.abreast import Abreast
from ndistribute.cluster.links.copy import Copy
from ndistribute.cluster.links.kept import Kept
from ndistribute.cluster.links.link import Link
from ndistribute.cluster.links.origins import current_closure, numbers_of
from ndistribute.cluster.links.totals import Report
from ndistribute.cluster.protocol.replies import Created, Outcome, Released, Step
from ndistribute.cluster.protocol.requests import AwaitClock, AwaitStep, Change, Origin, Quorum
from ndistribute.cluster.protocol.spans import Span
from ndistribute.cluster.wire.tensors import Array

__all__ = ["Changes", "Outcomes", "Servers"]

T = TypeVar("T")

_END_SECONDS = 5.0

Changes = Mapping[int, Sequence[Change]]
"""What to change on which server."""
Outcomes = Mapping[int, tuple[Outcome, ...]]
"""What became of it."""


class Servers:
    """Use parameter servers, from any number of threads at once.

    Args:
        links: one to each server, in the order in which variables are dealt to them; closed with
            this object.

    >>> import numpy as np
    >>> from ndistribute.cluster.serving.local import LocalServer
    >>> from ndistribute.cluster.protocol.requests import Add
    >>> with LocalServer() as server:
    ...     servers = Servers([Link(server.connect("worker:0"), "this process", 60.0)])
    ...     _ = servers.create({0: [("v", np.zeros(2))]})
    ...     servers.change({0: [Add("v", np.ones(2))]}, then=print)
    ...     servers.close()
    {0: (Done(versions=(2,)),)}
    """

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = tuple(links)
        self._kept = Kept(self._send, [link.title for link in self._links])
        self._others = Abreast("ndistribute servers")

    def __len__(self) -> int:
        return len(self._links)

    @property
    def lost_updates(self) -> int:
        """Return how many updates are known to be lost with servers that were killed."""
        return sum(link.lost_updates for link in self._links)

    def restarts(self, server: int) -> int:
        """Return how often a server is known to have been started again."""
        return self._links[server].restarts

    def create(
        self, initial: Mapping[int, Sequence[tuple[str, Array]]]
    ) -> dict[int, list[Created]]:
        """Make variables, but for those that there are; each keeps its first value.

        Args:
            initial: on which server, which names and values.
        """
        return self._each(initial, lambda i, link: link.create(initial[i]))

    def pull(self, copies: Mapping[int, Sequence[Copy]]) -> None:
        """Bring copies up to date.

        Args:
            copies: of which server, which.
        """
        names = {copy.server_name for some in copies.values() for copy in some}
        self._kept.flush_before(names)
        # One after the other what is only copied: a change of threads would cost more than it.
        far = [i for i, some in copies.items() if not self._links[i].look(some)]
        self._each(far, lambda i, link: link.pull(copies[i]))

    def read_rows(
        self, asked: Mapping[int, Sequence[tuple[Copy, Array]]]
    ) -> dict[int, list[Array]]:
        """Return rows of variables, in the order asked; the copies only learn the versions.

        Args:
            asked: of which server, of which variables which rows: indices of one axis, from 0, that
                may repeat.
        """
        self._kept.flush_before({copy.server_name for some in asked.values() for copy, _ in some})
        return self._each(asked, lambda i, link: link.read_rows(asked[i]))

    def change(self, changes: Changes, then: Callable[[Outcomes], None] | None = None) -> None:
        """Make changes: on each server all or none, in a closure at its end.

        Args:
            changes: on which server, which. Their arrays are not changed, and in a closure copied.
            then: called with what became of them, once that is known.
        """
        running = current_closure()
        if running is not None:
            self._kept.add(running, changes, then)
            return
        outcomes = self._each(changes, lambda i, link: link.transact(changes[i]))
        if then is not None:
            then(outcomes)

    def together(self, servers: Iterable[int], do: Callable[[int], T]) -> dict[int, T]:
        """Do something for each of several servers, for all at once.

        Args:
            servers: which.
            do: called with each, in threads; it may ask that server alone.
        """
        return self._each(servers, lambda i, _: do(i))

    def greet(self) -> None:
        """Wait until all servers are up; from now on they know whether this process lives."""
        self._each(self._all, lambda _, link: link.greet())

    def join_group(self, group: str) -> None:
        """Become a member of a group that others may wait for, on every server."""
        self._each(self._all, lambda _, link: link.join_group(group))

    def await_step(self, steps: Mapping[int, tuple[str, int]], quorum: Quorum) -> dict[int, int]:
        """Wait until aggregates have come to a step, and return at which each is.

        Args:
            steps: on which server, the name of which aggregate, and the step.
            quorum: whom that depends on.
        """

        def await_one(server: int, link: Link) -> int:
            name, step = steps[server]
            with link.numbered() as origin:
                reply: Step = link.request(AwaitStep(origin, name, step, quorum))
            return reply.value

        return self._each(steps, await_one)

    def await_clock(self, group: str, clock: int, slack: int, count: int) -> int:
        """Wait until nobody of a group is too far behind, and return how many it has.

        Args:
            group: its name.
            clock: this process's step, from 0.
            slack: how many steps others may be behind.
            count: how many members the group has.
        """
        with self._links[0].numbered() as origin:
            reply: Released = self._links[0].request(AwaitClock(origin, group, clock, slack, count))
        return reply.count

    def learn(self, reports: Iterable[Report]) -> None:
        """Take what another process knows of the servers."""
        links = {link.title: link for link in self._links}
        for report in reports:
            if report.server in links:
                links[report.server].learn(report)

    def acknowledge(self, series: str, ended: Iterable[Span]) -> None:
        """Promise not to repeat closures.

        Args:
            series: of the coordinator.
            ended: the numbers of those that are over.
        """
        numbers = [numbers_of(closures) for closures in ended]
        self._each(self._all, lambda _, link: link.acknowledge(series, numbers))

    def save_snapshots(self) -> None:
        """Let every server write what it holds to its disk, and wait until it did.

        Raises:
            DistributeError: a server was given no directory for it.
        """
        self._each(self._all, lambda _, link: link.save_snapshot())

    def close(self) -> None:
        """Say good-bye to the servers; a second call does nothing."""
        for link in self._links:  # What is under way there ends by this.
            link.close()
        self._others.close(_END_SECONDS)

    @property
    def _all(self) -> range:
        return range(len(self._links))

    def _send(self, changes: Changes, origins: Mapping[int, Origin]) -> Outcomes:
        return self._each(changes, lambda i, link: link.transact(changes[i], origins[i]))

    def _each(self, servers: Iterable[int], call: Callable[[int, Link], T]) -> dict[int, T]:
        """Make a call to each of several servers, all at once; raise an error after all ended.

        An interrupt is not held up by servers that are away.
        """
        chosen = list(servers)
        if len(chosen) == 1:  # No thread is needed, and changing to one would cost the most.
            return {chosen[0]: call(chosen[0], self._links[chosen[0]])}
        if not chosen:
            return {}
        first, *more = chosen
        flying = {i: self._others.start(partial(call, i, self._links[i])) for i in more}
        try:
            replies = {first: call(first, self._links[first])}
        except Exception:
            wait(flying.values())
            raise
        wait(flying.values())
        return replies | {i: future.result() for i, future in flying.items()}
