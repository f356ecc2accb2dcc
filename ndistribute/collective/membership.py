"""Who this process is in its group, and how the others are reached.

Filled from the addresses of a `TF_CONFIG` or from an exchange over MPI. Only values are made here,
and the listening socket that they name; nobody is connected yet.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ndistribute.transport.listener import listen
from ndistribute.transport.secret import Credentials, credentials_of
from ndistribute.transport.tls import tls_files

__all__ = ["Membership", "host_identity", "membership_from_addresses", "membership_from_exchange"]

HEARTBEAT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Membership:
    """Say which process of a group this is, and how it meets the others.

    Args:
        rank: which process this is.
        addresses: ``host:port`` of every process, in rank order.
        listener: a listening socket for this process's own address.
        credentials: the job's secret and identity, and this process's certificate.
        host: what processes that can share memory have in common.
        heartbeat_seconds: after how long a silence a process counts as lost.
    """

    rank: int
    addresses: tuple[str, ...]
    listener: socket.socket
    credentials: Credentials
    host: str
    heartbeat_seconds: float = HEARTBEAT_SECONDS

    @property
    def size(self) -> int:
        """Return how many processes there are."""
        return len(self.addresses)


def membership_from_addresses(
    addresses: Sequence[str], rank: int, environ: Mapping[str, str] | None = None
) -> Membership:
    """Describe a process of a cluster whose addresses are known, as from `TF_CONFIG`.

    Raises:
        AuthenticationError: the job has no secret, and not all addresses are loopback.
        OSError: this process can not listen at its address.
    """
    # The port comes last: nothing is left open where a setting is wrong.
    environ = os.environ if environ is None else environ
    credentials = credentials_of(addresses, environ)
    heartbeat = _heartbeat_seconds(environ)
    return Membership(
        rank,
        tuple(addresses),
        listen(addresses[rank], environ),
        credentials,
        host_identity(environ),
        heartbeat,
    )


def membership_from_exchange(
    exchange: Callable[[bytes], Sequence[bytes]],
    rank: int,
    environ: Mapping[str, str] | None = None,
) -> Membership:
    """Describe a process that can already exchange small messages with the others, as over MPI.

    Args:
        exchange: returns what every process passed, in rank order.
        rank: which process this is.
        environ: where settings are read.
    """
    environ = os.environ if environ is None else environ
    host = host_identity(environ)
    hosts = exchange(f"{host}\n{socket.gethostname()}".encode())
    together = len({text.partition(b"\n")[2] for text in hosts}) == 1
    listener = listen("127.0.0.1:0" if together else f"{_outward_address()}:0")
    name, port = listener.getsockname()[:2]
    # The launcher's own channel is trusted: whoever is on it may know the secret.
    own = {"address": f"{name}:{port}", "secret": secrets.token_hex(32)}
    everyone = [json.loads(text) for text in exchange(json.dumps(own).encode())]
    return Membership(
        rank,
        tuple(each["address"] for each in everyone),
        listener,
        Credentials(everyone[0]["secret"].encode(), "started by MPI", tls_files(environ)),
        host,
        _heartbeat_seconds(environ),
    )


def host_identity(environ: Mapping[str, str] | None = None) -> str:
    """Return a text that is the same for processes that can map each other's memory.

    >>> host_identity({"NDISTRIBUTE_HOST_ID": "blue"})
    'blue'
    """
    environ = os.environ if environ is None else environ
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


def _heartbeat_seconds(environ: Mapping[str, str]) -> float:
    text = environ.get("NDISTRIBUTE_HEARTBEAT_SECONDS", "")
    try:
        seconds = float(text or HEARTBEAT_SECONDS)
    except ValueError:
        seconds = -1.0
    if seconds <= 0:
        raise ValueError(f"NDISTRIBUTE_HEARTBEAT_SECONDS must be a number above 0, got {text!r}.")
    return seconds
