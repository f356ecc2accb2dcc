"""How GPUs of several processes are connected by NCCL, and which GPUs can be.

NCCL waits for all of them, for as long as it takes, and can not be told to give up. So it waits on
a thread of its own, whoever asked for the connection keeps an ear for failures and a deadline, and
what is connected too late is ended again.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ndistribute.collective import nccl
from ndistribute.device import Device, cupy_module
from ndistribute.errors import WorkerLostError
from ndistribute.stream import Stream

__all__ = ["abort_in_time", "connected", "device_identity", "make_unique_id", "nccl_obstacle"]

_POLL_SECONDS = 0.005

# NCCL's abort may wait for the other processes to abort as well, of which one may be gone.
ABORT_SECONDS = 2.0


def device_identity(device: Device) -> str:
    """Return what tells a device from those of other processes, as far as NCCL sees them.

    Returns:
        ``"cpu"``; for a GPU ``"gpu"`` and its place on the host's bus, or ``"gpu"`` alone where
        NCCL is not installed.

    >>> device_identity(Device("cpu:1"))
    'cpu'
    """
    if device.kind == "cpu":
        return "cpu"
    if not nccl.nccl_available():
        return "gpu"
    return f"gpu {cupy_module().cuda.Device(device.index).pci_bus_id.upper()}"


def nccl_obstacle(identities: Sequence[Sequence[str]], hosts: Sequence[str]) -> str | None:
    """Say why NCCL can not connect the devices of all workers; None where it can.

    Args:
        identities: of each worker's devices, as `device_identity` gives them.
        hosts: of the workers.

    >>> nccl_obstacle([["gpu 0000:3B:00.0"], ["gpu 0000:3B:00.0"]], ["a", "b"])
    >>> nccl_obstacle([["gpu 0000:3B:00.0"], ["gpu 0000:3B:00.0"]], ["a", "a"])
    'workers 0 and 1 share the GPU 0000:3B:00.0 of a host, and NCCL needs a GPU for each replica: \
give each worker its own by devices=[...] or CUDA_VISIBLE_DEVICES'
    """
    owners: dict[tuple[str, str], int] = {}
    for worker, (devices, host) in enumerate(zip(identities, hosts, strict=True)):
        for device in devices:
            kind, _, place = device.partition(" ")
            if kind == "cpu":
                return f"worker {worker} has a replica on a CPU, and NCCL connects GPUs alone"
            if not place:
                return (
                    f"worker {worker} finds no NCCL: pip install nvidia-nccl-cu12 or "
                    "nvidia-nccl-cu13, whichever CUDA its CuPy is for"
                )
            other = owners.setdefault((host, place), worker)
            if other != worker:
                return _shared(f"workers {other} and {worker}", place)
            if devices.count(device) > 1:
                return _shared(f"two replicas of worker {worker}", place)
    return None


def _shared(who: str, place: str) -> str:
    return (
        f"{who} share the GPU {place} of a host, and NCCL needs a GPU for each replica: give each "
        "worker its own by devices=[...] or CUDA_VISIBLE_DEVICES"
    )


def make_unique_id() -> list[int]:
    """Return what processes need to know to connect; one makes it, and tells the others."""
    with nccl.failures_named():
        return list(nccl.nccl_library().get_unique_id())


def connected(
    unique_id: Sequence[int],
    size: int,
    first: int,
    streams: Sequence[Stream],
    check: Callable[[], None],
) -> list[Any]:
    """Connect the GPUs of this process with those of others, which must do so at the same time.

    Args:
        unique_id: the same on all processes.
        size: how many GPUs there are on all processes.
        first: the number of this process's first one.
        streams: of the GPUs of this process.
        check: called now and then; what it raises ends the wait.

    Raises:
        WorkerLostError: NCCL can not connect them.
    """
    # By default NCCL connects some GPUs only when it needs to, and then waits inside a launch,
    # where nothing reaches it.
    os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
    connection = _Connection(tuple(unique_id), size, first, streams)
    connection.start()
    try:
        while connection.is_alive():
            connection.join(timeout=_POLL_SECONDS)
            check()
    except BaseException:
        connection.give_up()
        raise
    if connection.error is not None:
        raise WorkerLostError(
            f"NCCL can not connect the GPUs of the workers: {connection.error}. NCCL_DEBUG=INFO "
            "says more; to do without NCCL, pass CommunicationOptions(implementation='ring')."
        ) from connection.error
    return connection.comms


def abort_in_time(comms: list[Any]) -> None:
    """Abort communicators, but do not wait for ever; the list is empty afterwards."""
    ending: list[Any] = []
    with contextlib.suppress(IndexError):  # Of two that abort at once, each gets what it pops.
        while True:
            ending.append(comms.pop(0))
    if not ending:
        return
    thread = threading.Thread(
        target=nccl.end_each, args=(ending, "abort"), name="ndistribute-nccl-abort", daemon=True
    )
    thread.start()
    thread.join(timeout=ABORT_SECONDS)


class _Connection(threading.Thread):
    """Wait in NCCL for the other processes."""

    def __init__(
        self, unique_id: tuple[int, ...], size: int, first: int, streams: Sequence[Stream]
    ) -> None:
        super().__init__(name="ndistribute-nccl-connect", daemon=True)
        self.comms: list[Any] = []
        self.error: BaseException | None = None
        self._unique_id = unique_id
        self._size = size
        self._first = first
        self._streams = streams
        self._mutex = threading.Lock()
        self._unwanted = False

    def run(self) -> None:
        try:
            comms = self._connect()
        except BaseException as error:
            self.error = error
            return
        with self._mutex:
            self.comms = comms
            unwanted = self._unwanted
        if unwanted:
            abort_in_time(self.comms)

    def give_up(self) -> None:
        """Let nobody use the communicators any more, should they still come."""
        with self._mutex:
            self._unwanted = True
        abort_in_time(self.comms)

    def _connect(self) -> list[Any]:
        library = nccl.nccl_library()
        comms: list[Any] = []
        try:
            library.groupStart()  # Each waits for all others, so they can not come one by one.
            try:
                for rank, stream in enumerate(self._streams, self._first):
                    with stream.use():
                        comms.append(library.NcclCommunicator(self._size, self._unique_id, rank))
            finally:
                library.groupEnd()
        except BaseException:
            nccl.end_each(comms, "abort")
            raise
        return comms
