"""Joins the processes of a `tests.processes.Ranks` in a group, once for each process."""

from __future__ import annotations

import atexit
import functools
import json
import os
from typing import Any

from ndistribute.cluster import MPIClusterResolver
from ndistribute.collective.bootstrap import info_from_addresses, info_from_exchange
from ndistribute.collective.control import ControlPlane

__all__ = ["joined_peers"]


@functools.cache
def joined_peers() -> ControlPlane:
    """Return this process's view of its group; it says good-bye when the process ends."""
    if "TF_CONFIG" in os.environ:
        config: dict[str, Any] = json.loads(os.environ["TF_CONFIG"])
        addresses, rank = config["cluster"]["worker"], config["task"]["index"]
        info = info_from_addresses(addresses, rank)
    else:
        from ndistribute.collective.mpi import exchange_over_mpi

        info = info_from_exchange(exchange_over_mpi, MPIClusterResolver().task_id)
    peers = ControlPlane(info, timeout=30.0)
    atexit.register(peers.close)
    return peers
