"""What those who run a step see of a group: the replicas of this process, and the other processes.

Replicas meet through their communicators. What is done once in each process, outside any replica,
meets here: the first value of a variable, a reduction across replicas, the end of an input. A step
is begun, left by each replica and ended; where there are other processes, they are told.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ndistribute import timeline
from ndistribute.blas import core_numbers, cores_of_one, limited_blas, set_by_user
from ndistribute.collective.backend import Backend
from ndistribute.collective.communicator import Communicator
from ndistribute.collective.control import ControlPlane
from ndistribute.collective.objects import all_gather_object
from ndistribute.collective.options import CommunicationOptions
from ndistribute.collective.rendezvous import Rendezvous
from ndistribute.device import Array, Device, device_identity
from ndistribute.errors import CollectiveMismatchError
from ndistribute.stream import Stream


@dataclass(frozen=True)
class ReplicaGroup:
    """Hold the communicators of the replicas of one process.

    Args:
        communicators: one for each replica, in order.
        rendezvous: where they meet.
        streams: the device and stream of each.
        workers: the other processes, where there are any.
        end_devices: ends what the communicators hold on devices.
    """

    communicators: Sequence[Communicator]
    rendezvous: Rendezvous
    streams: Sequence[Stream]
    workers: Workers | None = None
    end_devices: Callable[[], None] | None = None

    def begin(self) -> None:
        """Start a step; every replica must be out of the last one."""
        if self.workers is not None:
            self.workers.enter()
        self.rendezvous.reset()
        for communicator in self.communicators:
            communicator.begin()

    def leave(self, rank: int) -> None:
        """Say that a replica has returned from its step."""
        self.rendezvous.leave(rank, self.communicators[rank].calls_made)

    def end(self) -> None:
        """End a step if it was begun, when every replica is out of it."""
        if self.workers is not None and self.workers.peers.where.inside:
            self.workers.peers.leave()

    def abort(self, cause: BaseException) -> None:
        """Release every replica that waits, with the reason."""
        if self.workers is not None:
            self.workers.peers.fail(cause)
        self.communicators[0].abort(cause)

    def close(self, *, abandoned: bool = False) -> None:
        """End what is held on devices, and forget how the last step failed.

        The traceback of a failure holds the arrays that replicas saw. Replicas that were abandoned
        in a step may still be inside, and are to learn of its failure.
        """
        if self.end_devices is not None:
            self.end_devices()
        if not abandoned:
            self.rendezvous.reset()


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
        options: for collectives that bring none of their own.

    Attributes:
        rank: which process this is, of `size`.
        identities: of each process's devices, as `device_identity` gives them.
        cores: how many of this host's cores are this process's part.
    """

    def __init__(
        self,
        peers: ControlPlane,
        backend: ProcessBackend,
        devices: Sequence[Device],
        options: CommunicationOptions,
    ) -> None:
        self.rank, self.size = peers.rank, peers.size
        timeline.identify(f"rank {self.rank}", [f"rank {k}" for k in range(self.size)])
        self.peers = peers
        self.backend = backend
        self.communicator = Communicator(backend, options, where=peers.where)
        self.options = options
        identities = [device_identity(device) for device in devices]
        own = json.dumps([identities, core_numbers()]).encode()
        told = [json.loads(text) for text in peers.exchange("devices", own, options.timeout)]
        self.identities: list[list[str]] = [devices for devices, _ in told]
        here = [
            numbers
            for host, (_, numbers) in zip(peers.hosts, told, strict=True)
            if host == peers.hosts[self.rank]
        ]
        self.cores = cores_of_one(core_numbers(), here)
        self._held = contextlib.ExitStack()
        self._held.callback(backend.close)
        # However the processes were started, they share their host's cores.
        self._held.enter_context(limited_blas(None if set_by_user() else self.cores))

    @property
    def replica_counts(self) -> tuple[int, ...]:
        """Return how many replicas each process has."""
        return tuple(map(len, self.identities))

    @property
    def single_cpus(self) -> bool:
        """Return True if every process has one replica, on a CPU."""
        return all(devices == ["cpu"] for devices in self.identities)

    def enter(self) -> None:
        """Start a step; after a failure, wait until all processes do so.

        Raises:
            WorkerLostError: a process failed since the last step, or is gone for good.
            RuntimeError: this process is a fork of the one that joined the group.
        """
        self.peers.enter(self.backend.reset, self.options.timeout)

    @contextlib.contextmanager
    def meeting(self, purpose: str = "") -> Iterator[Communicator]:
        """Make collectives among processes, as a step of their own unless one is going on.

        Args:
            purpose: what they are for, the same on all processes.
        """
        communicator = self.communicator
        communicator.purpose = purpose
        if self.peers.where.inside:
            # In a call of all replicas, of which these are parts.
            communicator.part_of = self.peers.where.finished + 1
            try:
                yield communicator
            finally:
                communicator.part_of = None
            return
        self.enter()
        try:
            communicator.begin()
            yield communicator
        except BaseException as error:
            self.peers.raised = True
            self.peers.abort(error)
            raise
        finally:
            self.peers.leave()

    def all_gather(self, value: Any, axis: int) -> Any:
        """Concatenate a nest over processes, in the order of their ranks."""
        with self.meeting() as communicator:
            return communicator.all_gather(value, axis)

    def agree(self, value: Array, what: str) -> Any:
        """Return the array that the first process passed, once all have passed one alike.

        Args:
            value: an array of the same shape and dtype on all processes.
            what: what it is, in the same words on all processes.

        Raises:
            CollectiveMismatchError: on all processes, where one passed something else.
        """
        with self.meeting("the creation of a variable") as communicator:
            own = f"{what} of shape {value.shape} and dtype {value.dtype}"
            first, *others = all_gather_object(communicator, own)
            for rank, other in enumerate(others, 1):
                if other != first:
                    raise CollectiveMismatchError(
                        f"worker {rank} created {other}, worker 0 {first}. All workers must create "
                        "the same variables in the same order.",
                        rank=rank,
                    )
            agreed = communicator.broadcast(value)
            communicator.all_reduce("sum", 0)  # Who sends hears nothing of who receives.
            return agreed

    def at_close(self, forget: Callable[[], None]) -> None:
        """Call a function when the group is closed, to let go of what lies in shared memory."""
        self._held.callback(forget)

    def close(self) -> None:
        """Say good-bye to the other processes, and give back what is held here."""
        with self._held:
            self.peers.close()
