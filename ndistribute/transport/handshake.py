"""Proves to each other that the two ends of a connection know the job's secret.

Nothing of a peer is looked at but fixed-size fields until its proof has been checked, and the
secret itself is never sent. The exchange goes in lockstep, so that an end which refuses has read
all that was sent to it, and the reason reaches the other end:

    client -> server   greeting: magic, version, role, nonce
    server -> client   greeting
    client -> server   proof: HMAC over both greetings
    server -> client   verdict, hello, HMAC over the above and the hello
    client -> server   verdict, hello, HMAC over the above and both hellos
    server -> client   verdict, nothing more to say, HMAC over all of it

The server tells nothing to a peer that has not proved itself, not even its own proof, on which
guesses of the secret could be tried. Without TLS what follows on the connection is neither hidden
nor protected.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
from collections.abc import Callable

from ndistribute.errors import AuthenticationError
from ndistribute.transport.line import Line
from ndistribute.transport.tls import TlsFiles, tls_files

__all__ = ["MAXIMUM_HELLO_BYTES", "TlsFiles", "authenticate", "tls_files"]

MAXIMUM_HELLO_BYTES = 4096
_MAGIC = b"NDST"
_VERSION = 1
_GREETING = struct.Struct("!4sHc32s")
_LENGTH = struct.Struct("!H")
_PROOF_BYTES = hashlib.sha256().digest_size
_CLIENT, _SERVER = b"C", b"S"
_ACCEPTED, _REFUSED = b"+", b"-"
_TLS_RECORDS, _TLS_MAJOR = (0x15, 0x16), 0x03  # How an alert and a hello of TLS begin.
_WRONG_SECRET = (
    "The peer {peer} has another secret than this process. Give all processes of the job the same "
    "NDISTRIBUTE_SECRET (or NDISTRIBUTE_SECRET_FILE)."
)


def authenticate(
    sock: socket.socket,
    secret: bytes,
    hello: bytes,
    *,
    server: bool,
    deadline: float,
    tls: TlsFiles | None = None,
    commit: Callable[[], None] | None = None,
) -> tuple[socket.socket, bytes]:
    """Prove that both ends of a connection know a secret, and exchange a first message.

    Args:
        sock: a connected socket. It is used up: go on with the returned one. It is closed when
            the handshake fails.
        secret: the job's secret (see ``find_secret``).
        hello: what the peer is told once it has proved itself, at most 4096 bytes.
        server: whether this side accepted the connection; the sides must differ.
        deadline: when to give up, on the clock of ``time.monotonic``.
        tls: this process's certificate, where the job uses TLS.
        commit: called on the accepting side when the peer has proved itself, and before it is
            told that it is in; it may still raise to keep the peer out.

    Returns:
        The socket to go on with, with the timeout that ``sock`` had, and the peer's hello.

    Raises:
        AuthenticationError: when the peer has another secret, protocol, version or CA.
        CollectiveTimeoutError: when the peer is too slow, or silent.
        ConnectionError: when the peer closes the connection before the end.
        ValueError: when the secret is empty or the hello too long.
    """
    if not secret or len(hello) > MAXIMUM_HELLO_BYTES:
        sock.close()
        raise ValueError(
            f"A handshake needs a secret, here {len(secret)} bytes, and a hello of at most "
            f"{MAXIMUM_HELLO_BYTES} bytes, here {len(hello)}."
        )
    timeout = sock.gettimeout()
    line = Line(sock, deadline)
    try:
        if tls is not None:
            line.start_tls(tls, server=server)
        theirs = _serve(line, secret, hello, commit) if server else _join(line, secret, hello)
        line.sock.settimeout(timeout)
    except BaseException:
        line.sock.close()
        raise
    return line.sock, theirs


def _join(line: Line, secret: bytes, hello: bytes) -> bytes:
    """Run the connecting side."""
    mine = _greeting(_CLIENT)
    line.send(mine)
    theirs = _receive_greeting(line)
    _check_greeting(theirs, _SERVER, line.peer)
    greetings = mine + theirs
    line.send(_proof(secret, b"client proof", greetings))
    their_hello = _receive_hello(line, secret, b"server hello", greetings)
    transcript = greetings + _framed(their_hello)
    _send_hello(line, secret, b"client hello", transcript, hello)
    _receive_hello(line, secret, b"server welcome", transcript + _framed(hello))
    return their_hello


def _serve(line: Line, secret: bytes, hello: bytes, commit: Callable[[], None] | None) -> bytes:
    """Run the accepting side."""
    theirs = _receive_greeting(line)
    mine = _greeting(_SERVER)
    line.send(mine)  # Also to a peer of another version: so it learns ours.
    _check_greeting(theirs, _CLIENT, line.peer)
    greetings = theirs + mine
    _check(line, line.receive(_PROOF_BYTES), _proof(secret, b"client proof", greetings))
    _send_hello(line, secret, b"server hello", greetings, hello)
    transcript = greetings + _framed(hello)
    their_hello = _receive_hello(line, secret, b"client hello", transcript)
    if commit is not None:
        commit()
    _send_hello(line, secret, b"server welcome", transcript + _framed(their_hello), b"")
    return their_hello


def _greeting(role: bytes) -> bytes:
    return _GREETING.pack(_MAGIC, _VERSION, role, secrets.token_bytes(32))


def _check_greeting(greeting: bytes, role: bytes, peer: str) -> None:
    _, version, theirs, _ = _GREETING.unpack(greeting)
    if version != _VERSION:
        raise AuthenticationError(
            f"The peer {peer} speaks version {version} of the handshake, and this process version "
            f"{_VERSION}. Install the same version of ndistribute for all processes of the job."
        )
    if theirs != role:
        raise AuthenticationError(
            f"The peer {peer} sent back the greeting of this process's own side, "
            "so it is no process of this job, or this process connected to itself."
        )


def _receive_greeting(line: Line) -> bytes:
    magic = line.receive(len(_MAGIC))
    if magic == _MAGIC:
        return magic + line.receive(_GREETING.size - len(magic))
    hint = f"it began with {magic!r}. Check the addresses: another program may have the port"
    if magic[0] in _TLS_RECORDS and magic[1] == _TLS_MAJOR:
        line.farewell(_greeting(_SERVER))  # To a peer's TLS this is an error, and so it learns.
        hint = "it uses TLS. Set NDISTRIBUTE_TLS_CERT, _KEY and _CA for all processes, or for none"
    raise AuthenticationError(f"The peer {line.peer} is no process of this job: {hint}.")


def _send_hello(line: Line, secret: bytes, label: bytes, transcript: bytes, hello: bytes) -> None:
    framed = _framed(hello)
    line.send(_ACCEPTED + framed + _proof(secret, label, transcript + framed))


def _receive_hello(line: Line, secret: bytes, label: bytes, transcript: bytes) -> bytes:
    verdict = line.receive(1)
    if verdict == _REFUSED:
        raise AuthenticationError(_WRONG_SECRET.format(peer=line.peer))
    (length,) = _LENGTH.unpack(line.receive(_LENGTH.size))
    if verdict != _ACCEPTED or length > MAXIMUM_HELLO_BYTES:
        raise AuthenticationError(
            f"The peer {line.peer} is no process of this job: it sent {verdict!r} and a hello "
            f"of {length} bytes, and at most {MAXIMUM_HELLO_BYTES} were expected."
        )
    hello = line.receive(length)
    proof = line.receive(_PROOF_BYTES)
    _check(line, proof, _proof(secret, label, transcript + _framed(hello)))
    return hello


def _check(line: Line, proof: bytes, expected: bytes) -> None:
    """Raise, and let the peer know, when a proof is wrong."""
    if not hmac.compare_digest(proof, expected):
        with contextlib.suppress(OSError):
            line.send(_REFUSED)
        raise AuthenticationError(_WRONG_SECRET.format(peer=line.peer))


def _framed(hello: bytes) -> bytes:
    return _LENGTH.pack(len(hello)) + hello


def _proof(secret: bytes, label: bytes, transcript: bytes) -> bytes:
    """Return what only the secret yields; a label keeps one side's from serving as the other's."""
    # HMAC takes a key that ends in zeros for the one without them; a digest has one length.
    key = hashlib.sha256(secret).digest()
    return hmac.digest(key, b"ndistribute " + label + b"\0" + transcript, "sha256")
