"""Replicas of one process in an NCCL group with those of others, for the tests of that.

As `NCCL_GROUND` says, they meet over an imitation of NCCL between NumPy's arrays (host), over the
same between those of an imitation of CuPy (cupy), or over CuPy and NCCL with a GPU for each process
(real).
"""

from __future__ import annotations

import functools
import os
import sys
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from ndistribute.collective import nccl, nccl_plan, select
from ndistribute.collective.communicator import Communicator
from ndistribute.collective.nccl_workers import make_nccl_worker_backends
from ndistribute.collective.options import CommunicationOptions
from ndistribute.collective.rendezvous import Rendezvous
from ndistribute.collective.replica_group import ReplicaGroup
from ndistribute.collective.threads import ThreadBackend
from ndistribute.collective.workers import Workers
from ndistribute.device import Device, copy_to, to_host
from ndistribute.stream import Stream
from tests.collective.joined import joined_peers
from tests.collective.nccl_world import WorldNccl
from tests.gpu.imitation.clock import set_world
from tests.gpu.imitation.module import modules

OPTIONS = CommunicationOptions(timeout_seconds=40.0)
DTYPES = "bool int8 uint16 int32 int64 float16 bfloat16 float32 float64 complex64".split()
GROUND = os.environ.get("NCCL_GROUND", "host")


@functools.cache
def world() -> WorldNccl:
    """Put the imitation in the place of NCCL in this process."""
    made = WorldNccl()
    library: Any = nccl
    if GROUND == "cupy":
        gpus, found = modules(4)
        found["cupy"].cuda.nccl = found["cupy.cuda.nccl"] = made
        sys.modules.update(found)
        set_world(gpus)
        made.current_device = lambda: gpus.device
        is_done = library._is_done
        library._is_done = lambda stream: made.is_idle() and is_done(stream)
        return made
    library.nccl_library = lambda: made
    library._is_done = lambda stream: made.is_idle()
    plan: Any = nccl_plan
    plan.address = lambda array: array.ctypes.data
    return made


class Job:
    """The replicas of this process in a group with those of the others."""

    def __init__(self) -> None:
        peers = joined_peers()
        counts = [int(count) for count in os.environ.get("REPLICAS", "1").split(",")]
        count = counts[peers.rank % len(counts)]
        if GROUND != "real":
            world()
        kind = "cpu" if GROUND == "host" else "gpu"
        first = sum(counts[r % len(counts)] for r in range(peers.rank)) if GROUND == "real" else 0
        devices = [Device(f"{kind}:{first + i}") for i in range(count)]
        wish = CommunicationOptions(implementation=os.environ.get("HOST_WIRE", "auto"))
        host = select._process_backend(peers, wish, "TF_CONFIG" not in os.environ)
        self.workers = Workers(peers, host, devices, OPTIONS)
        self.streams = [Stream(device) for device in devices]
        rendezvous = Rendezvous(count)
        self.backends = make_nccl_worker_backends(rendezvous, self.streams, self.workers)
        communicators = []
        for index, backend in enumerate(self.backends):
            local = ThreadBackend(rendezvous, self.streams, index, owner=0, owners=1)
            communicators.append(Communicator(backend, OPTIONS, local=local))
        self.group = ReplicaGroup(communicators, rendezvous, self.streams, self.workers)
        self.threads = ThreadPoolExecutor(count)

    def step(self, body: Callable[[Communicator], Any]) -> list[Any]:
        """Run a step on each replica of this process, as a strategy does."""
        self.group.begin()
        try:
            futures = [
                self.threads.submit(self._replica, index, body)
                for index in range(len(self.streams))
            ]
            wait(futures, timeout=50.0)
            return [future.result(timeout=0.0) for future in futures]
        finally:
            self.group.end()

    def _replica(self, index: int, body: Callable[[Communicator], Any]) -> Any:
        stream = self.streams[index]
        try:
            with stream.use():
                result = body(self.group.communicators[index])
                stream.synchronize()
            self.group.leave(index)
        except BaseException as error:
            self.group.abort(error)
            raise
        return result


@functools.cache
def job() -> Job:
    return Job()


def here(communicator: Communicator, array: Any) -> Any:
    """Return a host array on a replica's device."""
    return copy_to(np.asarray(array), job().streams[communicator.local_rank].device)


def numbers(rank: int, length: int, dtype: Any) -> Any:
    """Return numbers whose sums and products every dtype holds exactly."""
    return ((np.arange(length) * 7 + rank * 3) % 4).astype(dtype)


def digest(arrays: Any) -> int:
    return zlib.crc32(b"".join(to_host(array).tobytes() for array in arrays))


def dtype_named(name: str) -> Any:
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def plain_sum(rank: int, size: int) -> list[float]:
    return job().step(lambda c: float(to_host(c.all_reduce("sum", here(c, np.float64(c.rank))))))
