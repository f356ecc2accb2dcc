"""One run of a graph's operations in a task, and the resources that the task keeps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ndistribute.autodiff.tape import Pullback
from ndistribute.errors import DeadlineExceededError
from ndistribute.parameter_server.shared import SharedVariables

T = TypeVar("T")
Node = Any
"""An operation as its kernel sees it: a `PlanNode`, whose module imports the kernels."""
_LOOK_SECONDS = 0.05  # Between looks at other tasks in an operation that takes long.


class Resources:
    """The resources of a task between steps: variables, those of its server's store, and others."""

    def __init__(self, variables: SharedVariables | None = None) -> None:
        self.variables = SharedVariables() if variables is None else variables
        self._lock = threading.Lock()
        self._kept: dict[tuple[str, str, str], Any] = {}

    def get(self, kind: str, name: str, make: Callable[[], T], session: str = "") -> T:
        """Return the resource of a kind and a name, for a session or all; create it if missing."""
        key = (session, kind, name)
        value = self._kept.get(key)
        if value is None:
            with self._lock:
                value = self._kept.setdefault(key, make())
        return value  # type: ignore[no-any-return]

    def forget(self, session: str) -> None:
        """Drop the resources of a session."""
        with self._lock:
            self._kept = {key: value for key, value in self._kept.items() if key[0] != session}

    def clear(self) -> None:
        """Drop everything."""
        with self._lock:
            self._kept.clear()
        self.variables.clear()


class Step:
    """One run of a plan, with the facts for its kernels and a way to end it early."""

    def __init__(
        self,
        resources: Resources,
        *,
        session: str = "",
        functions: Mapping[str, Callable[..., Any]] | None = None,
        outside: Any = None,
        timeout: float | None = None,
    ) -> None:
        self.resources, self.session = resources, session
        self.functions = functions or {}
        self.outside = outside  # The other tasks that take part; None: there are none.
        self.pullbacks: dict[str, tuple[Sequence[Any], Pullback, bool]] = {}
        """By operation: its inputs, the function that computes its gradients, if several do so."""
        self.error: BaseException | None = None
        self.on_abort: list[Callable[[], None]] = []  # Called once when the step fails.
        self._lock = threading.Lock()
        self._looks = time.monotonic() + _LOOK_SECONDS
        self._ends = None if timeout is None else time.monotonic() + timeout

    def kept(self, kind: str, name: str, make: Callable[[], T]) -> T:
        """Return a resource of this step's session, see `Resources.get`."""
        return self.resources.get(kind, name, make, self.session)

    def abort(self, error: BaseException) -> None:
        """Make the step fail; the first error counts."""
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            calls, self.on_abort = self.on_abort, []
        for call in calls:
            call()

    def check(self) -> None:
        """Raise an error if the step has failed elsewhere; called within long operations."""
        if self.error is None and (now := time.monotonic()) > self._looks:
            self._looks = now + _LOOK_SECONDS
            self.check_outside()
        if self.error is not None:
            raise self.error

    def check_outside(self) -> None:
        """Abort the step if another task has failed or ended, or if it takes too long."""
        if self._ends is not None and time.monotonic() > self._ends:
            self.abort(DeadlineExceededError("the step took longer than its timeout."))
        elif self.outside is not None:
            self.outside.check(self)
