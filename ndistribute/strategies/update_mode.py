"""Update modes of parameter servers: asynchronous, bounded staleness, synchronous.

A worker sends its updates through an update mode, which makes it wait for other workers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping

from ndistribute.errors import CollectiveTimeoutError
from ndistribute.mistakes import count_of
from ndistribute.parameter_server.client import Servers, Then
from ndistribute.parameter_server.messages import Aggregate, Apply, AwaitClock, AwaitStep, Outcome

Applies = Mapping[int, Apply]


class UpdateMode:
    """The asynchronous mode: a worker sends each update and waits for no other worker."""

    #: Whether one step combines the updates of several workers.
    together = False
    #: The prefix of the strategy's names on the servers, which the strategy sets later.
    namespace = ""

    def push(self, servers: Servers, name: str, applies: Applies, then: Then) -> None:
        """Send an update of the optimizer `name`, and call `then` with the servers' outcomes."""
        servers.change({server: [apply] for server, apply in applies.items()}, name, then)


def update_mode_of(
    workers: int,
    replicas_to_aggregate: int | None,
    total_num_replicas: int | None,
    max_staleness: int | None,
    coordinated: bool,
    timeout: float,
) -> UpdateMode:
    """Return the update mode of one of `workers` workers; see `ParameterServerStrategy`."""
    if replicas_to_aggregate is None and total_num_replicas is not None:
        raise ValueError("total_num_replicas needs replicas_to_aggregate: pass both.")
    if replicas_to_aggregate is None and max_staleness is None:
        return UpdateMode()
    if coordinated:
        raise ValueError(
            "replicas_to_aggregate and max_staleness make workers wait for each other, which "
            "functions sent by a chief must not do: remove the chief from the cluster, so that "
            "each worker runs its own loop."
        )
    if max_staleness is not None:
        if replicas_to_aggregate is not None:
            raise ValueError("pass replicas_to_aggregate or max_staleness, not both.")
        if max_staleness < 0:
            raise ValueError(f"max_staleness must be 0 or more, got {max_staleness}.")
        return _Bounded(max_staleness, workers)
    needed = replicas_to_aggregate or 0
    total = needed if total_num_replicas is None else total_num_replicas
    if not 1 <= needed <= total <= workers:
        raise ValueError(
            f"replicas_to_aggregate={needed} and total_num_replicas={total}: both must be between "
            f"1 and the number of workers in the cluster, {workers}, and the first must not "
            "exceed the second."
        )
    return _Synchronous(needed, timeout)


@contextlib.contextmanager
def _naming(what: str) -> Iterator[None]:
    """Add what the worker waited for to the message of a timeout in a ``with`` block."""
    try:
        yield
    except CollectiveTimeoutError as error:
        raise CollectiveTimeoutError(f"This worker waited for {what}: {error}") from error


class _Bounded(UpdateMode):
    """The mode of bounded staleness: a worker waits if it is too many steps ahead of others."""

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
        with _naming(f"workers that are more than {count_of(self._slack, 'step')} behind"):
            wait = AwaitClock(f"{self.namespace}workers", self._clock, self._slack, self._workers)
            # A restarted worker continues from the step of the others.
            self._clock = servers.ask({0: wait})[0].value


class _Synchronous(UpdateMode):
    """The synchronous mode: a step applies the mean of several workers' updates; all wait."""

    together = True

    def __init__(self, needed: int, timeout: float) -> None:
        self._needed, self._timeout = needed, timeout
        self._steps: dict[tuple[str, int], int] = {}

    def push(self, servers: Servers, name: str, applies: Applies, then: Then) -> None:
        aggregate, needed = self.namespace + name, self._needed
        deadline = time.monotonic() + self._timeout
        outcomes: dict[int, tuple[Outcome, ...]] = {}
        # A worker that starts later learns the current step when its first gradients are dropped.
        waiting = {server: self._steps.get((name, server), 0) for server in applies}
        lacking: Iterable[int] = waiting  # Servers without this worker's gradients.
        while waiting:
            if time.monotonic() > deadline:
                text = f"the step of {name!r} was not complete after {self._timeout:g} s."
                raise CollectiveTimeoutError(text)
            changes = {i: [Aggregate(aggregate, waiting[i], needed, applies[i])] for i in lacking}
            servers.change(changes, name, outcomes.update)
            lacking = ()
            awaited = {i: AwaitStep(aggregate, step + 1, needed) for i, step in waiting.items()}
            named = _naming(f"{needed} workers' gradients for a step of {name!r}")
            with named, contextlib.closing(servers.replies(awaited)) as replies:
                for server, reply in replies:
                    if reply.value <= waiting[server]:
                        # The server was restored from a snapshot and lost this worker's gradients.
                        # Other workers may wait for them there before they send theirs to another
                        # server, so this worker must not wait for that other server first.
                        lacking = (server,)
                        break
                    self._steps[name, server] = reply.value
                    del waiting[server]
        then(outcomes)
