"""Who this process is in its group, and how the others are reached.

Filled from the addresses of a `TF_CONFIG`, from an exchange over MPI, or from what the others tell
rank 0 where its address alone is known. What is made here are values, and the listening socket that
they name; nobody is connected yet.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ndistribute.errors import AuthenticationError, CollectiveTimeoutError
from ndistribute.transport.address import split_address
from ndistribute.transport.failure_detector import SILENCE_SECONDS, silence_seconds
from ndistribute.transport.handshake import Hello, authenticate
from ndistribute.transport.listener import Listener, listen
from ndistribute.transport.secret import Credentials, credentials_of, tls_files

__all__ = [
    "Membership",
    "host_identity",
    "membership_from_addresses",
    "membership_from_exchange",
    "membership_from_rank_0",
]

_RETRY_SECONDS = 0.05
_ATTEMPT_SECONDS = 10.0


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
    heartbeat_seconds: float = SILENCE_SECONDS

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
    heartbeat = silence_seconds(environ)
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
        silence_seconds(environ),
    )


def membership_from_rank_0(
    first: str, rank: int, size: int, timeout: float, environ: Mapping[str, str] | None = None
) -> Membership:
    """Describe a process of a job in which only one address is known, as from torchrun.

    Rank 0 listens there. The others tell it where they listen, and it tells all of them.

    Args:
        first: the address at which rank 0 collects the others' addresses.
        rank: which process this is.
        size: how many there are.
        timeout: seconds to wait for all of them.
        environ: where settings are read.

    Raises:
        AuthenticationError: the job has no secret, or a process has another one.
        CollectiveTimeoutError: not all processes started in time.
        OSError: rank 0 can not listen at the address.
    """
    environ = os.environ if environ is None else environ
    credentials = credentials_of([first], environ)
    heartbeat = silence_seconds(environ)
    deadline = time.monotonic() + timeout
    if rank == 0:
        listener, addresses = _collect(first, size, credentials, deadline)
    else:
        listener, addresses = _report(first, rank, size, credentials, deadline)
    return Membership(
        rank, tuple(addresses), listener, credentials, host_identity(environ), heartbeat
    )


def _collect(
    first: str, size: int, credentials: Credentials, deadline: float
) -> tuple[socket.socket, list[str]]:
    """Wait for the addresses of all other processes, and send all of them to each."""
    arrived: queue.SimpleQueue[tuple[socket.socket, Hello]] = queue.SimpleQueue()

    def check(hello: Hello) -> str:
        rank = hello.details.get("rank")
        if hello.details.get("size") == size and rank in range(1, size):
            return ""
        return f"it is worker {rank} of {hello.details.get('size')}, here is worker 0 of {size}"

    with contextlib.ExitStack() as on_error, contextlib.ExitStack() as held:
        collecting = listen(first)
        own = on_error.enter_context(_listen_beside(collecting))
        addresses = {0: _address_of(own)}
        hello = Hello(name="worker 0", purpose="addresses")
        listener = Listener(
            [collecting],
            credentials,
            hello,
            lambda sock, accepted: arrived.put((sock, accepted.hello)),
            check=check,
        )
        held.callback(listener.close)
        waiting = []
        while len(addresses) < size:
            try:
                sock, peer = arrived.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                missing = ", ".join(str(n) for n in range(size) if n not in addresses)
                raise CollectiveTimeoutError(
                    f"worker 0 waited at {first} for worker(s) {missing} to start. Were all {size} "
                    "processes started, with the same secret, and is that address reachable?",
                    op="start",
                ) from None
            addresses[int(peer.details["rank"])] = str(peer.details["address"])
            waiting.append(held.enter_context(sock))
        everyone = [addresses[n] for n in range(size)]
        for sock in waiting:
            with contextlib.suppress(OSError):  # Who is gone is missed when the group connects.
                sock.settimeout(_ATTEMPT_SECONDS)
                sock.sendall(json.dumps(everyone).encode())
        on_error.pop_all()
    return own, everyone


def _report(
    first: str, rank: int, size: int, credentials: Credentials, deadline: float
) -> tuple[socket.socket, list[str]]:
    """Tell rank 0 where this process listens, and return where all do."""
    reason: Exception = TimeoutError("there was no time to try")
    pause = threading.Event()
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.ExitStack() as on_error:
            try:
                sock = socket.create_connection(split_address(first), min(left, _ATTEMPT_SECONDS))
                # Where rank 0 can be reached from, the others can be reached at.
                own = on_error.enter_context(_listen_beside(sock))
                details: dict[str, str | int] = {"rank": rank, "size": size}
                details["address"] = _address_of(own)
                hello = Hello(name=f"worker {rank}", purpose="addresses", details=details)
                until = min(deadline, time.monotonic() + _ATTEMPT_SECONDS)
                sock, _ = authenticate(sock, credentials, hello, deadline=until)
                with sock:
                    sock.settimeout(max(0.001, deadline - time.monotonic()))
                    text = b"".join(iter(lambda: sock.recv(65536), b""))  # noqa: B023
                everyone = [str(address) for address in json.loads(text)]
                on_error.pop_all()
                return own, everyone
            except AuthenticationError:
                raise
            except (OSError, ValueError) as error:  # It is not there yet, or it was cut off.
                reason = error
        pause.wait(_RETRY_SECONDS)
    raise CollectiveTimeoutError(
        f"worker {rank} waited for worker 0 at {first}: {type(reason).__name__}: {reason}. Were "
        f"all {size} processes started, with the same secret, and is that address reachable?",
        rank=0,
        op="start",
    ) from reason


def _listen_beside(sock: socket.socket) -> socket.socket:
    """Return a socket that listens at a free port of the address that another one has here."""
    host = sock.getsockname()[0]
    return listen(f"[{host}]:0" if ":" in host else f"{host}:0")


def _address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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
