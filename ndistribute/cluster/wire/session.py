"""A client's session with a server: how it begins, and what proves each call to be its own.

The two sides prove to each other that they know the secret, without sending it, and derive the
key of a session from the exchange. Every later call carries a token that only the holder of that
key can make and that serves once.

    client -> server   greeting: a nonce
    server -> client   challenge: time, nonce, the server's seal over them and the client's nonce
    client -> server   nonce, challenge, audience, name, and a proof over all of it
    server -> client   the server's incarnation, and a proof over all of it

Bytes alone come in and go out, whatever carries them. Without TLS, what a call carries beside its
sealed part is neither hidden nor protected.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
import threading

from ndistribute.errors import AuthenticationError

__all__ = ["Introduction", "Session"]

MAXIMUM_NAME_BYTES = 512
VERSION = b"NDPS\x01"
NONCE_BYTES, SEAL_BYTES, SESSION_BYTES = 32, 32, 16
CHALLENGE_TIME = struct.Struct("!d")
CHALLENGE_BYTES = CHALLENGE_TIME.size + NONCE_BYTES + SEAL_BYTES
GREETING_BYTES = len(VERSION) + NONCE_BYTES
NAME_LENGTHS = struct.Struct("!HH")
TOKEN = struct.Struct(f"!{SESSION_BYTES}sQ{SEAL_BYTES}s")
_REMEMBERED_COUNTERS = 4096  # Calls overtake each other, but never by so many.


class Session:
    """Hold what the two ends of a session share: its key, and which calls were made.

    Args:
        name: what stands for the session in each call.
        key: what only the two ends know.
        client: how the client calls itself.
        server: the incarnation of the server; another one has forgotten what this one knew.
    """

    def __init__(self, name: bytes, key: bytes, client: str, server: bytes) -> None:
        self.name = name
        self.client = client
        self.server = server
        self.heard = 0.0
        self._key = key
        self._lock = threading.Lock()
        self._sent = 0
        self._highest = 0
        self._seen = 0  # A bit for each of the last counters, the highest one's is the lowest.

    def token(self, method: str) -> tuple[bytes, int]:
        """Return what admits one call of a method, and the call's number."""
        with self._lock:
            self._sent += 1
            counter = self._sent
        return TOKEN.pack(self.name, counter, self.seal("token", method, counter)), counter

    def seal(self, label: str, method: str, counter: int, text: bytes = b"") -> bytes:
        """Return what proves that the other end of the session wrote a text, for one call."""
        parts = (label, method, str(counter))
        return sealed(self._key, "\0".join(parts).encode() + b"\0" + text)

    def check(self, seal: bytes, label: str, method: str, counter: int, text: bytes) -> None:
        """Raise where a text is not what the other end wrote for this call.

        Raises:
            AuthenticationError: somebody changed it on the way.
        """
        if not hmac.compare_digest(seal, self.seal(label, method, counter, text)):
            raise AuthenticationError(
                f"A message of {method} was changed on its way between {self.client} and its "
                "server. Set NDISTRIBUTE_TLS_CERT, _KEY and _CA to keep others off the wire."
            )

    def take(self, method: str, counter: int, seal: bytes) -> bool:
        """Say whether a token is genuine and new; it is used up."""
        if not hmac.compare_digest(seal, self.seal("token", method, counter)):
            return False
        with self._lock:
            if counter > self._highest:
                shift = min(counter - self._highest, _REMEMBERED_COUNTERS)
                self._seen = (self._seen << shift) & ((1 << _REMEMBERED_COUNTERS) - 1)
                self._highest = counter
            age = self._highest - counter
            if age >= _REMEMBERED_COUNTERS or self._seen >> age & 1:
                return False
            self._seen |= 1 << age
            return True


class Introduction:
    """Go through the client's side of the exchange.

    Args:
        secret: the job's secret.
        client: a name for this client, which no other client of the server has.
        audience: which server this is meant for; the empty one means any.

    >>> from ndistribute.cluster.wire.guard import Guard
    >>> guard = Guard(b"correct horse battery", audience="ps:0")
    >>> me = Introduction(b"correct horse battery", "worker:1", "ps:0")
    >>> session = me.finish(guard.prove(me.prove(guard.greet(me.greeting))))
    >>> token, _ = session.token("Call")
    >>> guard.admit("Call", token)[0].client
    'worker:1'
    """

    def __init__(self, secret: bytes, client: str, audience: str = "") -> None:
        self._key = key_of(secret)
        self._client = client
        names = (audience.encode(), client.encode())
        if not client or max(map(len, names)) > MAXIMUM_NAME_BYTES:
            raise ValueError(
                f"A client's name has 1 to {MAXIMUM_NAME_BYTES} bytes, here {client!r} "
                f"(for {audience!r})."
            )
        self._names = NAME_LENGTHS.pack(*map(len, names)) + b"".join(names)
        self._transcript = b""
        self.greeting = VERSION + secrets.token_bytes(NONCE_BYTES)

    def prove(self, challenge: bytes) -> bytes:
        """Return the answer to a server's challenge."""
        if len(challenge) != CHALLENGE_BYTES:
            raise AuthenticationError("The server is no server of this job: its challenge is none.")
        self._transcript = self.greeting + challenge + self._names
        return self._transcript + sealed(self._key, b"client proof" + self._transcript)

    def finish(self, welcome: bytes) -> Session:
        """Return the session, once the server has proved itself too."""
        server, proof = welcome[:SESSION_BYTES], welcome[SESSION_BYTES:]
        if not hmac.compare_digest(proof, welcome_of(self._key, self._transcript, server)):
            raise AuthenticationError(
                "The server did not prove that it knows the secret of this job. Check the address: "
                "another job's server, or another program, may have the port."
            )
        return session_of(self._key, self._transcript, server, self._client)


def session_of(key: bytes, transcript: bytes, server: bytes, client: str) -> Session:
    name = sealed(key, b"session name" + transcript)[:SESSION_BYTES]
    return Session(name, sealed(key, b"session key" + server + transcript), client, server)


def welcome_of(key: bytes, transcript: bytes, server: bytes) -> bytes:
    return sealed(key, b"server proof" + server + transcript)


def key_of(secret: bytes) -> bytes:
    if not secret:
        raise ValueError("A session needs a secret, and this one is empty.")
    # HMAC takes a key that ends in zeros for the one without them; a digest has one length.
    return hashlib.sha256(b"ndistribute server\0" + secret).digest()


def sealed(key: bytes, text: bytes) -> bytes:
    return hmac.digest(key, text, "sha256")
