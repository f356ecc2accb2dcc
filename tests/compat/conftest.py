"""The guides are programs; `test_guides.py` runs them."""

from collections.abc import Iterator

import pytest

from ndistribute.compat import graphs, tf

collect_ignore = ["guides"]


@pytest.fixture(autouse=True)
def arrays_again() -> Iterator[None]:
    """Undo what names of TensorFlow 1 do to those of two meanings in this process."""
    graphs.use_arrays()  # Other tests use these names, too.
    yield
    graphs.use_arrays()


@pytest.fixture
def empty_graph() -> Iterator[None]:
    """Make operations in a graph of the test's own."""
    with tf.Graph().as_default():
        yield
