"""The handshake in which both ends of a connection prove that they know the job's secret.

Each side is a generator that yields bytes to send or a number of bytes to receive. So the listener
runs many handshakes on one thread, and tests run handshakes without sockets. Before a proof is
verified, a side reads only fixed-size fields of its peer. The secret is never sent. The sides
alternate, so a side that refuses has read everything that was sent to it, and its reason arrives:

    client -> server   greeting: magic, protocol, role, nonce
    server -> client   greeting
    client -> server   proof: HMAC over both greetings
    server -> client   verdict, hello, HMAC over the above and the hello
    client -> server   verdict, hello, HMAC over the above and both hellos
    server -> client   verdict, empty or why not, HMAC over all of it

The server sends no proof to an unauthenticated peer, because a proof would allow
offline guesses of the secret. The hellos carry the job's identity and the package's version, so
processes of two jobs refuse each other. Both sides derive a key for each direction from the secret
and the whole exchange; frames that will be unpickled carry a MAC with that key.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass

import msgspec

from ndistribute.errors import AuthenticationError, CollectiveTimeoutError
from ndistribute.transport.address import name_of_peer
from ndistribute.transport.codec import Decoder, MalformedError, Record, encode
from ndistribute.transport.failure_detector import silence_seconds
from ndistribute.transport.secret import Credentials, tls_context
from ndistribute.version import __version__

MAXIMUM_HELLO_BYTES = 4096
WOULD_BLOCK = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_MAGIC = b"NDST"
_PROTOCOL = 2
_GREETING = struct.Struct("!4sHc32s")
_FIRST = struct.Struct("!cH")  # Verdict, bytes that follow.
_PROOF_BYTES = hashlib.sha256().digest_size
_CLIENT, _SERVER = b"C", b"S"
_ACCEPTED, _WRONG_SECRET, _REFUSED = b"+", b"-", b"!"
_TLS_RECORDS, _TLS_MAJOR = (0x15, 0x16), 0x03  # How an alert and a hello of TLS begin.


class Hello(Record, frozen=True):
    """How one end of a connection describes itself."""

    name: str = ""  # Such as "worker:1#a1b2c3"; the part after # is new for each start.
    purpose: str = ""  # The service that handles the connection.
    audience: str = ""  # The task that the client expects, such as "ps:0"; empty for any.
    instance: str = ""  # Identifies one start of a server.
    job: str = ""
    version: str = ""
    # Seconds of silence after which it counts its peer as lost, at most the heartbeat timeout.
    silence: float = float("inf")
    patience: float = 0.0  # Seconds for which it tries to reach a peer that is out of reach.
    details: dict[str, str | int] = msgspec.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The outcome of a handshake: the peer's hello, and the keys of the two directions."""

    hello: Hello
    receiving_key: bytes
    sending_key: bytes


Steps = Generator[bytes | int, bytes, Accepted]
# Returns the reason to refuse an authenticated peer, or an empty string to accept it.
Check = Callable[[Hello], str]

_hello = Decoder[Hello](Hello)


class Handshake:
    """Run one side of a handshake on a non-blocking socket."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._wanted, self._received = next(steps), b""

    def advance(self, sock: socket.socket) -> Accepted:
        """Continue to the end; raise what the socket raises where it would block."""
        try:
            while True:
                wanted = self._wanted
                if isinstance(wanted, bytes):
                    sock.sendall(wanted)  # Fits into the socket's empty buffer.
                    self._wanted = next(self._steps)
                elif len(self._received) < wanted:
                    part = sock.recv(wanted - len(self._received))
                    if not part:
                        raise ConnectionResetError("it closed the connection during the handshake")
                    self._received += part
                else:
                    received, self._received = self._received, b""
                    self._wanted = self._steps.send(received)
        except StopIteration as done:
            accepted: Accepted = done.value
            return accepted


def signed(hello: Hello, job: str) -> Hello:
    """Return a hello to which the job, the package's version and the timeout are added."""
    silence = min(hello.silence, silence_seconds())
    return msgspec.structs.replace(hello, job=job, version=__version__, silence=silence)


