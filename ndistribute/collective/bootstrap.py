"""Bootstrap of a group: the description of each process, and the data connections between them.

Addresses come from `TF_CONFIG`, from an exchange over MPI, or, if only the address of rank 0 is
known, from the group itself: every process sends its address to rank 0. A data connection is made
when two processes first need it: the higher rank connects, the lower one accepts, and both run the
transport's handshake. Jobs in shared memory make none.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ndistribute.errors import AuthenticationError
from ndistribute.transport import failure_detector
from ndistribute.transport.address import address_of, is_loopback, split_address
from ndistribute.transport.handshake import Accepted, Hello, authenticate
from ndistribute.transport.listener import Listener, listen
from ndistribute.transport.reach import look_for, tcp_socket, unanswered_seconds, why_unreached
from ndistribute.transport.secret import Credentials, credentials_of, tls_files
from ndistribute.transport.waiting import WaitReport

_ATTEMPT_SECONDS = 5.0
_CHECK_SECONDS = 0.01
_RETRY_SECONDS = 0.05  # Each attempt costs a handshake.
# The shortest silence that is noticed, because the kernel probes at most once a second.
_LEAST_SECONDS = 3.0
_WELCOME = b"+"
# Addresses reserved for documentation; they are used only to look up a route.
_SOMEWHERE = "192.0.2.1"
_MOST_LOOKED_UP = 3  # To look up an unknown name takes seconds.

# Numbers the groups of this process, so that processes in another group are detected.
_groups = itertools.count()


def host_identity(environ: Mapping[str, str] = os.environ) -> str:
    """Return a string that is equal for processes that can map each other's memory.

    >>> host_identity({"NDISTRIBUTE_HOST_ID": "blue"})
    'blue'
    """
    if environ.get("NDISTRIBUTE_HOST_ID"):
        return environ["NDISTRIBUTE_HOST_ID"]
    # Containers on one machine share its boot id, but do not share processes and memory.
    return f"{os.getuid()}/{_identity_of('pid')}"


def _identity_of(namespace: str) -> str:
    """Return a string that is equal for processes of the same kernel and namespace."""
    parts = [socket.gethostname()]
    boot = Path("/proc/sys/kernel/random/boot_id")
    parts.append(boot.read_text().strip() if boot.exists() else "")
    space = Path("/proc/self/ns", namespace)
    parts.append(os.readlink(space) if space.exists() else "")
    return "/".join(parts)


def start_of(pid: int) -> int | None:
    """Return when a process was started, in the kernel's clock; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """The rank of a process in its group, and the addresses of it and of rank 0."""

    rank: int
    size: int
    first: str  # The address of rank 0.
    address: str  # The address at which this process accepts data connections,
    listener: socket.socket  # and its socket.
    credentials: Credentials
    # The address where others join at rank 0, if it is another one.
    entrance: socket.socket | None = None
    addresses: Sequence[str] = ()  # The addresses of all processes, if known at the start.
    host: str = field(default_factory=host_identity)  # Equal in shared memory.
    group: int = field(default_factory=lambda: next(_groups))  # Equal on all processes.

    def details(self, **more: str | int) -> dict[str, str | int]:
        """Return the description of this process for the other processes."""
        fields = ("rank", "size", "host", "group", "address")
        known = {name: getattr(self, name) for name in fields}
        return {**known, "name": socket.gethostname(), "pid": os.getpid(), **more}

    def refusal_of(self, hello: Hello, joined: bool) -> str:
        """Return why a process with this `Hello` is not in the group, or an empty string."""
        try:
            rank, size, group = (int(hello.details[key]) for key in ("rank", "size", "group"))
        except (ValueError, KeyError, TypeError):
            return "it is not a worker of a group"
        if size != self.size or not 0 <= rank < size or rank == self.rank:
            what = f"it is worker {rank} of {size}, but this is worker {self.rank} of {self.size};"
            return f"{what} give every process the same cluster and a different index"
        # Processes of another group, and early data connections, are not refused: they try again.
        if joined and group == self.group and hello.purpose == "control":
            return f"all {self.size} workers have already joined: start the whole job again"
        return ""


