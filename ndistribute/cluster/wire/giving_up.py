"""What a client tells its user when a server did not answer in time."""

from __future__ import annotations

import time

from ndistribute.cluster.wire.guard import UnknownSessionError
from ndistribute.cluster.wire.transport import UnreachableError
from ndistribute.errors import (
    AuthenticationError,
    CollectiveTimeoutError,
    DistributeError,
    WorkerLostError,
)

__all__ = ["gave_up"]


def gave_up(
    client: str, server: str, start: float, problem: Exception | None, *, closed: bool
) -> DistributeError:
    """Return the error of a call that was tried until its time was over.

    Args:
        client: its name.
        server: which one, and where.
        start: when the call began, on the clock of ``time.monotonic``.
        problem: what was in the way last; None: the server was there and had no answer yet.
        closed: whether the client itself was closed meanwhile.
    """
    if closed:
        return WorkerLostError(f"This client of {server} was closed while a call was on its way.")
    seconds, why = time.monotonic() - start, str(problem or "").rstrip(".")
    if isinstance(problem, UnreachableError):
        return WorkerLostError(
            f"{client} did not reach {server} in {seconds:.1f} s: {why}. Check that it runs, and "
            "that both use TLS or neither; a longer timeout waits for its return."
        )
    if isinstance(problem, UnknownSessionError):
        return AuthenticationError(f"{server} let {client} in and knew it no more: {why}.")
    late = f"{server} did not answer {client} in {seconds:.1f} s"
    return CollectiveTimeoutError(f"{late}: {why}." if why else f"{late}.")
