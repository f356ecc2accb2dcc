"""Sets of whole numbers of which most follow each other, as few spans."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["Span", "Spans"]


@dataclass(frozen=True, slots=True)
class Span:
    """All numbers from one to another, both included."""

    first: int
    last: int


class Spans:
    """Hold numbers; what they take grows with the gaps between them.

    Args:
        spans: of the numbers that it holds at first.

    >>> spans = Spans([Span(1, 3), Span(7, 9)])
    >>> spans.add(Span(4, 5))
    >>> list(spans)
    [Span(first=1, last=5), Span(first=7, last=9)]
    >>> 5 in spans, 6 in spans
    (True, False)
    """

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        for span in spans:
            self.add(span)

    def add(self, span: Span) -> None:
        """Add the numbers of a span."""
        first, last = span.first, span.last
        # Those from start to stop touch it, and become one with it.
        start = bisect_left(self._lasts, first - 1)
        stop = bisect_right(self._firsts, last + 1)
        if start < stop:
            first, last = min(first, self._firsts[start]), max(last, self._lasts[stop - 1])
        self._firsts[start:stop] = [first]
        self._lasts[start:stop] = [last]

    def __contains__(self, number: int) -> bool:
        place = bisect_left(self._lasts, number)
        return place < len(self._lasts) and self._firsts[place] <= number

    def __iter__(self) -> Iterator[Span]:
        return map(Span, self._firsts, self._lasts)

    def __len__(self) -> int:
        return len(self._firsts)