def authenticate(
    sock: socket.socket,
    credentials: Credentials,
    hello: Hello,
    *,
    deadline: float,
    instead: Callable[[], socket.socket | None] | None = None,
) -> tuple[socket.socket, Accepted]:
    """Run the connecting side of a handshake; return a blocking socket and the outcome.

    When the peer first replies, `instead` may return a better socket to use. A failure closes the
    socket.
    """
    peer = name_of_peer(sock)
    try:
        sock, handshake = _begin(sock, credentials, hello, peer)
        while True:
            try:
                accepted = handshake.advance(sock)
                sock.setblocking(True)
                return sock, accepted
            except WOULD_BLOCK as error:
                poll, out = select.poll(), isinstance(error, ssl.SSLWantWriteError)
                poll.register(sock, select.POLLOUT if out else select.POLLIN)
                if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    raise TimeoutError from error
            better = None if instead is None else instead()
            if better is not None:
                sock.close()
                sock, handshake = _begin(better, credentials, hello, peer)
            instead = None
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError) and not isinstance(error, AuthenticationError):
            raise _explained(error, peer) from error
        raise


def _begin(
    sock: socket.socket, credentials: Credentials, hello: Hello, peer: str
) -> tuple[socket.socket, Handshake]:
    sock.setblocking(False)
    if credentials.tls is not None and sock.family != socket.AF_UNIX:
        context = tls_context(credentials.tls, server=False)
        sock = context.wrap_socket(sock, do_handshake_on_connect=False)
    return sock, Handshake(join(credentials.secret, signed(hello, credentials.job), peer))


def _explained(error: OSError, peer: str) -> Exception:
    """Return an error that names the peer, what failed, and what to do."""
    if isinstance(error, TimeoutError):
        return CollectiveTimeoutError(
            f"The peer {peer} did not finish the handshake in time. It may be stopped, it may not "
            "be a process of this job, or the network may lose long packets: check addresses and "
            "MTUs."
        )
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ConnectionError):
        what = f"The peer {peer} closed the connection during the handshake. Its log may say why:"
        how = "it may have ended or be too busy, or the address is another program's."
        return ConnectionResetError(f"{what} {how}")
    if isinstance(error, ssl.SSLError):
        return tls_error(peer, error)
    return ConnectionError(f"The connection to the peer {peer} failed: {error}.")


def tls_error(peer: str, error: ssl.SSLError) -> AuthenticationError:
    """Return the error for a failed TLS connection to a peer."""
    return AuthenticationError(
        f"TLS with the peer {peer} failed: {error}. Give all processes a certificate of the CA in "
        "NDISTRIBUTE_TLS_CA, or use TLS in none of them."
    )


def join(secret: bytes, hello: Hello, peer: str) -> Steps:
    """Return the steps of the connecting side; error messages name the server `peer`."""
    transcript = yield from _exchange_greetings(secret, _CLIENT, peer)
    yield transcript.mac(b"client proof")
    server = _decoded((yield from transcript.receive(b"server hello")), peer)
    yield transcript.message(b"client hello", encode(hello)[0])
    yield from transcript.receive(b"server verdict")
    return Accepted(server, transcript.mac(b"server frames"), transcript.mac(b"client frames"))


def accept(secret: bytes, hello: Hello, check: Check, peer: str) -> Steps:
    """Return the steps of the accepting side; both must have the same job and version."""
    transcript = yield from _exchange_greetings(secret, _SERVER, peer)
    if not hmac.compare_digest((yield _PROOF_BYTES), transcript.mac(b"client proof")):
        yield _WRONG_SECRET
        raise transcript.wrong_secret()
    yield transcript.message(b"server hello", encode(hello)[0])
    client = _decoded((yield from transcript.receive(b"client hello")), peer)
    if reason := _mismatch(hello, client, check):
        yield transcript.message(b"server verdict", reason.encode()[:MAXIMUM_HELLO_BYTES], _REFUSED)
        raise AuthenticationError(f"{client.name or peer} was refused: {reason}")
    yield transcript.message(b"server verdict")
    return Accepted(client, transcript.mac(b"client frames"), transcript.mac(b"server frames"))


