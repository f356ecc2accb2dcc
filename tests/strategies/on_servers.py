"""Parameter-server strategies whose servers are in the test's own process."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import ndistribute as nd
from ndistribute.parameter_server.client import ServerClient
from ndistribute.parameter_server.store_service import LocalServer
from tests.kinds import DEADLINE, cpus, inside_worker


class LocallyServed(nd.ParameterServerStrategy):
    """A strategy of a cluster whose servers are given."""

    def __init__(self, holders: Sequence[LocalServer], *args: Any, **options: Any) -> None:
        self._holders = holders
        super().__init__(*args, timeout_seconds=options.pop("timeout_seconds", DEADLINE), **options)

    def connect(self) -> list[ServerClient]:
        name = f"{self.cluster_resolver.task_type}:{self.cluster_resolver.task_id}#{id(self)}"
        return [
            ServerClient(holder.connect(name, self.timeout_seconds), f"ps:{index}")
            for index, holder in enumerate(self._holders)
        ]

    def _new_namespace(self, restore: bool) -> str:
        return ""  # Each test has servers of its own, behind the same addresses.


@contextlib.contextmanager
def holders(count: int) -> Iterator[list[LocalServer]]:
    """Servers in this process."""
    yield [LocalServer() for _ in range(count)]


def worker_of(
    held: Sequence[LocalServer], index: int = 0, workers: int = 1, replicas: int = 1, **options: Any
) -> LocallyServed:
    """Return the strategy of one worker of several."""
    cluster = {
        "worker": [f"localhost:{i + 1}" for i in range(workers)],
        "ps": [f"localhost:{i + 100}" for i in range(len(held))],
        **({"chief": ["localhost:99"]} if options.get("chief") else {}),
    }
    job = options.pop("job", "worker")
    options.pop("chief", None)
    resolver = nd.SimpleClusterResolver(cluster, task_type=job, task_id=index)
    return LocallyServed(held, resolver, devices=cpus(replicas), **options)


@contextlib.contextmanager
def workers(count: int, servers: int = 1, **options: Any) -> Iterator[list[LocallyServed]]:
    """The strategies of the workers of a cluster, which end together."""
    with contextlib.ExitStack() as stack:
        held = stack.enter_context(holders(servers))
        made = [worker_of(held, index, count, **options) for index in range(count)]
        yield [stack.enter_context(contextlib.closing(one)) for one in made]


@contextlib.contextmanager
def served(servers: int = 1, **options: Any) -> Iterator[LocallyServed]:
    """A strategy with servers of its own."""
    with holders(servers) as held, worker_of(held, **options) as strategy:
        yield strategy


def sharded(servers: int = 2, shards: int = 3, replicas: int = 2) -> LocallyServed:
    """Return a strategy whose variables are in shards on several servers."""
    with holders(servers) as held:
        partitioner = nd.partitioners.FixedShardsPartitioner(shards)
        return worker_of(held, replicas=replicas, variable_partitioner=partitioner)


# A row of contract tests, where all replicas are in one process.
SHARDED = {} if inside_worker() else {"sharded-2": sharded}