def info_from_addresses(addresses: Sequence[str], rank: int) -> ProcessInfo:
    """Return the description of a process in a cluster with known addresses."""
    # Open the port last, so that no socket stays open if a setting is wrong.
    credentials, _ = credentials_of(addresses), failure_detector.silence_seconds()
    listener = _listener_at(addresses[rank])
    # The host by which the others know this process, and the real port: the configured port may be
    # 0.
    address = address_of(split_address(addresses[rank])[0], listener.getsockname()[1])
    size, first = len(addresses), addresses[0]
    return ProcessInfo(rank, size, first, address, listener, credentials, addresses=addresses)


def info_from_exchange(exchange: Callable[[bytes], Sequence[bytes]], rank: int) -> ProcessInfo:
    """Return the description of a process that can exchange small messages, as over MPI."""
    tls, _ = tls_files(os.environ), failure_detector.silence_seconds()
    # MPICH's launcher tells a process the name by which it reaches this host.
    name = os.environ.get("PMI_HOSTNAME") or socket.gethostname()
    place = host_identity(), _identity_of("net"), name
    places = [tuple(json.loads(blob)) for blob in exchange(json.dumps(place).encode())]
    listener = listen(address_of(address_among(places, rank), 0))
    address = address_of(*listener.getsockname()[:2])
    # The launcher's channel is trusted: all processes on it may know the secret.
    first, secret = json.loads(exchange(json.dumps([address, secrets.token_hex(32)]).encode())[0])
    credentials = Credentials(secret.encode(), "started by MPI", tls)
    return ProcessInfo(rank, len(places), first, address, listener, credentials)


def info_from_rank_0(first: str, rank: int, size: int) -> ProcessInfo:
    """Return the description of a process if only rank 0's address is known, as under torchrun."""
    credentials, _ = credentials_of([first]), failure_detector.silence_seconds()
    with contextlib.ExitStack() as on_error:
        entrance = None if rank else on_error.enter_context(listen(first, os.environ))
        # The other processes know rank 0, and so all processes on its host, by the host in this
        # address.
        host = split_address(first)[0]
        if rank:
            here, there = _route_to(first)
            host = host if here == there or is_loopback(here) else here
        listener = listen(address_of(host, 0))
        on_error.pop_all()
    address = address_of(host, listener.getsockname()[1])
    return ProcessInfo(rank, size, first, address, listener, credentials, entrance)


def _listener_at(address: str) -> socket.socket:
    """Return a socket that listens at an address; share that of another group of this process."""
    # `copy` of the plain set is atomic, while other threads open connections.
    for known in failure_detector.not_for_forks.data.copy():  # type: ignore[attr-defined]
        data = known()
        if isinstance(data, DataConnections) and data.listens_at(address):
            return data.info.listener.dup()  # A process that reaches the wrong group retries.
    return listen(address, os.environ)


def address_among(places: Sequence[tuple[str, ...]], rank: int) -> str:
    """Return the address of a process for the others, from the host, network and name of each."""
    here = places[rank]
    if all(place[:2] == here[:2] for place in places):
        return "127.0.0.1"
    try:
        return outward_address([place[2] for place in places if place[:2] != here[:2]])
    except OSError:
        if any(place[1] != here[1] for place in places):
            raise
        return "127.0.0.1"  # Only NDISTRIBUTE_HOST_ID tells these hosts apart.


