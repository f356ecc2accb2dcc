"""Who this process is in its group, and how the others are reached.

Filled from the addresses of a `TF_CONFIG`, from an exchange over MPI, or from what the others tell
rank 0 where its address alone is known. What is made here are values, and the listening socket that
they name; nobody is connected yet.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ndistribute.errors import CollectiveTimeoutError, WorkerLostError
from ndistribute.transport.address import address_of, split_address
from ndistribute.transport.codec import Record
from ndistribute.transport.failure_detector import silence_seconds
from ndistribute.transport.listener import listen
from ndistribute.transport.rpc import Client, Peer, RpcServer
from ndistribute.transport.secret import Credentials, credentials_of, tls_files


@dataclass(frozen=True, slots=True)
class Membership:
    """Say which process of a group this is, and how it meets the others."""

    rank: int
    addresses: tuple[str, ...]  # Of every process, in rank order.
    listener: socket.socket  # For this process's own address.
    credentials: Credentials
    host: str  # What processes that can share memory have in common.
    heartbeat_seconds: float  # After so long a silence a process counts as lost.

    @property
    def size(self) -> int:
        """Return how many processes there are."""
        return len(self.addresses)


def membership_from_addresses(addresses: Sequence[str], rank: int) -> Membership:
    """Describe a process of a cluster whose addresses are known, as from `TF_CONFIG`."""
    # The port comes last: nothing is left open where a setting is wrong.
    credentials, host, silence = credentials_of(addresses), host_identity(), silence_seconds()
    listener = listen(addresses[rank], os.environ)
    return Membership(rank, tuple(addresses), listener, credentials, host, silence)


def membership_from_exchange(exchange: Callable[[bytes], Sequence[bytes]], rank: int) -> Membership:
    """Describe a process that can already exchange small messages with the others, as over MPI.

    The exchange returns what every process passed, in rank order.
    """
    host = host_identity()
    hosts = exchange(f"{host}\n{socket.gethostname()}".encode())
    together = len({text.partition(b"\n")[2] for text in hosts}) == 1
    listener = listen("127.0.0.1:0" if together else f"{_outward_address()}:0")
    # The launcher's own channel is trusted: whoever is on it may know the secret.
    own = {"address": address_of(*listener.getsockname()[:2]), "secret": secrets.token_hex(32)}
    everyone = [json.loads(text) for text in exchange(json.dumps(own).encode())]
    secret = everyone[0]["secret"].encode()
    return Membership(
        rank,
        tuple(each["address"] for each in everyone),
        listener,
        Credentials(secret, "started by MPI", tls_files(os.environ)),
        host,
        silence_seconds(),
    )


def membership_from_rank_0(first: str, rank: int, size: int, timeout: float) -> Membership:
    """Describe a process of a job in which only one address is known, as from torchrun.

    Rank 0 listens there. The others tell it where they listen, and it tells all of them.
    """
    credentials, host, silence = credentials_of([first]), host_identity(), silence_seconds()
    exchange = _ask_rank_0 if rank else _answer_all
    with contextlib.ExitStack() as on_error:
        listener = on_error.enter_context(_listen_towards(first))
        here = _Here(rank, address_of(*listener.getsockname()[:2]))
        addresses = exchange(first, size, here, credentials, timeout)
        on_error.pop_all()
    return Membership(rank, tuple(addresses), listener, credentials, host, silence)


class _Here(Record, frozen=True):
    """Tell rank 0 where a process listens."""

    rank: int
    address: str


class _Everyone(Record, frozen=True):
    """Tell a process where all of them listen, in rank order."""

    addresses: list[str]


class _Collector:
    """Answer all processes once each has said where it listens."""

    requests, sealed = _Here, False

    def __init__(self, size: int, own: str) -> None:
        self.addresses = [own, *[""] * (size - 1)]
        self.changed = threading.Condition()
        self._asking: list[tuple[Peer, int]] = []

    def connected(self, peer: Peer) -> None: ...

    def disconnected(self, peer: Peer, died: bool) -> None: ...

    def handle(self, peer: Peer, call: int, request: _Here) -> None:
        with self.changed:
            self.addresses[request.rank] = request.address
            self._asking.append((peer, call))
            if all(self.addresses):
                for one, number in self._asking:  # Who is gone is missed when the group connects.
                    one.send(_Everyone(self.addresses), number)
                self.changed.notify()


def _answer_all(
    first: str, size: int, here: _Here, credentials: Credentials, timeout: float
) -> list[str]:
    collector = _Collector(size, here.address)
    known, changed = collector.addresses, collector.changed
    server = RpcServer(first, credentials, f"worker 0 of {size}", {"addresses": collector})
    with contextlib.closing(server), changed:
        if not changed.wait_for(lambda: all(known), timeout):
            missing = ", ".join(str(rank) for rank, address in enumerate(known) if not address)
            raise CollectiveTimeoutError(
                f"worker 0 waited at {first} for worker(s) {missing} to start. Were all {size} "
                "processes started, with the same secret, and is that address reachable?",
                op="start",
            )
    return known


def _ask_rank_0(
    first: str, size: int, here: _Here, credentials: Credentials, timeout: float
) -> list[str]:
    name, audience = f"worker {here.rank}", f"worker 0 of {size}"
    client = Client(
        first, credentials, name=name, purpose="addresses", audience=audience, replies=_Everyone
    )
    with contextlib.closing(client):
        try:
            everyone: _Everyone = client.call(here, timeout)
        except (CollectiveTimeoutError, WorkerLostError) as error:
            raise CollectiveTimeoutError(
                f"{name} waited for the addresses of all {size} processes: were all of them "
                f"started? {error}",
                rank=0,
                op="start",
            ) from error
    return everyone.addresses


def _listen_towards(address: str) -> socket.socket:
    """Return a socket that listens, at a free port, where replies from an address come in."""
    found = socket.getaddrinfo(*split_address(address), type=socket.SOCK_DGRAM)
    with socket.socket(found[0][0], socket.SOCK_DGRAM) as probe:
        probe.connect(found[0][4])  # Sends nothing: it asks the system for the way.
        host = probe.getsockname()[0]
    return listen(address_of(host, 0))


def host_identity(environ: Mapping[str, str] = os.environ) -> str:
    """Return a text that is the same for processes that can map each other's memory.

    >>> host_identity({"NDISTRIBUTE_HOST_ID": "blue"})
    'blue'
    """
    if environ.get("NDISTRIBUTE_HOST_ID"):
        return environ["NDISTRIBUTE_HOST_ID"]
    # Containers of one machine share its boot but see neither each other's processes nor memory.
    parts = [socket.gethostname(), str(os.getuid())]
    boot = Path("/proc/sys/kernel/random/boot_id")
    parts.append(boot.read_text().strip() if boot.exists() else "")
    space = Path("/proc/self/ns/pid")
    parts.append(os.readlink(space) if space.exists() else "")
    return "/".join(parts)


def _outward_address() -> str:
    """Return the address by which other hosts reach this one."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError as error:
        raise OSError(
            f"this host's name {socket.gethostname()!r} has no address: add it to /etc/hosts, or "
            "start the job with TF_CONFIG, which names the addresses."
        ) from error
