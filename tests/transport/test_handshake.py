"""Only who knows the secret gets through, and everyone else learns why not, in time."""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndistribute.errors import AuthenticationError, CollectiveTimeoutError
from ndistribute.transport.handshake import MAXIMUM_HELLO_BYTES, authenticate
from tests.transport.handshakes import (
    GREETING_BYTES,
    SECRET,
    WRONG_SECRET,
    Between,
    at_once,
    connection,
    outcome,
    receive,
    shake,
)

REFUSED = (AuthenticationError, CollectiveTimeoutError, ConnectionError)


@functools.cache
def transcript() -> dict[str, bytes]:
    """What each side sends when all is well."""
    between = Between()
    assert between.shake() == (b"I join", b"I serve")
    return between.seen


def proof(secret: bytes, label: bytes, transcript: bytes) -> bytes:
    """The protocol, written down a second time."""
    key = hashlib.sha256(secret).digest()
    return hmac.new(key, b"ndistribute " + label + b"\0" + transcript, "sha256").digest()


def test_both_ends_learn_the_others_hello():
    assert shake() == (b"I join", b"I serve")


@given(st.binary(min_size=1), *[st.binary(max_size=MAXIMUM_HELLO_BYTES)] * 2)
def test_any_secret_and_any_hello_pass_unchanged(secret, one, other):
    outcomes = shake(secret, secret, server={"hello": one}, client={"hello": other})
    assert outcomes == (other, one)


def test_a_wrong_secret_is_an_error_at_both_ends_that_says_so():
    for error in shake(SECRET, WRONG_SECRET):
        assert isinstance(error, AuthenticationError)
        assert "another secret" in str(error)
        assert "NDISTRIBUTE_SECRET" in str(error)


@pytest.mark.parametrize("longer", [SECRET + b"\0", b"\0" + SECRET, SECRET * 2])
def test_a_secret_that_begins_or_ends_alike_is_another(longer):
    assert {type(error) for error in shake(SECRET, longer)} == {AuthenticationError}


def test_the_secret_and_the_hello_of_a_refusing_end_are_not_sent():
    between = Between("client", flip=GREETING_BYTES)  # The client's proof is spoilt.
    between.shake()
    assert b"I serve" not in between.seen["server"]
    assert b"I join" not in between.seen["client"]
    assert not any(SECRET in sent for sent in transcript().values())


def test_a_server_proves_nothing_to_a_stranger():
    with connection() as (server, client):
        client.sendall(b"NDST" + struct.pack("!Hc32s", 1, b"C", os.urandom(32)) + os.urandom(32))
        error = outcome(server, SECRET, server=True)
        assert isinstance(error, AuthenticationError)
        assert len(receive(client, 4096)) == GREETING_BYTES + 1


def test_a_client_finds_out_a_server_that_only_pretends():
    def pretend(sock: socket.socket) -> bytes:
        sock.sendall(b"NDST" + struct.pack("!Hc32s", 1, b"S", os.urandom(32)))
        receive(sock, GREETING_BYTES + 32)
        sock.sendall(b"+" + struct.pack("!H", 3) + b"hey" + os.urandom(32))
        return sock.recv(100)

    with connection() as (server, client):
        sent, error = at_once(
            lambda: pretend(server), lambda: outcome(client, SECRET, server=False)
        )
    assert isinstance(error, AuthenticationError)
    assert sent == b"-"


def test_a_reflection_is_refused_by_who_connects():
    def echo(sock: socket.socket) -> None:
        while data := sock.recv(4096):
            sock.sendall(data)

    with connection() as (one, other):
        error, _ = at_once(lambda: outcome(one, SECRET, server=False), lambda: echo(other))
    assert isinstance(error, AuthenticationError)
    assert "sent back" in str(error)


def test_a_reflection_is_refused_by_who_accepts():
    """What another accepting end said, or this one before, opens nothing."""
    with connection() as (one, other):
        other.sendall(transcript()["server"])
        error = outcome(one, SECRET, server=True)
    assert isinstance(error, AuthenticationError)
    assert "sent back" in str(error)


