"""A group as strategies use it: the replicas of this process, and the other processes.

Replicas call collectives through their communicators. `Workers` has the collectives that each
process calls once, outside of replicas: for example for the first value of a variable, a reduction
over replicas, or the end of an input. Steps start and end here, and the other processes are told.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ndistribute import timeline
from ndistribute.blas import core_numbers, cores_of_one, cpu_quota, limited_blas, set_by_user
from ndistribute.collective.backend import Backend
from ndistribute.collective.communicator import CommunicationOptions, Communicator
from ndistribute.collective.control_plane import ControlPlane
from ndistribute.collective.objects import all_gather_object
from ndistribute.collective.threads import Rendezvous
from ndistribute.devices import Array, Device, device_identity
from ndistribute.errors import CollectiveMismatchError
from ndistribute.stream import Stream


@dataclass(frozen=True)
class ReplicaGroup:
    """The communicators of the replicas of one process, in replica order."""

    communicators: Sequence[Communicator]
    rendezvous: Rendezvous
    streams: Sequence[Stream]  # The communicators, each with the device of its replica.
    workers: Workers | None = None  # The other processes, if any.
    end_devices: Callable[[], None] | None = None  # The function that frees resources on devices.

    def begin(self) -> None:
        """Start a step; all replicas must have left the last step."""
        if self.workers is not None:
            self.workers.enter()
        self.rendezvous.reset()
        for communicator in self.communicators:
            communicator.begin()

    def leave(self, rank: int) -> None:
        """Record that a replica has returned from its step."""
        self.rendezvous.leave(rank, self.communicators[rank].calls_made)

    def end(self) -> None:
        """End the step, if one was started; all replicas must have left it."""
        if self.workers is not None and self.workers.peers.where.inside:
            self.workers.peers.leave()

    def abort(self, cause: BaseException) -> None:
        """Make the waits of all replicas raise because of `cause`."""
        if self.workers is not None:
            self.workers.peers.fail(cause)
        self.communicators[0].abort(cause)

    def close(self, *, abandoned: bool = False) -> None:
        """Free resources on devices, and drop the failure of the last step.

        The traceback of a failure refers to the arrays of replicas. With `abandoned`, replicas may
        still be in the step and must see its failure, so it is kept.
        """
        if self.end_devices is not None:
            self.end_devices()
        if not abandoned:
            self.rendezvous.reset()


class Workers:
    """The group of all processes of the job, with the control plane and the backend between them.

    Attributes:
        users_call: the user's call in which all processes are, if it is known.
        identities: the `device_identity` of each device of each process.
        cores: the number of this host's cores that this process may use.
        may_use_nccl: whether NCCL may connect the GPUs of all workers.
        held: the resources that `close` frees, and functions that it calls to drop references to
            shared memory.
    """

    def __init__(
        self,
        peers: ControlPlane,
        backend: Backend,
        devices: Sequence[Device],
        options: CommunicationOptions,
    ) -> None:
        self.rank, self.size = peers.rank, peers.size
        self.users_call = ""
        self.may_use_nccl = True
        timeline.identify(f"rank {self.rank}", [f"rank {k}" for k in range(self.size)])
        self.peers = peers
        self.backend = backend
        self.communicator = Communicator(backend, options, where=peers.where)
        self.options = options
        identities = [device_identity(device) for device in devices]
        member = json.dumps([identities, core_numbers()]).encode()
        members = [json.loads(text) for text in peers.exchange("devices", member, options.timeout)]
        self.identities: list[list[str]] = [devices for devices, _ in members]
        pairs = zip(peers.hosts, members, strict=True)
        here = [numbers for host, (_, numbers) in pairs if host == peers.hosts[self.rank]]
        self.cores = cores_of_one(core_numbers(), here, cpu_quota())
        self.held = contextlib.ExitStack()
        self.held.callback(backend.close)
        # The processes share the cores of their host, whatever launcher started them.
        self.held.enter_context(limited_blas(None if set_by_user() else self.cores))

    @property
    def replica_counts(self) -> tuple[int, ...]:
        """The number of replicas of each process, in rank order."""
        return tuple(map(len, self.identities))

    def enter(self) -> None:
        """Start a step; after a failure, wait until all processes do so."""
        self.peers.enter(self.backend.reset, self.options.timeout)

    @contextlib.contextmanager
    def meeting(self, purpose: str = "") -> Iterator[Communicator]:
        """Yield the communicator of the processes, in a new step unless a step is running.

        `purpose` says what the calls are for; it is equal on all processes.
        """
        communicator = self.communicator
        communicator.purpose = self.users_call or purpose
        if self.peers.where.inside:
            # The calls are parts of the current call of all replicas.
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
        """Return a nest whose arrays are concatenated over processes, in rank order."""
        with self.meeting() as communicator:
            return communicator.all_gather(value, axis)

    def agree(self, value: Array, what: str) -> Any:
        """Return the array of process 0; raise if the descriptions, shapes or dtypes differ."""
        with self.meeting("the creation of a variable") as communicator:
            description = f"{what} of shape {value.shape} and dtype {value.dtype}"
            first, *others = all_gather_object(communicator, description)
            for rank, other in enumerate(others, 1):
                if other != first:
                    raise CollectiveMismatchError(
                        f"worker {rank} created {other}, worker 0 created {first}. All workers "
                        "must create the same variables in the same order.",
                        rank=rank,
                    )
            agreed = communicator.broadcast(value)
            communicator.all_reduce("sum", 0)  # The sender gets no reply from the receivers.
            return agreed

    def close(self) -> None:
        """Leave the group, and free its resources."""
        with self.held:
            self.peers.close()
