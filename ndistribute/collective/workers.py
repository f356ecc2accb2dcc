"""The processes of a job as one of them sees them: who they are, and how they meet as processes.

Replicas meet through their communicators. What is done once in each process, outside any replica,
meets here: the first value of a variable, a reduction across replicas, the end of an input.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from ndistribute import timeline
from ndistribute.blas import core_numbers, cores_of_one, limited_blas, set_by_user
from ndistribute.collective.backend import Backend
from ndistribute.collective.communicator import Communicator
from ndistribute.collective.control import ControlPlane
from ndistribute.collective.options import CommunicationOptions
from ndistribute.device import Device, device_identity

__all__ = ["ProcessBackend", "Workers"]


class ProcessBackend(Backend, Protocol):
    """What carries bytes between processes: a backend that can be reset and closed."""

    def reset(self) -> None:
        """Forget every call; run when no process is inside one."""

    def close(self) -> None:
        """Give back what the backend holds."""


class Workers:
    """Meet the other processes of the job.

    Args:
        peers: the processes.
        backend: how they meet.
        devices: of the replicas of this process.
        options: how long to wait.

    Attributes:
        cores: how many of this host's cores are this process's part.
    """

    def __init__(
        self,
        peers: ControlPlane,
        backend: ProcessBackend,
        devices: Sequence[Device],
        options: CommunicationOptions,
    ) -> None:
        timeline.identify(peers.rank, peers.size)
        self.peers = peers
        self.backend = backend
        self.communicator = Communicator(backend, options, where=peers.where)
        self._timeout = options.timeout
        self._forget: list[Callable[[], None]] = []
        identities = [device_identity(device) for device in devices]
        own = json.dumps([identities, core_numbers()]).encode()
        told = [json.loads(text) for text in peers.exchange("devices", own, self._timeout)]
        self.identities: list[list[str]] = [devices for devices, _ in told]
        here = [
            numbers
            for host, (_, numbers) in zip(peers.hosts, told, strict=True)
            if host == peers.hosts[peers.rank]
        ]
        self.cores = cores_of_one(core_numbers(), here)
        # However the processes were started, they share their host's cores.
        self._limited = contextlib.ExitStack()
        self._limited.enter_context(limited_blas(None if set_by_user() else self.cores))

    @property
    def rank(self) -> int:
        """Return which process this is."""
        return self.peers.rank

    @property
    def size(self) -> int:
        """Return how many processes there are."""
        return self.peers.size

    @property
    def replica_counts(self) -> tuple[int, ...]:
        """Return how many replicas each process has."""
        return tuple(map(len, self.identities))

    @property
    def single_cpus(self) -> bool:
        """Say whether every process has one replica, on a CPU."""
        return all(devices == ["cpu"] for devices in self.identities)

    def enter(self) -> None:
        """Start a step; after a failure, wait until all processes do so.

        Raises:
            WorkerLostError: a process failed since the last step, or is gone for good.
            RuntimeError: this process is a fork of the one that joined the group.
        """
        self.peers.enter(self.backend.reset, self._timeout)

    def leave(self) -> None:
        """End a step."""
        self.peers.leave()

    def fail(self, cause: BaseException) -> None:
        """Tell the others that this process's own code raises."""
        self.peers.fail(cause)

    @contextlib.contextmanager
    def meeting(self) -> Iterator[Communicator]:
        """Make collectives among processes, as a step of their own unless one is going on."""
        if self.peers.where.inside:
            # In a call of all replicas, of which these are parts.
            self.communicator.part_of = self.peers.where.finished + 1
            try:
                yield self.communicator
            finally:
                self.communicator.part_of = None
            return
        self.enter()
        try:
            self.communicator.begin()
            yield self.communicator
        except BaseException as error:
            self.peers.raised = True
            self.peers.abort(error)
            raise
        finally:
            self.leave()

    def all_reduce(self, op: Any, value: Any) -> Any:
        """Reduce a nest over processes."""
        with self.meeting() as communicator:
            return communicator.all_reduce(op, value)

    def all_gather(self, value: Any, axis: int) -> Any:
        """Concatenate a nest over processes, in the order of their ranks."""
        with self.meeting() as communicator:
            return communicator.all_gather(value, axis)

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """Return the nest that one process passed."""
        with self.meeting() as communicator:
            return communicator.broadcast(value, root)

    def agree(self, value: Any, purpose: str) -> Any:
        """Return the nest that the first process passed, once all have passed one alike.

        Args:
            value: a nest of the same shapes and dtypes on all processes.
            purpose: what it is for, the same on all processes.
        """
        with self.meeting() as communicator:
            communicator.purpose = purpose
            try:
                agreed = communicator.broadcast(value)
                communicator.all_reduce("sum", 0)  # Who sends hears nothing of who receives.
            finally:
                communicator.purpose = ""
        return agreed

    def at_close(self, forget: Callable[[], None]) -> None:
        """Call a function when the group is closed, to let go of what lies in shared memory."""
        self._forget.append(forget)

    def close(self) -> None:
        """Say good-bye to the other processes."""
        self._limited.close()
        try:
            self.peers.close()
        finally:
            for forget in self._forget:
                forget()
            self.backend.close()