def test_a_reflection_with_the_role_changed_is_refused():
    def reflect(sock: socket.socket) -> None:
        greeting = receive(sock, GREETING_BYTES)
        sock.sendall(greeting.replace(b"C", b"S", 1))
        sock.sendall(b"+" + struct.pack("!H", 0) + receive(sock, 32))
        sock.recv(100)

    with connection() as (one, other):
        error, _ = at_once(lambda: outcome(one, SECRET, server=False), lambda: reflect(other))
    assert isinstance(error, AuthenticationError)


@pytest.mark.parametrize("side", ["client", "server"])
def test_a_replayed_transcript_is_refused(side):
    with connection() as (one, other):
        other.sendall(transcript()[side])
        error = outcome(one, SECRET, server=side == "client")
    assert isinstance(error, AuthenticationError)


@pytest.mark.parametrize("side", ["client", "server"])
def test_a_connection_lost_at_any_byte_is_an_error(side):
    for offset in range(len(transcript()[side])):
        served, joined = Between(side, cut=offset).shake()
        got = served if side == "client" else joined
        assert isinstance(got, ConnectionError), (side, offset, got)
        assert "closed the connection" in str(got)


@pytest.mark.parametrize("side", ["client", "server"])
def test_a_change_of_any_byte_is_noticed(side):
    """One of a length may only be noticed at the deadline, as bytes that never come."""
    for offset in range(len(transcript()[side])):
        served, joined = Between(side, flip=offset).shake(seconds=0.2)
        got = served if side == "client" else joined
        assert isinstance(got, REFUSED), (side, offset, got)


@given(st.binary(max_size=300), st.booleans(), st.booleans())
def test_arbitrary_bytes_never_get_through(data, prefixed, server):
    with connection() as (one, other):
        greeting = b"NDST" + struct.pack("!Hc32s", 1, b"C" if server else b"S", bytes(32))
        other.sendall(greeting + data if prefixed else data)
        other.shutdown(socket.SHUT_WR)
        assert isinstance(outcome(one, SECRET, server=server), REFUSED)


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-OpenSSH\r\n", bytes(50)])
def test_another_protocol_is_named(data):
    with connection() as (one, other):
        other.sendall(data)
        error = outcome(one, SECRET, server=False)
    assert isinstance(error, AuthenticationError)
    assert repr(data[:4]) in str(error)
    assert "another program" in str(error)


def test_another_version_is_named_at_both_ends():
    with connection() as (server, client):
        client.sendall(b"NDST" + struct.pack("!Hc32s", 7, b"C", bytes(32)))
        error = outcome(server, SECRET, server=True)
        answer = receive(client, GREETING_BYTES)
    assert "version 7" in str(error)
    assert "version 1" in str(error)
    assert struct.unpack_from("!H", answer, 4) == (1,)


@pytest.mark.parametrize("sent", [b"", b"ND", b"NDST" + struct.pack("!Hc32s", 1, b"C", bytes(32))])
def test_silence_ends_at_the_deadline(sent):
    with connection() as (server, client):
        client.sendall(sent)
        began = time.monotonic()
        error = outcome(server, SECRET, server=True, seconds=0.2)
        assert isinstance(error, CollectiveTimeoutError)
        assert 0.2 <= time.monotonic() - began < 1.0


def test_a_peer_that_drips_bytes_does_not_move_the_deadline():
    greeting = b"NDST" + struct.pack("!Hc32s", 1, b"C", bytes(32))
    done = threading.Event()

    def drip(sock: socket.socket) -> None:
        for byte in greeting:
            if done.wait(timeout=0.02):
                return
            sock.sendall(bytes([byte]))

    def serve(sock: socket.socket):
        began = time.monotonic()
        error = outcome(sock, SECRET, server=True, seconds=0.2)
        done.set()
        return error, time.monotonic() - began

    with connection() as (server, client):
        (error, seconds), _ = at_once(lambda: serve(server), lambda: drip(client))
    assert isinstance(error, CollectiveTimeoutError)
    assert seconds < 0.6


