"""The jobs that fault tests of a file share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults import steps
from tests.faults.jobs import WIRES
from tests.processes import Ranks


@pytest.fixture(scope="module", params=WIRES)
def job(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """A job on each wire, which goes on after each fault."""
    with WIRES[request.param]() as ranks:
        ranks.results(steps.worked, 1)
        yield ranks
