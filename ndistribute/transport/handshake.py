"""The exchange by which the two ends of a connection prove that they know the job's secret.

It is written as two generators that yield what to send (bytes) or how much to receive (a number),
so that the listener drives many at a time without a thread each, and a test drives one without a
socket. Nothing of a peer is looked at but fixed-size fields until its proof has been checked, and
the secret is never sent. The exchange goes in lockstep, so the end that refuses has read all that
was sent to it, and its reason arrives:

    client -> server   greeting: magic, protocol, role, nonce
    server -> client   greeting
    client -> server   proof: HMAC over both greetings
    server -> client   verdict, hello, HMAC over the above and the hello
    client -> server   verdict, hello, HMAC over the above and both hellos
    server -> client   verdict, empty or why not, HMAC over all of it

The server tells nothing to a peer that has not proved itself, not even its own proof, on which
guesses of the secret could be tried. The hellos carry the job's identity and the package's version,
so that processes of two jobs never mix. Both ends derive a key for each direction from the secret
and the whole exchange; frames that will be unpickled carry a MAC under it.
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
from ndistribute.transport.tls import TlsFiles, tls_context

__all__ = ["Accepted", "Hello", "Steps", "accept", "authenticate", "join"]

MAXIMUM_HELLO_BYTES = 4096
_LOOK_SECONDS = 0.05
_MAGIC = b"NDST"
_PROTOCOL = 2
_GREETING = struct.Struct("!4sHc32s")
_FIRST = struct.Struct("!cH")  # Verdict, bytes that follow.
_PROOF_BYTES = hashlib.sha256().digest_size
_CLIENT, _SERVER = b"C", b"S"
_ACCEPTED, _WRONG_SECRET, _REFUSED = b"+", b"-", b"!"
_TLS_RECORDS, _TLS_MAJOR = (0x15, 0x16), 0x03  # How an alert and a hello of TLS begin.
_USE_TLS = "it uses TLS. Set NDISTRIBUTE_TLS_CERT, _KEY and _CA for all processes, or for none"


class Hello(Record, frozen=True):
    """What one end of a connection says of itself.

    Args:
        name: the process, such as ``"worker:1#a1b2c3"``; the part behind # differs at each start.
        purpose: what the connection is for; it chooses the service that answers.
        audience: which task the client expects, such as ``"ps:0"``; empty for any.
        instance: a random name of this life of a server; another one after a restart.
        job: the identity of the job.
        version: of the package.
        silence: after how many seconds of silence it counts the other end as lost, so that this
            beats often enough.
        details: what else the purpose needs.
    """

    name: str = ""
    purpose: str = ""
    audience: str = ""
    instance: str = ""
    job: str = ""
    version: str = ""
    silence: float = 60.0
    details: dict[str, str | int] = msgspec.field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The outcome of a handshake: the peer's hello, and the keys of the two directions."""

    hello: Hello
    receiving_key: bytes
    sending_key: bytes


Steps = Generator[bytes | int, bytes, Accepted]
"""A handshake: yields bytes to send or a number of bytes to receive."""
Check = Callable[[Hello], str]
"""Returns why a peer is refused that knows the secret; empty if it is welcome."""

_hello = Decoder[Hello](Hello)


def authenticate(
    sock: socket.socket,
    secret: bytes,
    hello: Hello,
    *,
    deadline: float,
    tls: TlsFiles | None = None,
    instead: Callable[[], socket.socket | None] | None = None,
) -> tuple[socket.socket, Accepted]:
    """Run the connecting side of a handshake on a socket.

    Args:
        sock: connected. It is used up: go on with the returned one; it is closed on failure.
        secret: the job's secret (see `find_secret`).
        hello: what the peer is told once it has proved itself.
        deadline: when to give up, on the clock of `time.monotonic`.
        tls: this process's certificate, where the job uses TLS.
        instead: asked for a better socket until the peer answers, and once more then: a launcher
            keeps addresses open for processes that are still being started.

    Raises:
        AuthenticationError: the peer has another secret, job, version or CA, or refuses this end.
        CollectiveTimeoutError: the peer is too slow, or silent.
        ConnectionError: the peer closes the connection before the end.
    """
    peer = name_of_peer(sock)
    try:
        _limit(sock, deadline)
        if tls is not None:
            sock = tls_context(tls, server=False).wrap_socket(sock)
        accepted = _drive(sock, join(secret, hello, peer), deadline, instead)
        if isinstance(accepted, socket.socket):
            sock.close()
            return authenticate(accepted, secret, hello, deadline=deadline)
        sock.settimeout(None)
        return sock, accepted
    except OSError as error:
        sock.close()
        explained = _explained(error, peer)
        if explained is error:
            raise
        raise explained from error
    except BaseException:
        sock.close()
        raise


