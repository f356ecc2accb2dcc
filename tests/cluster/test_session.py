"""Who does not know the secret gets nowhere, and what was said once is not taken twice."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndistribute.cluster.wire import guard as guards
from ndistribute.cluster.wire.guard import CHALLENGE_SECONDS, Guard, UnknownSessionError
from ndistribute.cluster.wire.session import Introduction, Session
from ndistribute.errors import AuthenticationError

SECRET, OTHER_SECRET = b"correct horse battery", b"wrong horse battery"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def meet(guard: Guard, client: str = "worker:0", secret: bytes = SECRET, audience: str = ""):
    """Go through the exchange; return the client's session and its answer to the challenge."""
    me = Introduction(secret, client, audience)
    answer = me.prove(guard.greet(me.greeting))
    return me.finish(guard.prove(answer)), answer


def test_both_ends_agree_on_a_session():
    guard = Guard(SECRET)
    mine, _ = meet(guard)
    token, counter = mine.token("Call")
    theirs, number = guard.admit("Call", token)
    assert (theirs.client, number) == ("worker:0", counter)
    theirs.check(mine.seal("request", "Call", 1, b"text"), "request", "Call", 1, b"text")


def test_a_client_with_another_secret_is_refused_and_learns_how_to_mend_it():
    with pytest.raises(AuthenticationError, match="NDISTRIBUTE_SECRET"):
        meet(Guard(SECRET), secret=OTHER_SECRET)


def test_a_server_with_another_secret_is_refused_by_the_client():
    impostor, real = Guard(OTHER_SECRET), Guard(SECRET)
    me = Introduction(SECRET, "worker:0")
    answer = me.prove(impostor.greet(me.greeting))
    with pytest.raises(UnknownSessionError):  # What it was told is of no use elsewhere.
        real.prove(answer)
    with pytest.raises(AuthenticationError, match="did not prove"):
        me.finish(bytes(48))


def test_an_answer_to_a_challenge_serves_once():
    guard = Guard(SECRET)
    _, answer = meet(guard)
    with pytest.raises(AuthenticationError, match="used before"):
        guard.prove(answer)


def test_an_answer_is_worth_nothing_later_or_after_a_restart():
    clock = Clock()
    guard = Guard(SECRET, clock=clock)
    me = Introduction(SECRET, "worker:0")
    answer = me.prove(guard.greet(me.greeting))
    with pytest.raises(UnknownSessionError, match="too old"):
        Guard(SECRET).prove(answer)
    clock.now += CHALLENGE_SECONDS + 1
    with pytest.raises(UnknownSessionError, match="too old"):
        guard.prove(answer)


def test_a_token_serves_once_and_for_its_method_alone():
    guard = Guard(SECRET)
    mine, _ = meet(guard)
    token, _ = mine.token("Ping")
    with pytest.raises(UnknownSessionError):
        guard.admit("Call", token)
    guard.admit("Ping", token)
    with pytest.raises(UnknownSessionError):
        guard.admit("Ping", token)


def test_calls_may_overtake_each_other_and_each_is_still_taken_once():
    guard = Guard(SECRET)
    mine, _ = meet(guard)
    tokens = [mine.token("Call")[0] for _ in range(500)]
    random.Random(7).shuffle(tokens)
    for token in tokens:
        guard.admit("Call", token)
    for token in tokens:
        with pytest.raises(UnknownSessionError):
            guard.admit("Call", token)


def test_a_token_that_was_held_back_for_long_is_refused():
    guard = Guard(SECRET)
    mine, _ = meet(guard)
    old, _ = mine.token("Call")
    for _ in range(5000):
        latest, _ = mine.token("Call")
    guard.admit("Call", latest)
    with pytest.raises(UnknownSessionError):
        guard.admit("Call", old)


def test_a_changed_message_is_noticed_by_either_end():
    mine, _ = meet(Guard(SECRET))
    seal = mine.seal("answer", "Call", 3, b"text")
    for label, method, counter, text in [
        ("request", "Call", 3, b"text"),
        ("answer", "Part", 3, b"text"),
        ("answer", "Call", 4, b"text"),
        ("answer", "Call", 3, b"next"),
    ]:
        with pytest.raises(AuthenticationError, match="changed on its way"):
            mine.check(seal, label, method, counter, text)


def test_who_looks_for_another_server_is_told_which_one_this_is():
    with pytest.raises(AuthenticationError, match=r"looks for 'ps:1'.* is 'ps:0'"):
        meet(Guard(SECRET, "ps:0"), audience="ps:1")
    meet(Guard(SECRET, "ps:0"), audience="ps:0")
    meet(Guard(SECRET, "ps:0"))


def test_a_client_that_comes_again_replaces_its_earlier_session():
    guard = Guard(SECRET)
    first, _ = meet(guard)
    second, _ = meet(guard)
    with pytest.raises(UnknownSessionError):
        guard.admit("Call", first.token("Call")[0])
    theirs, _ = guard.admit("Call", second.token("Call")[0])
    assert guard.leave(theirs)
    assert not guard.leave(theirs)


def test_a_silent_client_is_found():
    clock = Clock()
    guard = Guard(SECRET, clock=clock)
    quiet, loud = meet(guard, "quiet")[0], meet(guard, "loud")[0]
    clock.now += 10
    guard.admit("Ping", loud.token("Ping")[0])
    assert [session.client for session in guard.silent(5)] == ["quiet"]
    assert quiet.client == "quiet"


def test_strangers_leave_nothing_behind_and_clients_are_counted(monkeypatch):
    guard = Guard(SECRET)
    for _ in range(1000):
        stranger = Introduction(OTHER_SECRET, "stranger")
        with pytest.raises(AuthenticationError):
            guard.prove(stranger.prove(guard.greet(stranger.greeting)))
    assert not guard._sessions
    assert not guard._used
    monkeypatch.setattr(guards, "MAXIMUM_SESSIONS", 2)
    meet(guard, "one"), meet(guard, "two"), meet(guard, "two")
    with pytest.raises(AuthenticationError, match="2 clients already"):
        meet(guard, "three")


@given(st.binary(max_size=300), st.sampled_from(["greet", "prove", "admit"]))
def test_whatever_a_stranger_sends_it_is_refused(data, step):
    guard = Guard(SECRET)
    call = {"greet": guard.greet, "prove": guard.prove, "admit": lambda x: guard.admit("Call", x)}
    with pytest.raises(AuthenticationError):
        call[step](data)


@given(st.data())
def test_no_bit_of_an_answer_can_be_changed(data):
    guard = Guard(SECRET, "ps:0")
    me = Introduction(SECRET, "worker:0", "ps:0")
    answer = bytearray(me.prove(guard.greet(me.greeting)))
    bit = data.draw(st.integers(0, 8 * len(answer) - 1))
    answer[bit // 8] ^= 1 << bit % 8
    with pytest.raises(AuthenticationError):
        guard.prove(bytes(answer))


@pytest.mark.parametrize("name", ["", "x" * 600])
def test_a_client_needs_a_name_of_some_size(name):
    with pytest.raises(ValueError, match="name"):
        Introduction(SECRET, name)


def test_an_empty_secret_is_none():
    with pytest.raises(ValueError, match="empty"):
        Guard(b"")


def test_counters_that_jump_far_ahead_cost_nothing():
    one, other = (Session(b"n" * 16, b"k" * 32, "c", b"s" * 16) for _ in range(2))
    counter = 2**63
    assert one.take("Call", counter, other.seal("token", "Call", counter))
    assert not one.take("Call", counter, other.seal("token", "Call", counter))
