"""The handshake lets in who knows the secret and belongs to the job, and tells others nothing.

Both sides are generators, so they are driven against each other here without a socket, with
somebody between them where wanted; the sockets come in test_listener.py.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndistribute.errors import AuthenticationError
from ndistribute.transport.handshake import Accepted, Hello, Steps, accept, join

SECRET = b"a secret of the job"
SERVER = Hello(name="ps:0#1", instance="i", job="a job", version="1")
CLIENT = Hello(name="worker:0#2", purpose="ps", audience="ps:0", job="a job", version="1")
GREETING_BYTES = 39
Meddle = Callable[[str, bytes], bytes]


def outcomes(server: Steps, client: Steps, meddle: Meddle = lambda side, data: data) -> list[Any]:
    """Return how the server and the client ended, if what each sends is passed to the other.

    Who cannot go on when the other has ended gets a `ConnectionError`, as with a socket.
    """
    sides, result = [server, client], [None, None]
    inbox, wanted = [b"", b""], [next(server), next(client)]
    while any(end is None for end in result):
        before = (list(wanted), list(inbox), list(result))
        for here, name in enumerate(("server", "client")):
            if result[here] is not None:
                continue
            try:
                want = wanted[here]
                if isinstance(want, bytes):
                    inbox[1 - here] += meddle(name, want)
                    wanted[here] = next(sides[here])
                elif len(inbox[here]) >= want:
                    data, inbox[here] = inbox[here][:want], inbox[here][want:]
                    wanted[here] = sides[here].send(data)
                elif result[1 - here] is not None:
                    result[here] = ConnectionError()
            except StopIteration as done:
                result[here] = done.value
            except Exception as error:
                result[here] = error
        if before == (wanted, inbox, result):  # Both wait for bytes that nobody sends.
            result = [end or TimeoutError() for end in result]
    return result


def shake(
    server: Hello = SERVER,
    client: Hello = CLIENT,
    secret: bytes = SECRET,
    meddle: Meddle = lambda side, data: data,
    check: Callable[[Hello], str] = lambda hello: "",
) -> list[Any]:
    return outcomes(
        accept(SECRET, server, check, "a client"), join(secret, client, "a server"), meddle
    )


def changed(hello: Hello, **fields: str) -> Hello:
    return msgspec.structs.replace(hello, **fields)


def test_both_ends_learn_the_others_hello_and_have_the_same_keys():
    served, joined = shake()
    assert msgspec.structs.asdict(served.hello) == msgspec.structs.asdict(CLIENT)
    assert msgspec.structs.asdict(joined.hello) == msgspec.structs.asdict(SERVER)
    assert served.receiving_key == joined.sending_key
    assert served.sending_key == joined.receiving_key
    keys = {served.sending_key, served.receiving_key}
    again = shake()[0]
    assert len(keys | {again.sending_key, again.receiving_key}) == 4


@given(st.binary(min_size=16, max_size=100), st.text(max_size=50))
def test_any_secret_and_any_name_pass_unchanged(secret, name):
    hello = changed(CLIENT, name=name)
    served, _ = outcomes(accept(secret, SERVER, lambda _: "", ""), join(secret, hello, ""))
    assert served.hello.name == name


@pytest.mark.parametrize("secret", [b"a secret of another", SECRET + b"\0"])
def test_another_secret_is_an_error_at_both_ends_that_says_so(secret):
    for error in shake(secret=secret):
        assert isinstance(error, AuthenticationError)
        assert "another secret" in str(error)


def test_a_server_tells_a_stranger_nothing_that_depends_on_the_secret():
    sent = []

    def record(side: str, data: bytes) -> bytes:
        if side == "server":
            sent.append(data)
        return data

    shake(secret=b"a secret of another", meddle=record)
    assert [len(data) for data in sent] == [GREETING_BYTES, 1]
    assert SECRET not in b"".join(sent)


def test_a_client_tells_its_hello_to_nobody_who_has_not_proved_itself():
    """One who pretends to be the server gets a proof, and nothing else."""
    steps = join(SECRET, CLIENT, "a server")
    greeting = next(steps)
    assert isinstance(greeting, bytes)
    next(steps)
    steps.send(b"NDST")
    proof = steps.send(greeting[4:6] + b"S" + bytes(32))
    assert isinstance(proof, bytes)
    assert len(proof) == 32
    assert next(steps) == 1
    assert steps.send(b"+") == 2
    assert steps.send(struct.pack("!H", 4)) == 4
    assert steps.send(b"name") == 32
    with pytest.raises(AuthenticationError, match="another secret"):
        steps.send(bytes(32))


@pytest.mark.parametrize(
    ("client", "reason"),
    [
        (changed(CLIENT, version="2"), "version 2"),
        (changed(CLIENT, job="another"), "NDISTRIBUTE_JOB_ID"),
        (changed(CLIENT, audience="ps:1"), "looks for ps:1, and this is ps:0"),
        (changed(CLIENT, purpose="unheard of"), "not here"),
    ],
)
def test_who_knows_the_secret_and_is_wrong_here_learns_why(client, reason):
    def check(hello: Hello) -> str:
        return "not here" if hello.purpose != "ps" else ""

    for error in shake(client=client, check=check):
        assert isinstance(error, AuthenticationError)
        assert reason in str(error)


@pytest.mark.parametrize("side", ["server", "client"])
def test_a_change_of_any_byte_is_noticed_by_who_reads_it(side):
    sent = {"server": 0, "client": 0}

    def count(who: str, data: bytes) -> bytes:
        sent[who] += len(data)
        return data

    shake(meddle=count)
    for position in range(sent[side]):
        at = 0

        def flip(who: str, data: bytes, position: int = position) -> bytes:
            nonlocal at
            start, at = at, at + len(data) * (who == side)
            if who == side and start <= position < at:
                data = bytearray(data)
                data[position - start] ^= 1
            return bytes(data)

        served, joined = shake(meddle=flip)
        reader = joined if side == "server" else served
        assert not isinstance(reader, Accepted), position
        assert isinstance(reader, AuthenticationError | TimeoutError | ConnectionError), reader


@pytest.mark.parametrize("side", ["server", "client"])
def test_a_replayed_side_is_refused(side):
    record: list[bytes] = []

    def listen(who: str, data: bytes) -> bytes:
        if who == side:
            record.append(data)
        return data

    assert isinstance(shake(meddle=listen)[0], Accepted)
    replay = iter(record)
    outcome = shake(meddle=lambda who, data: next(replay, b"") if who == side else data)
    assert isinstance(outcome[side == "server"], AuthenticationError)


@pytest.mark.parametrize("role", [None, b"S"])
def test_a_client_is_not_deceived_by_its_own_words(role):
    steps = join(SECRET, CLIENT, "a mirror")
    greeting = next(steps)
    reflected = greeting if role is None else greeting[:6] + role + greeting[7:]
    next(steps)
    steps.send(reflected[:4])
    if role is None:
        with pytest.raises(AuthenticationError, match="sent back the greeting"):
            steps.send(reflected[4:])
        return
    proof = steps.send(reflected[4:])
    assert next(steps) == 1
    steps.send(b"+")
    steps.send(bytes(2))
    with pytest.raises(AuthenticationError):
        steps.send(proof)


def test_a_server_is_not_deceived_by_its_own_words():
    """No other server makes the proof of a client: it refuses a greeting of a server."""
    steps = accept(SECRET, SERVER, lambda hello: "", "a mirror")
    next(steps)
    steps.send(b"NDST")
    answer = steps.send(struct.pack("!Hc32s", 2, b"C", bytes(32)))
    assert isinstance(answer, bytes)
    mirror = accept(SECRET, SERVER, lambda hello: "", "a mirror")
    next(mirror)
    mirror.send(answer[:4])
    mirror.send(answer[4:])
    with pytest.raises(AuthenticationError, match="sent back the greeting"):
        next(mirror)


def test_another_version_of_the_handshake_is_named_at_both_ends():
    def older(side: str, data: bytes) -> bytes:
        return data[:4] + struct.pack("!H", 1) + data[6:] if len(data) == GREETING_BYTES else data

    for error in shake(meddle=older):
        assert isinstance(error, AuthenticationError)
        assert "version 1 of the handshake" in str(error)


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", bytes(50)])
def test_another_protocol_is_named(data):
    for steps in (accept(SECRET, SERVER, lambda hello: "", "it"), join(SECRET, CLIENT, "it")):
        while isinstance(next(steps), bytes):
            pass
        with pytest.raises(AuthenticationError, match="another program may have the port"):
            steps.send(data[:4])


@given(st.data(), st.booleans())
def test_arbitrary_bytes_never_get_through(data, server):
    steps = accept(SECRET, SERVER, lambda _: "", "") if server else join(SECRET, CLIENT, "")
    prefix = (
        b"NDST" + struct.pack("!Hc", 2, b"C" if server else b"S")
        if data.draw(st.booleans())
        else b""
    )
    answer = itertools.chain(prefix, iter(lambda: data.draw(st.integers(0, 255)), None))
    with pytest.raises(AuthenticationError):
        fed(steps, answer)


def fed(steps: Steps, stream: Iterator[int]) -> None:
    wanted = next(steps)
    for _ in range(20):
        while isinstance(wanted, bytes):
            wanted = next(steps)
        wanted = steps.send(bytes(itertools.islice(stream, wanted)))


def test_a_length_over_the_limit_is_refused_before_it_is_read():
    steps = join(SECRET, CLIENT, "a server")
    next(steps)
    next(steps)
    steps.send(b"NDST")
    steps.send(struct.pack("!Hc32s", 2, b"S", bytes(32)))
    next(steps)
    steps.send(b"+")
    with pytest.raises(AuthenticationError, match="at most 4096"):
        steps.send(b"\xff\xff")


def test_a_hello_that_is_too_long_is_an_error_of_its_sender():
    served, joined = shake(client=changed(CLIENT, name="x" * 5000))
    assert isinstance(joined, ValueError)
    assert isinstance(served, ConnectionError)
    refused = shake(check=lambda hello: "é" * 5000)
    assert all(isinstance(error, AuthenticationError) for error in refused)
