"""`RemoteValue`: the result of a function that a worker runs, perhaps not there yet."""

from __future__ import annotations

import threading
from typing import Any

from ndistribute.cluster.coordination import standins
from ndistribute.cluster.coordination.pickles import Pickled, load
from ndistribute.errors import CollectiveTimeoutError

__all__ = ["RemoteValue"]


class RemoteValue:
    """Stand for the result of a function that was given to `ClusterCoordinator.schedule`.

    It may be an argument of another scheduled function, which gets the value then; that one goes
    from worker to worker and is never unpickled here.

    >>> import ndistribute as nd
    >>> strategy = nd.ParameterServerStrategy()
    >>> with strategy, nd.ClusterCoordinator(strategy) as coordinator:
    ...     three = coordinator.schedule(lambda: 3)
    ...     four = coordinator.schedule(lambda x: x + 1, args=(three,))
    ...     four.fetch()
    4
    """

    def __init__(self, owner: object, name: str) -> None:
        self._owner = owner
        self._name = name
        self._lock = threading.Lock()
        self._arrived: threading.Event | None = None  # Made when somebody waits: most are not.
        self._payload: Pickled | None = None
        self._error: Exception | None = None
        self._value: Any = None
        self._loaded = False

    def done(self) -> bool:
        """Say whether the function has returned or raised, or was cancelled."""
        return self._payload is not None or self._error is not None

    def fetch(self, timeout: float | None = None) -> Any:
        """Return the result, once it is there; always the same object.

        Args:
            timeout: seconds to wait; None: as long as it takes.

        Raises:
            CollectiveTimeoutError: it was not there in time.
            concurrent.futures.CancelledError: an earlier function raised before this one ran.
            Exception: what the function raised.
        """
        if not self.done():
            self._wait(timeout)
        if self._error is not None:
            raise self._error
        with self._lock:
            if not self._loaded and self._payload is not None:
                self._value, self._loaded = load(self._payload), True
            return self._value

    get = fetch

    @property
    def payload(self) -> Pickled | None:
        """Return the result as it came, None where there is none."""
        return self._payload

    @property
    def error(self) -> Exception | None:
        """Return why there is no result and never will be one."""
        return self._error

    def belongs_to(self, owner: object) -> bool:
        """Say whether a coordinator made this."""
        return self._owner is owner

    def settle(self, outcome: Pickled | Exception) -> None:
        """Take what became of the function."""
        with self._lock:
            if isinstance(outcome, Exception):
                self._error = outcome
            else:
                self._payload = outcome
            if self._arrived is not None:
                self._arrived.set()

    def _wait(self, timeout: float | None) -> None:
        with self._lock:
            if self.done():
                return
            if self._arrived is None:
                self._arrived = threading.Event()
            arrived = self._arrived
        if not arrived.wait(timeout=timeout):
            raise CollectiveTimeoutError(
                f"The result of {self._name} was not there after {timeout} s. It may still come; "
                "join() says if its workers are gone."
            )

    def __reduce__(self) -> standins.StandIn:
        collector = standins.collector_for("A RemoteValue")
        collector.values.append(self)
        return standins.stand_in("value", len(collector.values) - 1)

    def __repr__(self) -> str:
        state = "failed" if self._error is not None else "done" if self.done() else "pending"
        return f"<RemoteValue of {self._name}, {state}>"
