"""What starts the tasks of a cluster within milliseconds, for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.tasks import Zygote


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    """Start tasks by forking."""
    made = Zygote()
    yield made
    made.close()
