"""Reads the variables that `torchrun`, and platforms that start PyTorch jobs, give each process.

They hold every process's rank and one address on the host of rank 0, at which torchrun itself
listens. Rank 0 collects the addresses of the others at the next port.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ndistribute.cluster.resolvers import ClusterResolver, number_in
from ndistribute.cluster.spec import ClusterSpec

__all__ = ["TorchrunClusterResolver", "torchrun_size"]

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class TorchrunClusterResolver(ClusterResolver):
    """Read this process's rank from the variables that ``torchrun`` sets.

    Every rank is a worker. Only the address at which rank 0 collects those of the others is known:
    ``MASTER_ADDR`` and ``MASTER_PORT`` + 1, on loopback where all processes are on one host.

    Args:
        environ: the environment to read.

    Raises:
        ValueError: ``torchrun`` did not start this process, or its variables contradict each other.

    >>> environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    >>> TorchrunClusterResolver(environ=environ).worker_addresses
    ('node1:29501', '')
    """

    def __init__(self, *, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        missing = [name for name in _VARIABLES if not environ.get(name)]
        if missing:
            raise ValueError(
                f"torchrun did not start this process: {', '.join(missing)} is not set. Start it "
                "with `torchrun --nproc-per-node 2 script.py`."
            )
        rank, size = number_in(environ, "RANK"), number_in(environ, "WORLD_SIZE")
        if rank >= size:
            raise ValueError(f"RANK={rank} is not below WORLD_SIZE={size}.")
        port = number_in(environ, "MASTER_PORT") + 1
        if port >= 1 << 16:
            raise ValueError(f"MASTER_PORT={port - 1} leaves no next port: choose a lower one.")
        on_one_host = environ.get("LOCAL_WORLD_SIZE") == environ["WORLD_SIZE"]
        host = "127.0.0.1" if on_one_host else environ["MASTER_ADDR"]
        first = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        super().__init__(
            ClusterSpec({"worker": [first, *[""] * (size - 1)]}), "worker", rank, "torchrun"
        )

    @property
    def address_hint(self) -> str:
        """Return that the port follows from ``MASTER_PORT``."""
        return "The port is MASTER_PORT + 1: choose another with torchrun's --master-port."


def torchrun_size(environ: Mapping[str, str]) -> int:
    """Return the number of processes that torchrun's variables tell of; 0 if they are not set.

    >>> torchrun_size({"RANK": "0", "WORLD_SIZE": "2"})
    0
    """
    if not all(environ.get(name) for name in _VARIABLES):
        return 0
    return number_in(environ, "WORLD_SIZE")