def outward_address(names: Sequence[str]) -> str:
    """Return the address of this host for other hosts of these names."""
    host = socket.gethostname()
    # This host's name may resolve to loopback, as on Debian, or to a network inside this host.
    for name in [*list(dict.fromkeys(names))[:_MOST_LOOKED_UP], host, _SOMEWHERE]:
        with contextlib.suppress(OSError):
            address, _ = _route_to(address_of(name, 9))
            if not is_loopback(address):
                return address
    what = f"this host's name {host!r} has no address that other hosts can reach:"
    how = "add it to /etc/hosts, or start the job with TF_CONFIG, which names the addresses."
    raise OSError(f"{what} {how}")


def _route_to(address: str) -> tuple[str, str]:
    """Return the IP addresses of both ends of the route from this host to an address."""
    try:
        places = socket.getaddrinfo(*split_address(address), type=socket.SOCK_DGRAM)
        with socket.socket(places[0][0], socket.SOCK_DGRAM) as probe:
            probe.connect(places[0][4])  # Sends nothing; only looks up the route.
            return probe.getsockname()[0], probe.getpeername()[0]
    except OSError as error:
        why = why_unreached(address, error)
        raise OSError(f"this host has no route to {address}: {why}.") from error


class DataConnections:
    """The data connections between this process and others of its group.

    Higher ranks connect to lower ranks, which accept connections after `open`. If a process
    connects again, its earlier connection ends. `report` is called with a rank and the reason why
    this process cannot reach it, or an empty string. The failure detector watches the connections:
    after the heartbeat timeout, `cut_off` is called with the rank, the reason and the generation of
    the connection.
    """

    def __init__(self, info: ProcessInfo) -> None:
        self.info = info
        self.beat_within = max(_LEAST_SECONDS, failure_detector.silence_seconds())
        self.report: Callable[[int, str], None] = lambda rank, why: None
        self.cut_off: Callable[[int, str, int], None] = lambda rank, why, generation: None
        # Pairs of a generation and a rank that is cut off.
        self._silent: set[tuple[int, int]] = set()
        self._generation = 0
        self._listener: Listener | None = None
        self._sockets: dict[int, socket.socket] = {}
        self._replaced: list[socket.socket] = []
        self._changed = threading.Condition()
        failure_detector.not_for_forks.add(self)

    def open(self, addresses: Sequence[str], started: str) -> None:
        """Start to accept connections; `started` is the id of this start of the whole group."""
        self._addresses, self._started = addresses, started
        info, hello = self.info, Hello(name=f"worker {self.info.rank}")
        who = [info.listener], info.credentials, hello
        self._listener = Listener(*who, self._admit, check=self._refusal_of)

    def get(self, rank: int, check: Callable[[], None]) -> socket.socket:
        """Return the connection to a process, which must request it too; `check` ends the wait."""
        name, warning = f"worker {self.info.rank}", WaitReport(f"worker {self.info.rank}")
        since = time.monotonic()
        while (sock := self._sockets.get(rank)) is None:
            check()
            pause = _CHECK_SECONDS
            if rank < self.info.rank:
                pause, port = _RETRY_SECONDS, f"the data port of worker {rank}"
                try:
                    self._keep(rank, self._connect(rank))
                    self.report(rank, "")
                except AuthenticationError:
                    raise
                except OSError as error:  # The process may not be ready: try again.
                    port += f" at {self._addresses[rank]}: "
                    port += why_unreached(self._addresses[rank], error)
                    self.report(rank, f"{name} could not reach {port}")
                    warning.tell(port)
                    # The process answers, so this process can reach it.
                    if isinstance(error, ConnectionResetError):
                        since = time.monotonic()
                    elif (waited := time.monotonic() - since) > self.beat_within:
                        why = f"it tried for {waited:.1f} s to reach {port}."
                        self.cut_off(rank, why, self._generation)
            with self._changed:
                self._changed.wait_for(lambda: rank in self._sockets, pause)
        return sock

    def tick(self, now: float, excused: bool) -> None:
        """Report processes that do not answer, although the connection to them is open."""
        generation = self._generation  # Before the sockets: `renew` may run meanwhile.
        for rank, sock in [] if excused else list(self._sockets.items()):
            with contextlib.suppress(OSError):  # It was just closed.
                silence = unanswered_seconds(sock)
                if silence > self.beat_within and (generation, rank) not in self._silent:
                    explain = functools.partial(self._explain, rank, silence, generation)
                    threading.Thread(target=explain, name="ndistribute look", daemon=True).start()
                    self._silent.add((generation, rank))

    def _explain(self, rank: int, silence: float, generation: int) -> None:
        """Report a silent process, with the reason that a new connection to it shows."""
        address = self._addresses[rank]
        why = look_for(address) or (
            "a new connection works, so the network was cut for a time, or it loses long "
            "packets: compare the MTUs of both hosts and of the network between them, with `ping "
            f"-M do -s 1472 {split_address(address)[0]}`"
        )
        what = f"nothing came back on their data connection for {silence:.1f} s"
        self.cut_off(rank, f"{what}; {why}.", generation)

    def listens_at(self, address: str) -> bool:
        """Return True if this group accepts connections at this address."""
        same = split_address(self.info.address) == split_address(address)
        return same and self.info.listener.fileno() >= 0

    def renew(self, generation: int) -> None:
        """Close all connections; the next generation makes new ones."""
        with self._changed:
            self._generation = generation
            self.let_go()

    def close(self) -> None:
        """Stop accepting connections, and close all of them."""
        if self._listener is not None:
            self._listener.close()
        failure_detector.detector.forget(self)
        self.info.listener.close()
        with self._changed:
            self.let_go()

    def let_go(self) -> None:
        """Close the sockets in a fork: copies would hide the death of the parent process."""
        while self._sockets:
            self._replaced.append(self._sockets.popitem()[1])
        while self._replaced:
            self._replaced.pop().close()

    def _connect(self, rank: int) -> socket.socket:
        deadline = time.monotonic() + _ATTEMPT_SECONDS
        sock = tcp_socket(self._addresses[rank], deadline)
        details = self.info.details(started=self._started, generation=self._generation)
        name, audience = f"worker {self.info.rank}", f"worker {rank}"
        hello = Hello(name=name, purpose="data", audience=audience, details=details)
        sock, _ = authenticate(sock, self.info.credentials, hello, deadline=deadline)
        try:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            if sock.recv(1) != _WELCOME:
                raise ConnectionResetError("it is in another group or generation at this moment")
        except BaseException:
            sock.close()
            raise
        return sock

    def _admit(self, sock: socket.socket, accepted: Accepted) -> None:
        """Add a connection from a process of a higher rank."""
        fields: dict[str, Any] = accepted.hello.details
        with self._changed:
            here = "data", self._started, self._generation
            if (accepted.hello.purpose, fields.get("started"), fields.get("generation")) != here:
                sock.close()  # It tries again until its own group listens.
                return
            sock.send(_WELCOME)
            self._keep(fields["rank"], sock)
            self._changed.notify_all()

    def _keep(self, rank: int, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        failure_detector.probe_when_idle(sock, self.beat_within)
        sock.setblocking(False)
        failure_detector.detector.watch(self)
        stale = self._sockets.get(rank)
        self._sockets[rank] = sock
        if stale is not None:
            # Not closed yet: a thread may poll it, and its descriptor could be reused.
            self._replaced.append(stale)
            with contextlib.suppress(OSError):
                socket.socket.shutdown(stale, socket.SHUT_RDWR)

    def _refusal_of(self, hello: Hello) -> str:
        reason = self.info.refusal_of(hello, joined=True)
        ours = hello.details.get("group") == self.info.group
        if not reason and ours and hello.details.get("started") != self._started:
            what = "its worker 0 is not that of this process: two jobs use the same addresses;"
            return f"{what} give each its own ports, and NDISTRIBUTE_JOB_ID if no launcher sets it"
        return reason