def _exchange_greetings(
    secret: bytes, role: bytes, peer: str
) -> Generator[bytes | int, bytes, _Transcript]:
    """Exchange greetings; the client sends first."""
    greeting = _GREETING.pack(_MAGIC, _PROTOCOL, role, secrets.token_bytes(32))
    if role == _CLIENT:
        yield greeting
    magic = yield len(_MAGIC)
    if magic != _MAGIC:
        hint = f"it first sent {magic!r}. Check the addresses: another program may have the port"
        if magic[0] in _TLS_RECORDS and magic[1] == _TLS_MAJOR:
            yield greeting  # The peer's TLS fails on this, so the peer learns of the mismatch.
            hint = "it uses TLS. Set NDISTRIBUTE_TLS_CERT, _KEY and _CA for all processes, or none"
        raise AuthenticationError(f"The peer {peer} is not a process of this job: {hint}.")
    other = magic + (yield _GREETING.size - len(magic))
    if role == _SERVER:
        yield greeting  # A peer of another version thus learns this version.
    _, protocol, other_role, _ = _GREETING.unpack(other)
    if protocol != _PROTOCOL:
        raise AuthenticationError(
            f"The peer {peer} speaks version {protocol} of the handshake, and this process version "
            f"{_PROTOCOL}. Install the same version of ndistribute for all processes of the job."
        )
    if other_role != (_SERVER if role == _CLIENT else _CLIENT):
        raise AuthenticationError(
            f"The peer {peer} sent back this process's own greeting, so it is not a process of "
            "this job, or this process connected to itself."
        )
    return _Transcript(secret, greeting + other if role == _CLIENT else other + greeting, peer)


class _Transcript:
    """The bytes that both sides have sent, and the MACs over them."""

    def __init__(self, secret: bytes, greetings: bytes, peer: str) -> None:
        # HMAC pads keys with zeros; a digest of fixed length makes all keys distinct.
        self._key = hashlib.sha256(secret).digest()
        self._bytes = greetings
        self._peer = peer

    def mac(self, label: bytes) -> bytes:
        """Return a proof or a key; the label makes both sides' values distinct."""
        return hmac.digest(self._key, b"ndistribute " + label + b"\0" + self._bytes, "sha256")

    def message(self, label: bytes, payload: bytes = b"", verdict: bytes = _ACCEPTED) -> bytes:
        if (length := len(payload)) > MAXIMUM_HELLO_BYTES:
            raise ValueError(
                f"a hello of {length} bytes exceeds the limit of {MAXIMUM_HELLO_BYTES}."
            )
        self._bytes += payload
        return _FIRST.pack(verdict, length) + payload + self.mac(label + verdict)

    def receive(self, label: bytes) -> Generator[bytes | int, bytes, bytes]:
        """Receive and verify a message of the peer, and return its payload."""
        verdict = yield 1
        if verdict == _WRONG_SECRET:
            raise self.wrong_secret()
        length = int.from_bytes((yield 2), "big")
        if verdict not in (_ACCEPTED, _REFUSED) or length > MAXIMUM_HELLO_BYTES:
            raise AuthenticationError(
                f"The peer {self._peer} is not a process of this job: it sent {verdict!r} and "
                f"{length} bytes, and at most {MAXIMUM_HELLO_BYTES} were expected."
            )
        payload = (yield length) if length else b""
        self._bytes += payload
        if not hmac.compare_digest((yield _PROOF_BYTES), self.mac(label + verdict)):
            raise self.wrong_secret()
        if verdict == _REFUSED:
            reason = payload.decode(errors="replace")
            raise AuthenticationError(f"{self._peer} refused this process: {reason}")
        return payload

    def wrong_secret(self) -> AuthenticationError:
        what = f"The peer {self._peer} has another secret than this process. Give all processes of"
        names = "NDISTRIBUTE_SECRET (or NDISTRIBUTE_SECRET_FILE)"
        return AuthenticationError(f"{what} the job the same {names}.")


def _mismatch(server: Hello, client: Hello, check: Check) -> str:
    """Return the reason to refuse a client, or an empty string to accept it."""
    name = server.name.partition("#")[0]
    if client.version != server.version:
        return (
            f"it runs version {client.version} of ndistribute, but {server.name} runs "
            f"{server.version}. Install the same version for all processes of the job."
        )
    if client.audience not in ("", name):
        what = f"it expected {client.audience}, but this is {name}."
        return f"{what} Every process needs the same cluster, and its own index."
    reason = check(client)  # First, because its reason is more specific.
    # A client without a job names the server by its address alone, as graph sessions do.
    if not reason and client.job and client.job != server.job:
        reason = (
            f"it belongs to job {client.job}, but {server.name or 'this process'} belongs to job "
            f"{server.job}. A process of another job uses the address: end that job, or choose "
            "other ports. If you start the processes yourself, give all of them the same cluster "
            "and NDISTRIBUTE_JOB_ID."
        )
    return reason


def _decoded(payload: bytes, peer: str) -> Hello:
    try:
        return _hello.decode(payload)
    except MalformedError as error:
        what = f"The peer {peer} runs another version of ndistribute: {error}"
        raise AuthenticationError(what) from error
