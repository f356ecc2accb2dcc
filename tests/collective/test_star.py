"""What the hub at rank 0 makes of messages, and how an error travels."""

from __future__ import annotations

import os

from ndistribute.collective.star import (
    Abort,
    Answer,
    Ask,
    Exchange,
    Failed,
    Failure,
    GoodBye,
    Hub,
    Left,
    Lost,
    Message,
    Reply,
    Seen,
    describe_error,
    restore_error,
)
from ndistribute.errors import CollectiveTimeoutError, WorkerLostError
from ndistribute.transport.codec import Decoder, encode

MESSAGES: list[Message] = [
    Abort(3, (7, 2), 4, Failure("CollectiveTimeoutError", "late", 1, "all_reduce", 7)),
    Failed(3, (7, 2), Failure("WorkerLostError", "raised", 1)),
    Left(2, 3, 7, False),
    Ask(1, (5, 2)),
    Reply(1, (5, 2), True),
    Seen(2, (0, 0), [1], [2]),
    Exchange("0:names:1", bytes(range(256)) * 300),
    Answer("0:names:1", [b"a", b"b"], []),
    GoodBye("has finished", False, (9, 1)),
    Lost("it closed the connection."),
]
FINISHED = GoodBye("has finished", False, (9, 1))


class Group:
    """A hub, and what it has delivered to whom, from whom."""

    def __init__(self, size: int = 3, joined: bool = True) -> None:
        self.told: list[tuple[int, int, Message]] = []
        self.hub = Hub(size, lambda *delivered: self.told.append(delivered))
        for rank in range(size if joined else 0):
            self.hub.take(rank, Exchange("0:join", b""))
        self.told.clear()

    def take(self, sender: int, message: Message) -> list[tuple[int, int, str]]:
        """Return what a message leads to."""
        self.told.clear()
        self.hub.take(sender, message)
        return [(to, of, repr(what)) for to, of, what in self.told]


def to_each(ranks: list[int], sender: int, message: Message) -> list[tuple[int, int, str]]:
    return [(rank, sender, repr(message)) for rank in ranks]


def test_messages_come_back_as_they_were():
    decoder: Decoder[Message] = Decoder(Message)
    found = [decoder.decode(encode(message)[0]) for message in MESSAGES]
    assert list(map(repr, found)) == list(map(repr, MESSAGES))
    assert [type(message) for message in found] == [type(message) for message in MESSAGES]


def test_an_exchange_is_answered_to_all_when_the_last_one_has_passed_its_part():
    group = Group()
    assert group.take(2, Exchange("0:x:1", b"two")) == []
    assert group.take(0, Exchange("0:x:1", b"zero")) == []
    answer = Answer("0:x:1", [b"zero", b"one", b"two"], [])
    assert group.take(1, Exchange("0:x:1", b"one")) == to_each([0, 1, 2], 0, answer)
    assert group.take(1, Exchange("0:x:1", b"one")) == [], "the answer is on its way"


def test_who_passes_its_part_again_is_told_who_is_missing():
    group = Group()
    group.take(2, Exchange("0:x:1", b""))
    missing = Answer("0:x:1", [], [0, 1])
    assert group.take(2, Exchange("0:x:1", b"")) == to_each([2], 0, missing)


def test_a_recovery_ends_the_exchanges_that_were_begun_before_it():
    group = Group()
    group.take(2, Exchange("0:x:1", b"old"))
    for rank in range(3):
        group.take(rank, Exchange("0:recover", b""))
    group.take(2, Exchange("1:x:1", b"new"))
    assert [what.blobs for _, _, what in group.told if isinstance(what, Answer)] == []
    assert group.take(2, Exchange("0:recover", b"")) == [], "it has its answer"


def test_failures_go_to_all_others_and_answers_to_whom_they_concern():
    group = Group()
    abort = MESSAGES[0]
    assert group.take(1, abort) == to_each([0, 2], 1, abort)
    assert group.take(1, Left(2, 3, 7, False)) == to_each([2], 1, Left(2, 3, 7, False))
    assert group.take(0, FINISHED) == to_each([1, 2], 0, FINISHED)


def test_a_lost_process_is_told_to_all_others_and_one_that_said_good_bye_is_not():
    group = Group()
    group.take(1, FINISHED)
    group.told.clear()
    group.hub.end(1, "it ended")
    assert group.told == []
    group.hub.end(2, "it ended")
    assert [(to, of, type(what)) for to, of, what in group.told] == [(0, 2, Lost), (1, 2, Lost)]
    assert group.hub.gone == {1, 2}


def test_who_is_lost_before_all_have_joined_may_join_again():
    group = Group(joined=False)
    for rank in (1, 2):
        group.take(rank, Exchange("0:join", b"first"))
    group.hub.end(2, "it ended")
    assert group.take(0, Exchange("0:join", b"")) == []
    answer = Answer("0:join", [b"", b"first", b"second"], [])
    assert group.take(2, Exchange("0:join", b"second")) == to_each([0, 1, 2], 0, answer)


def test_who_asks_is_told_what_is_known_and_the_others_are_asked():
    group = Group(4)
    group.take(3, FINISHED)
    ask = Ask(0, (1, 2))
    assert group.take(2, ask) == [
        *to_each([2], 0, Seen(0, (1, 2), [2], [])),
        *to_each([0, 1], 0, ask),
    ]
    # Rank 1 waits too, so it has made the call; nobody is asked twice at once.
    assert group.take(1, ask) == to_each([1], 0, Seen(0, (1, 2), [2, 1], []))
    assert group.take(0, Reply(0, (1, 2), True)) == []
    assert group.take(1, ask) == to_each([1], 0, Seen(0, (1, 2), [2, 1, 0], []))
    # Of an earlier generation, or step, nothing follows.
    assert group.take(2, Ask(1, (1, 1)))[0] == (2, 0, repr(Seen(1, (1, 1), [2], [])))


def test_who_skipped_a_call_is_told_at_once_to_all_who_wait_in_it():
    group = Group(4)
    for rank in (0, 2):
        group.take(rank, Ask(0, (1, 2)))
    group.take(3, Ask(0, (1, 1)))
    seen = Seen(0, (1, 2), [], [1])
    assert group.take(1, Reply(0, (1, 2), False)) == to_each([0, 2], 0, seen)


def test_an_error_arrives_with_its_class_and_names_who_failed():
    late = restore_error(describe_error(CollectiveTimeoutError("late", rank=2, op="sum"), 1))
    assert (type(late), str(late), late.rank, late.op) == (CollectiveTimeoutError, "late", 2, "sum")
    name = os.fsdecode(b"no text \xff")
    described = describe_error(FileNotFoundError(name * 5000), 1)
    failed = restore_error(Decoder(Failure).decode(encode(described)[0]))
    assert isinstance(failed, WorkerLostError)
    assert str(failed).startswith("worker 1 failed: FileNotFoundError: no text ?")
