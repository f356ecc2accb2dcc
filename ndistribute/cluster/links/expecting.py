"""From what a server answered to what was asked for, or to the exception that says why not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ndistribute.cluster.protocol.replies import Failure, Value
from ndistribute.cluster.wire.tensors import Array
from ndistribute.errors import DistributeError, WorkerLostError

__all__ = ["array_of", "error_of", "expected"]

R = TypeVar("R")


def expected(kind: type[R], reply: Any) -> R:
    """Return a reply of the kind that is expected.

    Raises:
        DistributeError: it is of another.
    """
    if not isinstance(reply, kind):
        raise DistributeError(f"a server answered {reply!r} where a {kind.__name__} was expected.")
    return reply


def array_of(reply: Any) -> Array:
    """Return the array that a reply to a read must hold.

    Raises:
        DistributeError: it holds none.
    """
    value = expected(Value, reply)
    if value.array is None:
        raise DistributeError("a server answered a read without what was read.")
    return value.array


def error_of(failure: Failure, title: str) -> Exception:
    """Return the exception that a failure means.

    Args:
        failure: what a server answered.
        title: the server.
    """
    make: dict[str, Callable[[str], Exception]] = {
        "mismatch": ValueError,
        "left": WorkerLostError,
    }
    hint = ""
    if failure.kind == "unknown":
        hint = (
            " If the server was started again, what it held is lost: give servers a directory for "
            "snapshots."
        )
    return make.get(failure.kind, DistributeError)(f"{title}: {failure.message}{hint}")
