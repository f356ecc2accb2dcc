"""The guides are programs; `test_guides.py` runs them."""

from collections.abc import Iterator

import pytest

from ndistribute import graph

collect_ignore = ["guides"]


@pytest.fixture
def empty_graph() -> Iterator[None]:
    """Make operations in a graph of the test's own."""
    with graph.Graph().as_default():
        yield
