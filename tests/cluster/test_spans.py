"""Spans of numbers, compared with plain sets."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ndistribute.cluster.protocol.spans import Span, Spans

SPANS = st.builds(
    lambda first, more: Span(first, first + more), st.integers(1, 30), st.integers(0, 8)
)


@given(st.lists(SPANS))
def test_they_hold_what_was_added_in_as_few_as_may_be(added):
    spans = Spans()
    numbers: set[int] = set()
    for span in added:
        spans.add(span)
        numbers.update(range(span.first, span.last + 1))
    assert {number for number in range(50) if number in spans} == numbers
    assert all(one.last + 1 < two.first for one, two in itertools.pairwise(spans))
    assert len(spans) == len(list(spans))
