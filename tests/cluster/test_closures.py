"""The queue of a coordinator, without workers."""

from __future__ import annotations

from concurrent.futures import CancelledError

import pytest

from ndistribute.cluster.coordination.closures import Closure, ClosureQueue
from ndistribute.cluster.coordination.pickles import dump
from ndistribute.cluster.coordination.remote_value import RemoteValue
from ndistribute.cluster.protocol.spans import Span

NOTHING = dump(None)


def closure(queue: ClosureQueue, *inputs: Closure) -> Closure:
    result = RemoteValue(queue, "f")
    values = tuple(one.result for one in inputs)
    made = Closure("f", NOTHING, (), NOTHING, values, [], result)
    queue.add(made)
    return made


def test_closures_go_out_in_order_and_come_back_in_any():
    queue = ClosureQueue(2)
    one, two, three = (closure(queue) for _ in range(3))
    assert queue.take(0, 2) == [one, two]
    assert queue.take(1, 2) == [three]
    queue.succeed(1, three, NOTHING)
    assert (list(queue.over), queue.flying, queue.at_rest) == ([Span(3, 3)], 2, False)
    queue.succeed(0, two, NOTHING)
    queue.succeed(0, one, NOTHING)
    assert (list(queue.over), queue.at_rest) == ([Span(1, 3)], True)


def test_a_worker_gets_nothing_in_advance_while_another_might_be_idle():
    queue = ClosureQueue(2)
    one, two = closure(queue), closure(queue)
    assert queue.take(0, 2) == [one]
    assert queue.take(0, 2) == []
    assert queue.take(1, 2) == [two]


def test_a_fast_worker_gets_several_in_advance_while_there_are_plenty():
    queue = ClosureQueue(2)
    made = [closure(queue) for _ in range(12)]
    assert queue.take(0, depth=8) == made[:5]  # Of the other 7 each worker may have 3.
    assert queue.take(1, depth=2) == made[5:7]


def test_a_closure_waits_for_its_inputs():
    queue = ClosureQueue(1)
    one, two = closure(queue), closure(queue)
    both = closure(queue, one, two, one)
    assert queue.take(0, 2) == [one, two]
    assert queue.succeed(0, two, NOTHING) == 0
    assert queue.take(0, 2) == []
    assert queue.succeed(0, one, NOTHING) == 1
    assert queue.take(0, 2) == [both]


def test_what_a_lost_worker_had_goes_first():
    queue = ClosureQueue(2)
    one, two, three = (closure(queue) for _ in range(3))
    assert queue.take(0, 2) == [one, two]
    assert queue.give_back(0) == [one, two]
    assert queue.take(1, 2) == [one, two]
    assert queue.succeed(0, one, NOTHING) == 0  # It came too late.
    assert not one.result.done()
    queue.succeed(1, one, NOTHING)
    queue.succeed(1, two, NOTHING)
    assert queue.take(1, 2) == [three]


def test_an_error_cancels_what_waits_and_is_taken_once_when_nothing_flies():
    queue = ClosureQueue(2)
    one, two, three = (closure(queue) for _ in range(3))
    follower = closure(queue, three)
    queue.take(0, 2)
    error = LookupError("one")
    queue.fail(0, one, error)
    assert queue.take_error() is None
    assert (queue.queued, queue.flying) == (0, 1)
    queue.succeed(0, two, NOTHING)
    assert queue.take_error() is error
    assert queue.take_error() is None
    assert two.result.fetch() is None
    for cancelled in (three, follower):
        with pytest.raises(CancelledError, match="LookupError: one"):
            cancelled.result.fetch()
    assert list(queue.over) == [Span(1, 4)]
    assert queue.take(1, 2) == []


def test_what_a_worker_had_is_cancelled_when_it_is_lost_after_an_error():
    queue = ClosureQueue(2)
    one, two = closure(queue), closure(queue)
    queue.take(0, 2)
    queue.take(1, 2)
    queue.fail(0, one, LookupError("one"))
    queue.give_back(1)
    assert queue.at_rest
    with pytest.raises(CancelledError):
        two.result.fetch()


def test_the_queue_is_full():
    queue = ClosureQueue(1, capacity=2)
    closure(queue)
    assert not queue.full
    closure(queue)
    assert queue.full
    queue.take(0, 2)
    assert not queue.full


def test_the_queue_is_full_of_long_arguments_too():
    queue = ClosureQueue(1, capacity_bytes=2 * NOTHING.nbytes)
    for _ in range(2):
        assert not queue.full
        closure(queue)
    assert queue.full
    queue.take(0, 1)
    assert not queue.full
    queue.give_back(0)
    assert queue.full
    queue.abort(LookupError())
    assert not queue.full
