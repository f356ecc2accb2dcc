"""When one worker's update becomes everybody's: at once, within bounds, or together with others'.

Updates go to the servers through here, and this is where a worker waits for others.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping

from ndistribute.errors import CollectiveTimeoutError
from ndistribute.parameter_server.client import Servers, Then
from ndistribute.parameter_server.messages import Aggregate, Apply, AwaitClock, AwaitStep, Outcome

__all__ = ["UpdateMode", "update_mode_of"]

Applies = Mapping[int, Apply]


class UpdateMode:
    """Send the updates of one worker: each as it is, and wait for nobody."""

    together = False
    """Whether several workers' updates make one step."""
    namespace = ""
    """What tells the strategy's own names on the servers from others', set once it is known."""

    def push(self, servers: Servers, name: str, applies: Applies, then: Then) -> None:
        """Send an update of an optimizer of a name; `then` is called with what became of it."""
        servers.change({server: [apply] for server, apply in applies.items()}, then)


def update_mode_of(
    workers: int,
    replicas_to_aggregate: int | None,
    total_num_replicas: int | None,
    max_staleness: int | None,
    *,
    coordinated: bool,
    timeout: float,
) -> UpdateMode:
    """Return how one of some workers sends its updates; see `ParameterServerStrategy`.

    Those that a chief sends functions to, as `coordinated` tells, never wait for each other.

    Raises:
        ValueError: the numbers do not fit.
    """
    if replicas_to_aggregate is None and total_num_replicas is not None:
        raise ValueError("total_num_replicas is of use with replicas_to_aggregate only.")
    if replicas_to_aggregate is None and max_staleness is None:
        return UpdateMode()
    if coordinated:
        raise ValueError(
            "replicas_to_aggregate and max_staleness let workers wait for each other, which "
            "functions sent by a chief must not: leave the chief out of the cluster, so that each "
            "worker runs its own loop."
        )
    if max_staleness is not None:
        if replicas_to_aggregate is not None:
            raise ValueError("give replicas_to_aggregate or max_staleness, not both.")
        if max_staleness < 0:
            raise ValueError(f"max_staleness must be 0 or more, got {max_staleness}.")
        return _Bounded(max_staleness, workers)
    needed = replicas_to_aggregate or 0
    total = needed if total_num_replicas is None else total_num_replicas
    if not 1 <= needed <= total <= workers:
        raise ValueError(
            f"replicas_to_aggregate={needed} of total_num_replicas={total}: there must be at least "
            f"1, and no more of either than the {workers} worker(s) of the cluster."
        )
    return _Synchronous(needed, timeout)


@contextlib.contextmanager
def _naming(what: str) -> Iterator[None]:
    """Say in the error of a wait that took too long what was waited for."""
    try:
        yield
    except CollectiveTimeoutError as error:
        raise CollectiveTimeoutError(f"This worker waited for {what}: {error}") from error


class _Bounded(UpdateMode):
    """Begin no step too far ahead of others."""

    def __init__(self, slack: int, workers: int) -> None:
        self._slack, self._workers = slack, workers
        self._clock = 0

    def push(self, servers: Servers, name: str, applies: Applies, then: Then) -> None:
        if not self._clock:
            self._wait(servers)
        super().push(servers, name, applies, then)
        self._clock += 1
        self._wait(servers)

    def _wait(self, servers: Servers) -> None:
        with _naming(f"worker(s) that are more than {self._slack} step(s) behind"):
            wait = AwaitClock(f"{self.namespace}workers", self._clock, self._slack, self._workers)
            # One that begins anew goes on from where the others are.
            self._clock = servers.ask({0: wait})[0].value


class _Synchronous(UpdateMode):
    """Let the mean of several workers' updates make a step, and wait until it is made."""

    together = True

    def __init__(self, needed: int, timeout: float) -> None:
        self._needed, self._timeout = needed, timeout
        self._steps: dict[tuple[str, int], int] = {}

    def push(self, servers: Servers, name: str, applies: Applies, then: Then) -> None:
        aggregate, needed = self.namespace + name, self._needed
        deadline = time.monotonic() + self._timeout
        outcomes: dict[int, tuple[Outcome, ...]] = {}
        # A worker that comes later learns the step from having its first gradients dropped.
        waiting = {server: self._steps.get((name, server), 0) for server in applies}
        lacking: Iterable[int] = waiting  # The servers that have not this worker's gradients.
        while waiting:
            if time.monotonic() > deadline:
                raise CollectiveTimeoutError(
                    f"the step of {name!r} was not made in {self._timeout:g} s."
                )
            given = {i: [Aggregate(aggregate, waiting[i], needed, applies[i])] for i in lacking}
            servers.change(given, outcomes.update)
            lacking = ()
            awaited = {i: AwaitStep(aggregate, step + 1, needed) for i, step in waiting.items()}
            with (
                _naming(f"{needed} workers' gradients for a step of {name!r}"),
                contextlib.closing(servers.replies(awaited)) as replies,
            ):
                for server, reply in replies:
                    if reply.value <= waiting[server]:
                        # The server was restored from a snapshot, and has lost this worker's
                        # gradients. Others may wait for them there before they give theirs to
                        # another server, so this worker must not wait for that one first.
                        lacking = (server,)
                        break
                    self._steps[name, server] = reply.value
                    del waiting[server]
        then(outcomes)
