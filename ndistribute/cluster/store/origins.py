"""`Windows`: which numbers of each series were answered, so that nothing is done twice.

The answers themselves are remembered until the owner of the series says that it has them; from
then on a repetition can only be an old message that was under way for long.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ndistribute.cluster.protocol.replies import Failure, Reply
from ndistribute.cluster.protocol.requests import Origin
from ndistribute.cluster.protocol.spans import Span, Spans
from ndistribute.cluster.store.limits import Limits
from ndistribute.cluster.store.refusal import Refused

__all__ = ["Window", "Windows", "bytes_in"]

_OLD = Failure("acknowledged", "this number was acknowledged; its answer is no longer kept.")


@dataclass
class Window:
    """Hold the answers of a series, but for the numbers that were acknowledged."""

    acknowledged: Spans = field(default_factory=Spans)
    replies: dict[int, Reply] = field(default_factory=dict)
    nbytes: int = 0


class Windows:
    """Hold a window for each series."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.by_series: dict[str, Window] = {}

    def answer_to(self, origin: Origin) -> Reply | None:
        """Return the answer that an origin had already, None for one that is new.

        Raises:
            Refused: a number must be 1 or more.
        """
        if origin.number < 1:
            raise Refused("mismatch", f"numbers of a series start from 1, got {origin.number}.")
        window = self.by_series.get(origin.series)
        if window is None:
            return None
        if origin.number in window.acknowledged:
            return _OLD
        return window.replies.get(origin.number)

    def check_room(self, origin: Origin, waiting: int) -> None:
        """Check that one more answer can be remembered.

        Args:
            origin: of the request.
            waiting: how many requests of the series wait for theirs.

        Raises:
            Refused: it can not.
        """
        window = self.by_series.get(origin.series)
        if window is None:
            self._check_new()
            window = Window()
        if (
            len(window.replies) + waiting >= self._limits.replies
            or window.nbytes >= self._limits.reply_bytes
        ):
            raise Refused(
                "full",
                f"{len(window.replies)} answer(s) to {origin.series!r} are remembered and "
                f"{waiting} waited for; acknowledge those that came.",
            )

    def remember(self, origin: Origin, reply: Reply) -> None:
        """Keep the answer to an origin."""
        window = self.by_series.setdefault(origin.series, Window())
        if origin.number not in window.acknowledged:
            window.replies[origin.number] = reply
            window.nbytes += bytes_in(reply)

    def acknowledge(self, series: str, number: int, beyond: Iterable[Span] = ()) -> None:
        """Forget the answers up to a number, and some beyond; only that they were given is known.

        Raises:
            Refused: the series is new, and one too many; or the numbers make no sense.
        """
        spans = [Span(1, number), *beyond] if number > 0 else list(beyond)
        if not all(1 <= span.first <= span.last for span in spans):
            raise Refused("mismatch", "a span of numbers goes from 1 or more to no less.")
        if series not in self.by_series:
            self._check_new()
        window = self.by_series.setdefault(series, Window())
        if len(window.acknowledged) + len(spans) > self._limits.replies:
            raise Refused("full", f"numbers of {series!r} are acknowledged with too many gaps.")
        for span in spans:
            window.acknowledged.add(span)
        for old in [key for key in window.replies if key in window.acknowledged]:
            window.nbytes -= bytes_in(window.replies.pop(old))

    def restore(self, series: str, acknowledged: Iterable[Span], replies: dict[int, Reply]) -> None:
        """Hold what a snapshot holds of a series."""
        nbytes = sum(bytes_in(reply) for reply in replies.values())
        self.by_series[series] = Window(Spans(acknowledged), replies, nbytes)

    def close(self, series: str) -> None:
        """Forget a series that nothing is taken from any more."""
        self.by_series.pop(series, None)

    def _check_new(self) -> None:
        if len(self.by_series) >= self._limits.series:
            raise Refused("full", f"the server knows {len(self.by_series)} series already.")


def bytes_in(record: Any) -> int:
    """Return how many bytes of arrays a record holds."""
    if isinstance(record, np.ndarray):
        return record.nbytes
    if isinstance(record, tuple):
        return sum(bytes_in(item) for item in record)
    if dataclasses.is_dataclass(record):
        fields = dataclasses.fields(record)
        return sum(bytes_in(getattr(record, field.name)) for field in fields)
    return 0
