"""What the tests of graphs share: sessions, and servers of two tasks in this process."""

from collections.abc import Iterator
from typing import Any

import pytest

import ndistribute as nd
from ndistribute import errors
from ndistribute.graph.graph import Graph
from ndistribute.graph.session import Session
from tests.processes import free_addresses

PS, WORKER = "/job:ps/task:0", "/job:worker/task:0"


@pytest.fixture
def session() -> Iterator[Session]:
    """Use a new graph, and open a session of it."""
    with Graph().as_default(), Session() as session:
        yield session


@pytest.fixture
def cluster() -> Iterator[dict[str, Any]]:
    """Start a server for variables and one for a worker, and use a new graph."""
    spec = free_addresses({"ps": 1, "worker": 1})
    servers = {job: nd.Server(spec, job, 0) for job in spec}
    with Graph().as_default():
        yield servers
    for server in servers.values():
        server.stop()


def reaches(session: Session, operation: Any) -> bool:
    """Run an operation, and say whether all tasks that it needs were there."""
    try:
        session.run(operation)
    except (errors.UnavailableError, errors.AbortedError):
        return False
    return True
