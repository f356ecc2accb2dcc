"""Messages that travel in parts come out whole or not at all, within the room that there is."""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndistribute.cluster.wire.pieces import Pieces
from ndistribute.cluster.wire.tensors import PART_BYTES, MalformedError, parts
from ndistribute.cluster.wire.transfers import Inbox, Limits, Outbox
from ndistribute.cluster.wire.transport import Envelope, NoRoomError, TransferLostError

MESSAGE = os.urandom(5 * PART_BYTES + 12345)
PLAN = parts(len(MESSAGE))


def write(inbox: Inbox, number: int, part: slice, client: str = "one") -> None:
    inbox.write(client, number, len(MESSAGE), part.start, MESSAGE[part])


@pytest.mark.parametrize("seed", range(5))
def test_parts_come_in_any_order_and_some_twice(seed):
    inbox = Inbox(Limits())
    order = random.Random(seed).sample([*PLAN, *PLAN[:2]], len(PLAN) + 2)
    for part in order:
        write(inbox, 1, part)
    assert inbox.take("one", 1, len(MESSAGE)).tobytes() == MESSAGE
    assert inbox.waiting_bytes == 0


def test_a_message_with_a_missing_part_is_not_handed_out():
    inbox = Inbox(Limits())
    for part in PLAN[1:]:
        write(inbox, 1, part)
    with pytest.raises(TransferLostError, match="1 parts are missing"):
        inbox.take("one", 1, len(MESSAGE))
    write(inbox, 1, PLAN[0])
    with pytest.raises(TransferLostError):
        inbox.take("another", 1, len(MESSAGE))
    with pytest.raises(TransferLostError):
        inbox.take("one", 1, len(MESSAGE) - 1)
    inbox.take("one", 1, len(MESSAGE))
    with pytest.raises(TransferLostError, match="all parts"):
        inbox.take("one", 1, len(MESSAGE))


@pytest.mark.parametrize(
    ("total", "offset", "size"),
    [
        (2**63, 0, PART_BYTES),  # Longer than a message may be.
        (100, 0, 99),
        (100, 0, 101),
        (100, 1, 99),
        (100, 100, 0),
        (0, 0, 0),
        (3 * PART_BYTES, 17, PART_BYTES),
    ],
)
def test_what_is_no_part_is_refused_and_costs_no_room(total, offset, size):
    inbox = Inbox(Limits(message_bytes=1 << 30))
    with pytest.raises(MalformedError):
        inbox.write("one", 1, total, offset, bytes(size))
    assert inbox.waiting_bytes == 0


def test_a_transfer_does_not_change_its_size():
    inbox = Inbox(Limits())
    write(inbox, 1, PLAN[0])
    with pytest.raises(MalformedError, match="has"):
        inbox.write("one", 1, 100, 0, bytes(100))


def test_room_is_counted_before_it_is_taken():
    inbox = Inbox(Limits(waiting_bytes=2 * len(MESSAGE)))
    write(inbox, 1, PLAN[0], "one")
    write(inbox, 1, PLAN[0], "two")
    with pytest.raises(NoRoomError, match="do not fit"):
        write(inbox, 1, PLAN[0], "three")
    inbox.forget("one")
    write(inbox, 1, PLAN[0], "three")
    assert inbox.waiting_bytes == 2 * len(MESSAGE)


def test_a_client_that_leaves_transfers_lying_loses_its_oldest():
    inbox = Inbox(Limits(transfers=3))
    for number in range(10):
        write(inbox, number, PLAN[0])
    assert inbox.waiting_bytes == 3 * len(MESSAGE)
    inbox.forget("one")
    inbox.forget("one")
    assert inbox.waiting_bytes == 0


def test_an_answer_is_kept_until_each_part_was_read():
    outbox = Outbox(Limits())
    number = outbox.put("one", Pieces([MESSAGE[:1000], MESSAGE[1000:]]))
    read = [b"".join(outbox.read("one", number, part.start)) for part in reversed(PLAN)]
    assert b"".join(reversed(read)) == MESSAGE
    assert outbox.waiting_bytes == 0
    with pytest.raises(TransferLostError):
        outbox.read("one", number, 0)


def test_answers_belong_to_their_client():
    outbox = Outbox(Limits())
    number = outbox.put("one", Pieces([MESSAGE]))
    with pytest.raises(TransferLostError):
        outbox.read("another", number, 0)
    with pytest.raises(MalformedError):
        outbox.read("one", number, 1)
    outbox.forget("one")
    assert outbox.waiting_bytes == 0


def test_answers_that_nobody_fetches_make_way():
    few = Outbox(Limits(transfers=2))
    for _ in range(10):
        few.put("one", Pieces([MESSAGE]))
    assert few.waiting_bytes == 2 * len(MESSAGE)
    small = Outbox(Limits(waiting_bytes=3 * len(MESSAGE)))
    for client in "abcdefgh":
        small.put(client, Pieces([MESSAGE]))
    assert small.waiting_bytes == 3 * len(MESSAGE)


@given(st.lists(st.binary(max_size=20), max_size=8), st.integers(0, 170), st.integers(0, 170))
def test_pieces_cut_like_the_bytes_that_they_make_up(buffers, start, stop):
    whole = b"".join(buffers)
    pieces = Pieces(buffers)
    assert len(pieces) == len(whole)
    assert b"".join(pieces.cut(start, stop)) == whole[start:stop]


@given(st.binary(max_size=200))
def test_a_body_of_any_bytes_is_read_or_malformed(body):
    try:
        envelope, seal, rest = Envelope.read(body)
    except MalformedError:
        return
    assert envelope.packed(seal) + rest == body
