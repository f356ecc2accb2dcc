"""The handshake lets in who knows the secret and belongs to the job, and tells others nothing.

Both sides are generators, so they are driven against each other here without a socket.
"""

import itertools
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndistribute.errors import AuthenticationError
from ndistribute.transport.handshake import Hello, Steps, accept, join

SECRET = b"a secret of the job"
SERVER = Hello(name="ps:0#1", instance="i", job="a job", version="1")
CLIENT = Hello(name="worker:0#2", purpose="ps", audience="ps:0", job="a job", version="1")
GREETING_BYTES = 39
FROM_CLIENT, FROM_SERVER = (b"NDST" + struct.pack("!Hc32s", 2, c, bytes(32)) for c in (b"C", b"S"))
Change = Callable[[str, bytes], bytes]


def outcomes(server: Steps, client: Steps, change: Change) -> list[Any]:
    """Return how both sides ended, if what each sends is changed and passed to the other.

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
                    inbox[1 - here] += change(name, want)
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


def server_of(check: Callable[[Hello], str] = lambda hello: "") -> Steps:
    return accept(SECRET, SERVER, check, "a client")


def shake(
    client: Hello = CLIENT,
    secret: bytes = SECRET,
    change: Change = lambda side, data: data,
    **check: Callable[[Hello], str],
) -> list[Any]:
    return outcomes(server_of(**check), join(secret, client, "a server"), change)


def recorded(side: str, **options: Any) -> list[bytes]:
    """Return what one side sends."""
    sent: list[bytes] = []

    def record(who: str, data: bytes) -> bytes:
        sent.extend([data] if who == side else [])
        return data

    shake(change=record, **options)
    return sent


def driven(steps: Steps, *received: bytes) -> bytes | int:
    """Return what a side wants next, after it has received these bytes."""
    wanted = next(steps)
    for part in received:
        while isinstance(wanted, bytes):
            wanted = next(steps)
        wanted = steps.send(part)
    return wanted


def send_all(steps: Steps, *parts: bytes | None) -> None:
    for part in parts:
        steps.send(part)


def changed(hello: Hello, **fields: str) -> Hello:
    return msgspec.structs.replace(hello, **fields)


def test_both_ends_learn_the_others_hello_and_have_the_same_keys():
    served, joined = shake()
    assert msgspec.structs.asdict(served.hello) == msgspec.structs.asdict(CLIENT)
    assert msgspec.structs.asdict(joined.hello) == msgspec.structs.asdict(SERVER)
    assert served.receiving_key == joined.sending_key
    assert served.sending_key == joined.receiving_key
    again = shake()[0]
    keys = {end.sending_key for end in (served, joined, again)}
    assert len(keys | {again.receiving_key}) == 4


@given(st.binary(min_size=16, max_size=100), st.text(max_size=50))
def test_any_secret_and_any_name_pass_unchanged(secret, name):
    steps = accept(secret, SERVER, lambda _: "", ""), join(secret, changed(CLIENT, name=name), "")
    served, _ = outcomes(*steps, lambda side, data: data)
    assert served.hello.name == name


@pytest.mark.parametrize("secret", [b"a secret of another", SECRET + b"\0"])
def test_another_secret_is_an_error_at_both_ends_and_tells_nothing_about_it(secret):
    for error in shake(secret=secret):
        assert isinstance(error, AuthenticationError)
        assert "another secret" in str(error)
    sent = recorded("server", secret=secret)
    assert [len(data) for data in sent] == [GREETING_BYTES, 1]
    assert SECRET not in b"".join(sent)


def test_a_client_tells_its_hello_to_nobody_who_has_not_proved_itself():
    steps = join(SECRET, CLIENT, "a server")
    proof = driven(steps, FROM_SERVER[:4], FROM_SERVER[4:])
    assert isinstance(proof, bytes)
    assert len(proof) == 32
    assert [next(steps), steps.send(b"+"), steps.send(b"\0\4"), steps.send(b"name")] == [
        1,
        2,
        4,
        32,
    ]
    with pytest.raises(AuthenticationError, match="another secret"):
        steps.send(bytes(32))


@pytest.mark.parametrize(
    ("client", "reason"),
    [
        (changed(CLIENT, version="2"), "version 2"),
        (changed(CLIENT, job="another"), "NDISTRIBUTE_JOB_ID"),
        (changed(CLIENT, audience="ps:1"), "expected ps:1, but this is ps:0"),
        (changed(CLIENT, purpose="unheard of"), "not here"),
    ],
)
def test_who_knows_the_secret_and_is_wrong_here_learns_why(client, reason):
    for error in shake(client, check=lambda hello: "not here" * (hello.purpose != "ps")):
        assert isinstance(error, AuthenticationError)
        assert reason in str(error)


@pytest.mark.parametrize("side", ["server", "client"])
def test_a_change_of_any_byte_is_noticed_by_who_reads_it(side):
    for position in range(sum(map(len, recorded(side)))):
        at = 0

        def flip(who: str, data: bytes, position: int = position) -> bytes:
            nonlocal at
            start, at = at, at + len(data) * (who == side)
            if who == side and start <= position < at:
                data = bytearray(data)
                data[position - start] ^= 1
            return bytes(data)

        reader = shake(change=flip)[side == "server"]
        assert isinstance(reader, AuthenticationError | TimeoutError | ConnectionError), position


@pytest.mark.parametrize("side", ["server", "client"])
def test_a_replayed_side_is_refused(side):
    replay = iter(recorded(side))
    outcome = shake(change=lambda who, data: next(replay, b"") if who == side else data)
    assert isinstance(outcome[side == "server"], AuthenticationError)


def test_nobody_is_deceived_by_its_own_words():
    steps = join(SECRET, CLIENT, "a mirror")
    own = next(steps)
    with pytest.raises(AuthenticationError, match="sent back this process's own greeting"):
        send_all(steps, None, own[:4], own[4:])
    steps = join(SECRET, CLIENT, "a mirror")  # Also with the role of the greeting changed.
    own = next(steps)
    next(steps)
    steps.send(own[:4])
    proof = steps.send(own[4:6] + b"S" + own[7:])
    with pytest.raises(AuthenticationError):
        send_all(steps, None, b"+", bytes(2), proof)
    answer = driven(server_of(), FROM_CLIENT[:4], FROM_CLIENT[4:])
    mirror = server_of()  # No other server makes the proof of a client.
    driven(mirror, answer[:4], answer[4:])
    with pytest.raises(AuthenticationError, match="sent back this process's own greeting"):
        next(mirror)


def test_another_version_of_the_handshake_is_named_at_both_ends():
    def older(side: str, data: bytes) -> bytes:
        return data[:4] + struct.pack("!H", 1) + data[6:] if len(data) == GREETING_BYTES else data

    for error in shake(change=older):
        assert isinstance(error, AuthenticationError)
        assert "version 1 of the handshake" in str(error)


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n", bytes(50)])
def test_another_protocol_is_named(data):
    for steps in (server_of(), join(SECRET, CLIENT, "it")):
        with pytest.raises(AuthenticationError, match="another program may have the port"):
            driven(steps, data[:4])


@given(st.data(), st.booleans(), st.booleans())
def test_arbitrary_bytes_never_get_through(data, server, greets):
    steps = server_of() if server else join(SECRET, CLIENT, "")
    prefix = (FROM_CLIENT if server else FROM_SERVER)[: 7 * greets]
    stream = itertools.chain(prefix, iter(lambda: data.draw(st.integers(0, 255)), None))

    def feed() -> None:
        wanted = next(steps)
        for _ in range(20):
            while isinstance(wanted, bytes):
                wanted = next(steps)
            wanted = steps.send(bytes(itertools.islice(stream, wanted)))

    with pytest.raises(AuthenticationError):
        feed()


def test_a_length_over_the_limit_is_refused_before_it_is_read():
    steps = join(SECRET, CLIENT, "a server")
    with pytest.raises(AuthenticationError, match="at most 4096"):
        driven(steps, FROM_SERVER[:4], FROM_SERVER[4:], b"+", b"\xff\xff")
    served, joined = shake(changed(CLIENT, name="x" * 5000))
    assert isinstance(joined, ValueError)
    assert isinstance(served, ConnectionError)
    refused = shake(check=lambda hello: "é" * 5000)
    assert all(isinstance(error, AuthenticationError) for error in refused)