def _drive(
    sock: socket.socket,
    steps: Steps,
    deadline: float,
    instead: Callable[[], socket.socket | None] | None,
) -> Accepted | socket.socket:
    """Run a handshake on a socket; return its outcome, or the socket to use instead."""
    received = b""
    wanted = next(steps)
    try:
        while True:
            _limit(sock, deadline)
            if isinstance(wanted, bytes):
                sock.sendall(wanted)
                wanted = next(steps)
                continue
            if instead is not None:
                poll = select.poll()
                poll.register(sock, select.POLLIN)
                answers = poll.poll(_LOOK_SECONDS * 1000)
                better = instead()
                if better is not None:
                    return better
                instead = None if answers else instead
                continue
            part = sock.recv(wanted - len(received))
            if not part:
                raise ConnectionResetError
            received += part
            if len(received) == wanted:
                wanted, received = steps.send(received), b""
    except StopIteration as done:
        accepted: Accepted = done.value
        return accepted


def _limit(sock: socket.socket, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    sock.settimeout(left)


def _explained(error: OSError, peer: str) -> Exception:
    """Return what went wrong with a peer in words that say what to do."""
    if isinstance(error, AuthenticationError):
        return error
    if isinstance(error, TimeoutError):
        return CollectiveTimeoutError(
            f"The peer {peer} did not finish the handshake in time. It may have stopped, or be no "
            "process of this job: check the addresses."
        )
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ConnectionError):
        return ConnectionResetError(
            f"The peer {peer} closed the connection during the handshake. Its log may say why: it "
            "may have ended or be too busy, or the address is another program's."
        )
    if isinstance(error, ssl.SSLError):
        return tls_error(peer, error)
    return ConnectionError(f"The connection to the peer {peer} failed: {error}.")


def tls_error(peer: str, error: ssl.SSLError) -> AuthenticationError:
    """Return the error for a peer with which TLS failed."""
    return AuthenticationError(
        f"TLS with the peer {peer} failed: {error}. All processes need a certificate of the CA in "
        "NDISTRIBUTE_TLS_CA, or none of them uses TLS."
    )


def join(secret: bytes, hello: Hello, peer: str) -> Steps:
    """Return the connecting side of a handshake.

    Args:
        secret: the job's secret.
        hello: what the server is told.
        peer: how errors name the server.
    """
    mine = _greeting(_CLIENT)
    yield mine
    theirs = yield from _receive_greeting(peer, _SERVER)
    key, transcript = _key(secret), mine + theirs
    yield _mac(key, b"client proof", transcript)
    payload, transcript = yield from _receive(key, b"server hello", transcript, peer)
    server = _decoded(payload, peer)
    own = _packed(hello)
    yield _framed(key, b"client hello", transcript, _ACCEPTED, own)
    transcript += own
    _, transcript = yield from _receive(key, b"server verdict", transcript, peer)
    keys = (_mac(key, b"server frames", transcript), _mac(key, b"client frames", transcript))
    return Accepted(server, *keys)


def accept(secret: bytes, hello: Hello, check: Check, peer: str) -> Steps:
    """Return the accepting side of a handshake.

    Args:
        secret: the job's secret.
        hello: what a client is told that has proved itself; its job and version are the client's
            as well, and a client's audience, where it has one, is its name.
        check: says what else is wrong with a client.
        peer: how errors name the client.
    """
    theirs = yield from _receive_greeting(peer, _CLIENT, answer=(mine := _greeting(_SERVER)))
    key, transcript = _key(secret), theirs + mine
    proof = yield _PROOF_BYTES
    if not hmac.compare_digest(proof, _mac(key, b"client proof", transcript)):
        yield _WRONG_SECRET
        raise _wrong_secret(peer)
    own = _packed(hello)
    yield _framed(key, b"server hello", transcript, _ACCEPTED, own)
    payload, transcript = yield from _receive(key, b"client hello", transcript + own, peer)
    client = _decoded(payload, peer)
    reason = _mismatch(hello, client) or check(client) or _other_job(hello, client)
    verdict, said = (
        (_REFUSED, reason.encode()[:MAXIMUM_HELLO_BYTES]) if reason else (_ACCEPTED, b"")
    )
    yield _framed(key, b"server verdict", transcript, verdict, said)
    if reason:
        raise AuthenticationError(f"{client.name or peer} was refused: {reason}")
    keys = (_mac(key, b"client frames", transcript), _mac(key, b"server frames", transcript))
    return Accepted(client, *keys)


