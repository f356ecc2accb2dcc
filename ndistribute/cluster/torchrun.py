"""Reads the variables that `torchrun`, and platforms that start PyTorch jobs, give each process.

They hold every process's rank and one address, which torchrun itself uses. The job's own addresses
are worked out from it where all processes are on one host.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ndistribute.cluster.resolvers import ClusterResolver, number_in
from ndistribute.cluster.spec import ClusterSpec

__all__ = ["TorchrunClusterResolver", "torchrun_size"]

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


class TorchrunClusterResolver(ClusterResolver):
    """Read this process's rank from the variables that ``torchrun`` sets.

    Every rank is a worker. All must be on one host: the variables do not name the others. Rank N
    listens on loopback at ``MASTER_PORT`` + 1 + N.

    Args:
        environ: the environment to read.

    Raises:
        ValueError: ``torchrun`` did not start this process, its variables contradict each other,
            or the processes are on several hosts.

    >>> environ = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    >>> environ |= {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    >>> TorchrunClusterResolver(environ=environ).worker_addresses
    ('127.0.0.1:29501', '127.0.0.1:29502')
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
        on_one_host = environ["MASTER_ADDR"] in _LOOPBACK or (
            "LOCAL_WORLD_SIZE" in environ and number_in(environ, "LOCAL_WORLD_SIZE") == size
        )
        if not on_one_host:
            raise ValueError(
                f"WORLD_SIZE={size} and LOCAL_WORLD_SIZE={environ.get('LOCAL_WORLD_SIZE', '')}: "
                "the processes are on several hosts, and torchrun's variables name only that of "
                "rank 0. Start them with `ndistribute run --hosts alice:2,bob:2 script.py`, or "
                "set TF_CONFIG for each process, which names all addresses."
            )
        first = number_in(environ, "MASTER_PORT") + 1
        if first + size > 1 << 16:
            raise ValueError(f"MASTER_PORT={first - 1} leaves no {size} ports below 65536.")
        cluster = ClusterSpec({"worker": [f"127.0.0.1:{first + other}" for other in range(size)]})
        super().__init__(cluster, "worker", rank, "torchrun")

    @property
    def address_hint(self) -> str:
        """Return that the ports follow from ``MASTER_PORT``."""
        return "The ports are MASTER_PORT + 1 + RANK: choose others with torchrun's --master-port."


def torchrun_size(environ: Mapping[str, str]) -> int:
    """Return the number of processes that torchrun's variables tell of; 0 if they are not set.

    >>> torchrun_size({"RANK": "0", "WORLD_SIZE": "2"})
    0
    """
    if not all(environ.get(name) for name in _VARIABLES):
        return 0
    return number_in(environ, "WORLD_SIZE")
