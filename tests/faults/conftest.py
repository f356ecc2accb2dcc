"""The jobs that fault tests of a file share."""

import pytest

from tests.jobs import steps
from tests.jobs.clusters import WIRES


@pytest.fixture(scope="module", params=WIRES)
def job(request):
    """A job on each wire, which goes on after each fault."""
    with WIRES[request.param]() as ranks:
        ranks.results(steps.worked, 1)
        yield ranks