def _mismatch(server: Hello, client: Hello) -> str:
    """Return why a client can not be one of this server's, empty if it can."""
    if client.version != server.version:
        return (
            f"it runs version {client.version} of ndistribute, {server.name} runs "
            f"{server.version}. Install the same version for all processes of the job."
        )
    if client.audience not in ("", server.name.partition("#")[0]):
        return (
            f"it looks for {client.audience}, and this is {server.name.partition('#')[0]}. Every "
            "process needs the same cluster, and an index of its own."
        )
    return ""


def _other_job(server: Hello, client: Hello) -> str:
    if client.job != server.job:
        return (
            f"it belongs to job {client.job}, {server.name or 'this process'} to job {server.job}. "
            "Another job's process has the address: end that job, or choose other ports. Where "
            "you start the processes yourself, give all the same cluster and NDISTRIBUTE_JOB_ID."
        )
    return ""


def _greeting(role: bytes) -> bytes:
    return _GREETING.pack(_MAGIC, _PROTOCOL, role, secrets.token_bytes(32))


def _receive_greeting(
    peer: str, role: bytes, answer: bytes = b""
) -> Generator[bytes | int, bytes, bytes]:
    magic = yield len(_MAGIC)
    if magic != _MAGIC:
        hint = f"it began with {magic!r}. Check the addresses: another program may have the port"
        if magic[0] in _TLS_RECORDS and magic[1] == _TLS_MAJOR:
            if answer:
                yield answer  # To a peer's TLS this is an error, and so it learns.
            hint = _USE_TLS
        raise AuthenticationError(f"The peer {peer} is no process of this job: {hint}.")
    greeting = magic + (yield _GREETING.size - len(magic))
    if answer:
        yield answer  # Also to a peer of another version: so it learns ours.
    _, protocol, theirs, _ = _GREETING.unpack(greeting)
    if protocol != _PROTOCOL:
        raise AuthenticationError(
            f"The peer {peer} speaks version {protocol} of the handshake, and this process version "
            f"{_PROTOCOL}. Install the same version of ndistribute for all processes of the job."
        )
    if theirs != role:
        raise AuthenticationError(
            f"The peer {peer} sent back the greeting of this process's own side, "
            "so it is no process of this job, or this process connected to itself."
        )
    return greeting


def _receive(
    key: bytes, label: bytes, transcript: bytes, peer: str
) -> Generator[bytes | int, bytes, tuple[bytes, bytes]]:
    """Return what the peer says, which is known to be its own, and the transcript with it."""
    verdict = yield 1
    if verdict == _WRONG_SECRET:
        raise _wrong_secret(peer)
    length = int.from_bytes((yield 2), "big")
    if verdict not in (_ACCEPTED, _REFUSED) or length > MAXIMUM_HELLO_BYTES:
        raise AuthenticationError(
            f"The peer {peer} is no process of this job: it sent {verdict!r} and {length} bytes, "
            f"and at most {MAXIMUM_HELLO_BYTES} were expected."
        )
    payload = (yield length) if length else b""
    proof = yield _PROOF_BYTES
    if not hmac.compare_digest(proof, _mac(key, label + verdict, transcript + payload)):
        raise _wrong_secret(peer)
    if verdict == _REFUSED:
        raise AuthenticationError(
            f"{peer} refused this process: {payload.decode(errors='replace')}"
        )
    return payload, transcript + payload


def _framed(key: bytes, label: bytes, transcript: bytes, verdict: bytes, payload: bytes) -> bytes:
    proof = _mac(key, label + verdict, transcript + payload)
    return _FIRST.pack(verdict, len(payload)) + payload + proof


def _packed(hello: Hello) -> bytes:
    payload, _ = encode(hello)
    if len(payload) > MAXIMUM_HELLO_BYTES:
        raise ValueError(f"a hello of {len(payload)} bytes: at most {MAXIMUM_HELLO_BYTES} travel.")
    return payload


def _decoded(payload: bytes, peer: str) -> Hello:
    try:
        return _hello.decode(payload)
    except (MalformedError, msgspec.MsgspecError) as error:
        raise AuthenticationError(
            f"The peer {peer} runs another version of ndistribute: {error}"
        ) from error


def _wrong_secret(peer: str) -> AuthenticationError:
    return AuthenticationError(
        f"The peer {peer} has another secret than this process. Give all processes of the job the "
        "same NDISTRIBUTE_SECRET (or NDISTRIBUTE_SECRET_FILE)."
    )


def _key(secret: bytes) -> bytes:
    # HMAC takes a key that ends in zeros for the one without them; a digest has one length.
    return hashlib.sha256(secret).digest()


def _mac(key: bytes, label: bytes, transcript: bytes) -> bytes:
    """Return what only the secret yields; a label keeps one side's from serving as the other's."""
    return hmac.digest(key, b"ndistribute " + label + b"\0" + transcript, "sha256")