def test_a_length_over_the_limit_is_refused_before_memory_is_had_for_it():
    """Even from a peer that knows the secret."""

    def lie(sock: socket.socket) -> None:
        mine = b"NDST" + struct.pack("!Hc32s", 1, b"C", bytes(32))
        sock.sendall(mine)
        greetings = mine + receive(sock, GREETING_BYTES)
        sock.sendall(proof(SECRET, b"client proof", greetings))
        receive(sock, 1 + 2 + len(b"I serve") + 32)
        sock.sendall(b"+" + struct.pack("!H", 65535))

    tracemalloc.start()
    try:
        with connection() as (server, client):
            error, _ = at_once(lambda: outcome(server, SECRET, server=True), lambda: lie(client))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(error, AuthenticationError)
    assert "65535 bytes" in str(error)
    assert peak < 500_000


def test_the_socket_keeps_its_timeout_and_what_follows_is_not_eaten():
    def serve(sock: socket.socket) -> bytes:
        sock.settimeout(3.5)
        used, _ = authenticate(sock, SECRET, b"", server=True, deadline=time.monotonic() + 5)
        assert used.gettimeout() == 3.5
        return receive(used, 5)

    def join(sock: socket.socket) -> None:
        used, _ = authenticate(sock, SECRET, b"", server=False, deadline=time.monotonic() + 5)
        used.sendall(b"after")

    with connection() as (server, client):
        assert at_once(lambda: serve(server), lambda: join(client))[0] == b"after"


def test_who_is_kept_out_in_the_last_moment_does_not_believe_to_be_in():
    def serve(sock: socket.socket) -> None:
        def commit() -> None:
            raise ConnectionAbortedError("no room")

        deadline = time.monotonic() + 5
        with pytest.raises(ConnectionAbortedError, match="no room"):
            authenticate(sock, SECRET, b"", server=True, deadline=deadline, commit=commit)

    with connection() as (server, client):
        _, error = at_once(lambda: serve(server), lambda: outcome(client, SECRET, server=False))
    assert isinstance(error, ConnectionError)


@pytest.mark.parametrize(
    ("secret", "hello"), [(b"", b""), (SECRET, bytes(MAXIMUM_HELLO_BYTES + 1))]
)
def test_no_secret_and_a_long_hello_are_errors_of_the_caller(secret, hello):
    with connection() as (_, client):
        error = outcome(client, secret, server=False, hello=hello)
        assert isinstance(error, ValueError)
        assert client.fileno() == -1


@pytest.mark.parametrize(("theirs", "expected"), [(SECRET, "I serve"), (WRONG_SECRET, "another")])
def test_a_peer_in_another_process_gets_in_or_learns_why_not(theirs, expected):
    script = (
        "import os, socket, sys, time\n"
        "from ndistribute.transport.handshake import authenticate\n"
        "from ndistribute.transport.secret import find_secret\n"
        "address = ('127.0.0.1', int(sys.argv[1]))\n"
        "sock = socket.create_connection(address, timeout=5)\n"
        "secret = find_secret(['127.0.0.1:1'], os.environ)\n"
        "sock, hello = authenticate(\n"
        "    sock, secret, b'I join', server=False, deadline=time.monotonic() + 5)\n"
        "print(hello.decode())\n"
        "sock.close()\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        peer = subprocess.Popen(
            [sys.executable, "-c", script, str(listener.getsockname()[1])],
            env={**os.environ, "NDISTRIBUTE_SECRET": theirs.decode()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with peer:
            sock, _ = listener.accept()
            got = outcome(sock, SECRET, server=True)
            said, _ = peer.communicate(timeout=30)
    assert expected in said
    assert got == b"I join" if theirs == SECRET else isinstance(got, AuthenticationError)
