"""Keeps the sessions of a server: lets in who proves to know the secret, and no call twice.

A stranger costs no memory: the challenge it answers carries the server's own seal, and a session is
kept only for who has passed. The exchange itself is described in ``session.py``.
"""

from __future__ import annotations

import hmac
import secrets
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from ndistribute.cluster.wire.session import (
    CHALLENGE_BYTES,
    CHALLENGE_TIME,
    GREETING_BYTES,
    MAXIMUM_NAME_BYTES,
    NAME_LENGTHS,
    NONCE_BYTES,
    SEAL_BYTES,
    SESSION_BYTES,
    TOKEN,
    VERSION,
    Session,
    key_of,
    sealed,
    session_of,
    welcome_of,
)
from ndistribute.errors import AuthenticationError

__all__ = ["CHALLENGE_SECONDS", "INTRODUCTIONS", "Guard", "UnknownSessionError"]

INTRODUCTIONS = ("Greet", "Prove")
"""The calls that need no session, since they lead to one; they have no body."""

CHALLENGE_SECONDS = 10.0
MAXIMUM_SESSIONS = 4096


class UnknownSessionError(AuthenticationError):
    """Say that a call belongs to no session of this server, or was seen before."""


class Guard:
    """Keep the sessions of a server.

    Args:
        secret: the job's secret.
        audience: which server this is; a client that means another one is refused.
        clock: seconds that only rise.
    """

    def __init__(
        self, secret: bytes, audience: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._key = key_of(secret)
        self._audience = audience
        self._clock = clock
        self._own_key = secrets.token_bytes(32)
        self._incarnation = secrets.token_bytes(SESSION_BYTES)
        self._lock = threading.Lock()
        self._sessions: dict[bytes, Session] = {}
        self._clients: dict[str, Session] = {}
        self._used: OrderedDict[bytes, float] = OrderedDict()  # Challenges that were answered well.

    def greet(self, greeting: bytes) -> bytes:
        """Return a challenge; nothing is kept of who asked.

        Raises:
            AuthenticationError: it is no greeting of this protocol's version.
        """
        self._check_version(greeting, len(greeting) == GREETING_BYTES)
        challenge = CHALLENGE_TIME.pack(self._clock()) + secrets.token_bytes(NONCE_BYTES)
        return challenge + sealed(self._own_key, greeting + challenge)

    def prove(self, answer: bytes) -> bytes:
        """Open a session for who answers a challenge, in place of the client's earlier one.

        Raises:
            AuthenticationError: the answer is wrong, late or was used, or is for another server.
        """
        self._check_version(answer, len(answer) > GREETING_BYTES + CHALLENGE_BYTES + SEAL_BYTES)
        transcript, proof = answer[:-SEAL_BYTES], answer[-SEAL_BYTES:]
        challenge = self._own_challenge(transcript)
        if not hmac.compare_digest(proof, sealed(self._key, b"client proof" + transcript)):
            raise AuthenticationError(
                "The client has another secret than this server. Give all processes of the job "
                "the same NDISTRIBUTE_SECRET (or NDISTRIBUTE_SECRET_FILE)."
            )
        audience, client = _names(transcript[GREETING_BYTES + CHALLENGE_BYTES :])
        if audience not in ("", self._audience):
            raise AuthenticationError(
                f"{client} looks for {audience!r}, and this server is {self._audience!r}. Check "
                "the addresses: the jobs of one host need different ports."
            )
        session = session_of(self._key, transcript, self._incarnation, client)
        self._keep(session, challenge)
        return self._incarnation + welcome_of(self._key, transcript, self._incarnation)

    def introduce(self, method: str, token: bytes) -> bytes:
        """Return the answer to a call that leads to a session, see ``greet`` and ``prove``."""
        return self.greet(token) if method == "Greet" else self.prove(token)

    def admit(self, method: str, token: bytes) -> tuple[Session, int]:
        """Return the session that a call belongs to, and the call's number.

        Raises:
            UnknownSessionError: it belongs to none, or the token was used before.
        """
        if len(token) == TOKEN.size:
            name, counter, seal = TOKEN.unpack(token)
            session = self._sessions.get(name)
            if session is not None and session.take(method, counter, seal):
                session.heard = self._clock()
                return session, counter
        raise UnknownSessionError(f"A call of {method} belongs to no session of this server.")

    def leave(self, session: Session) -> bool:
        """End a session; say whether the client has no other one."""
        with self._lock:
            self._sessions.pop(session.name, None)
            last = self._clients.get(session.client) is session
            if last:
                del self._clients[session.client]
            return last

    def knows(self, session: Session) -> bool:
        """Say whether a session is open, and its client has no newer one."""
        return self._clients.get(session.client) is session

    def has(self, client: str) -> bool:
        """Say whether a client has a session."""
        return client in self._clients

    def silent(self, seconds: float) -> list[Session]:
        """Return the sessions of which nothing was heard for so long."""
        limit = self._clock() - seconds
        with self._lock:
            return [session for session in self._sessions.values() if session.heard < limit]

    def _keep(self, session: Session, challenge: bytes) -> None:
        now = self._clock()
        session.heard = now
        with self._lock:
            while self._used and next(iter(self._used.values())) < now - CHALLENGE_SECONDS:
                self._used.popitem(last=False)
            if challenge in self._used:
                raise AuthenticationError("The answer to a challenge was used before.")
            if len(self._clients) >= MAXIMUM_SESSIONS and session.client not in self._clients:
                raise AuthenticationError(f"This server has {MAXIMUM_SESSIONS} clients already.")
            self._used[challenge] = now
            earlier = self._clients.get(session.client)
            if earlier is not None:
                del self._sessions[earlier.name]
            self._clients[session.client] = self._sessions[session.name] = session

    def _own_challenge(self, transcript: bytes) -> bytes:
        """Return the challenge that was answered, where this server made it a moment ago."""
        greeting = transcript[:GREETING_BYTES]
        whole = transcript[GREETING_BYTES : GREETING_BYTES + CHALLENGE_BYTES]
        challenge, seal = whole[:-SEAL_BYTES], whole[-SEAL_BYTES:]
        genuine = hmac.compare_digest(seal, sealed(self._own_key, greeting + challenge))
        if (
            not genuine
            or self._clock() - CHALLENGE_TIME.unpack_from(challenge)[0] > CHALLENGE_SECONDS
        ):
            raise UnknownSessionError("The challenge is not this server's, or too old: ask again.")
        return challenge

    @staticmethod
    def _check_version(message: bytes, well_formed: bool) -> None:
        if not well_formed or not message.startswith(VERSION):
            raise AuthenticationError(
                "The client is no process of this job, or has another version of ndistribute."
            )


def _names(text: bytes) -> tuple[str, str]:
    try:
        first, second = NAME_LENGTHS.unpack_from(text)
        audience, client = text[NAME_LENGTHS.size :][:first], text[NAME_LENGTHS.size + first :]
        if len(client) != second or not 0 < second <= MAXIMUM_NAME_BYTES:
            raise ValueError("lengths")
        return audience.decode(), client.decode()
    except (struct.error, ValueError) as error:
        raise AuthenticationError("The client's name is malformed.") from error
