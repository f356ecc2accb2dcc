"""The form in which a thread gets losses: shares of the batch's loss, or means of a replica."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from ndistribute.autodiff import untrack
from ndistribute.context import get_replica_context


class _Form(threading.local):
    """The form in which a thread gets losses, see `as_means`, and its last loss."""

    of_gradient: str | None = None  # None: they are shares.
    untold: Any = None  # The arguments of `TotalLoss.count` that are not counted yet.


form = _Form()


@contextlib.contextmanager
def as_means(of_gradient: str) -> Iterator[None]:
    """Return a context manager; in its block losses are means, for a step that a model defines.

    The strategy averages the numbers that replicas log, and adds up the gradients that they apply.
    So the mean of the logged losses must be the loss of the batch, and the sum of the gradients
    must be its gradient, however the batch is divided.

    Args:
        of_gradient: ``"share"`` if the step applies gradients, ``"mean"`` if its caller divides
            them.
    """
    form.of_gradient, before = of_gradient, form.of_gradient
    try:
        yield
    finally:
        form.of_gradient = before


def in_form(share: Any) -> Any:
    """Return a replica's share of a loss in the form that the step needs; see `as_means`."""
    replica = None if form.of_gradient is None else get_replica_context()
    if replica is None or replica.num_replicas_in_sync == 1:
        return share
    if form.of_gradient == "mean":
        return share * replica.num_replicas_in_sync
    return share + untrack(share) * (replica.num_replicas_in_sync - 1)
