"""ndistribute between processes, set up once in a worker of a team."""

from __future__ import annotations

import atexit
import functools
import json
import os
from typing import Any

__all__ = ["TIMEOUT", "backend", "multi_worker"]

# A rank that does not come is a failed benchmark after this long.
TIMEOUT = 60.0


@functools.cache
def multi_worker() -> tuple[Any, int]:
    """Return this team's MultiWorkerMirroredStrategy, and which of its workers this is."""
    import ndistribute as nd

    options = nd.CommunicationOptions(timeout_seconds=TIMEOUT)
    strategy = nd.MultiWorkerMirroredStrategy(communication_options=options)
    atexit.register(strategy.close)
    return strategy, strategy.cluster_resolver.worker_index or 0


@functools.cache
def backend(way: str) -> Any:
    """Return a backend among the processes of this team: ``shared``, ``tcp`` or ``mpi``."""
    peers = _peers()
    if way == "shared":
        from ndistribute.collective.shared_memory import SharedMemoryBackend

        made: Any = SharedMemoryBackend(peers)
    else:
        from ndistribute.collective.ring import RingBackend

        made = RingBackend(peers, functools.partial(_transport, way, peers))
    atexit.register(made.close)
    return made


@functools.cache
def _peers() -> Any:
    from ndistribute.collective import bootstrap
    from ndistribute.collective.control import ControlPlane

    if "TF_CONFIG" in os.environ:
        config = json.loads(os.environ["TF_CONFIG"])
        addresses, rank = config["cluster"]["worker"], config["task"]["index"]
        own = bootstrap.info_from_addresses(addresses, rank)
    else:
        from ndistribute.cluster import MPIClusterResolver
        from ndistribute.collective.mpi import exchange_over_mpi

        own = bootstrap.info_from_exchange(exchange_over_mpi, MPIClusterResolver().task_id)
    peers = ControlPlane(own, timeout=TIMEOUT)
    atexit.register(peers.close)
    return peers


def _transport(way: str, peers: Any) -> Any:
    if way == "mpi":
        from ndistribute.collective.mpi import MpiTransport

        return MpiTransport(peers)
    from ndistribute.collective.tcp import TcpTransport

    return TcpTransport(peers)
