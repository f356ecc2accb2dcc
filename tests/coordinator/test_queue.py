"""The queue of a coordinator, without workers."""

from concurrent.futures import CancelledError

import pytest

from ndistribute.coordinator.closures import ATTEMPTS, Closure, ClosureQueue, RemoteValue
from ndistribute.coordinator.pickling import dump
from ndistribute.errors import AuthenticationError, WorkerLostError

NOTHING = dump(None)
GONE = ConnectionError("gone")


def queue_for(workers: int, timeout: float = 60.0) -> ClosureQueue:
    """Return a queue whose workers are all there."""
    queue = ClosureQueue([f"worker:{n}" for n in range(workers)], timeout)
    for worker in range(workers):
        queue.arrive(worker)
    return queue


def add(queue: ClosureQueue, *inputs: Closure) -> Closure:
    values = [one.result for one in inputs]
    made = Closure(RemoteValue(queue, "f"), {}, [], values, NOTHING)
    queue.add(made)
    return made


def test_a_worker_gets_nothing_in_advance_while_another_might_be_idle():
    queue = queue_for(2)
    one, two = add(queue), add(queue)
    assert queue.take(0, 2) == [one]
    assert queue.take(0, 2) == []
    assert queue.take(1, 2) == [two]


def test_a_fast_worker_gets_several_in_advance_while_there_are_plenty():
    queue = queue_for(2)
    made = [add(queue) for _ in range(12)]
    assert queue.take(0, depth=8) == made[:5]  # Of the other 7 each worker may have 3.
    assert queue.take(1, depth=2) == made[5:7]


def test_what_a_lost_worker_had_goes_first():
    queue = queue_for(2)
    one, two, three = (add(queue) for _ in range(3))
    assert queue.take(0, 2) == [one, two]
    queue.lose(0, GONE)
    assert queue.idle_worker() == 1
    assert queue.take(1, 2) == [one, two]
    assert (one.attempt, two.attempt) == (2, 2)  # The lost worker may run both.
    queue.finish(0, 1, NOTHING)  # It came too late.
    assert not one.result.done()
    queue.finish(1, 1, NOTHING)
    queue.finish(1, 2, NOTHING)
    assert queue.take(1, 2) == [three]


def test_only_the_closure_that_ran_on_a_lost_worker_was_tried():
    queue = queue_for(1)
    one, two, three = (add(queue) for _ in range(3))
    for _ in range(ATTEMPTS - 1):
        assert queue.take(0, 2) == [one, two]
        queue.lose(0, GONE)
        queue.arrive(0)
    assert queue.take(0, 2) == [one, two]
    queue.finish(0, 1, NOTHING)
    for _ in range(ATTEMPTS):
        queue.lose(0, GONE)
        queue.arrive(0)
        assert not one.result.error
        if not two.result.done():
            queue.take(0, 2)
    with pytest.raises(WorkerLostError, match=rf"closure 2 \(f\) was run {ATTEMPTS} times") as lost:
        queue.join(0)
    assert str(lost.value).count("worker:0") == ATTEMPTS
    assert lost.value.__cause__ is GONE
    assert two.result.error is lost.value
    with pytest.raises(CancelledError, match="closure 3"):
        three.result.fetch()
    assert queue.low_water == 4
    queue.join(0)


def test_all_workers_away_is_an_error_only_while_something_waits():
    queue = ClosureQueue(["worker:0", "worker:1"], timeout=0.0)
    for worker in (0, 1):
        queue.lose(worker, GONE)
    queue.join(0)
    value = add(queue).result
    queue.arrive(1)
    queue.lose(0, GONE)
    assert not value.done()
    queue.lose(1, GONE)
    queue.lose(0, GONE)
    with pytest.raises(WorkerLostError, match=r"1 function.*worker:0 \(gone\), worker:1 \(gone\)"):
        queue.join(0)


def test_a_worker_that_refuses_is_named_at_once_and_once(caplog):
    """It was tried again in silence, for as long as another worker was there."""
    queue = ClosureQueue(["worker:0", "worker:1"])
    queue.arrive(0)
    for _ in range(3):
        queue.lose(1, AuthenticationError("it belongs to another job"))
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == (
        "WARNING",
        "worker:1 refuses connections, and gets no work: it belongs to another job",
    )


def test_an_idle_worker_runs_what_another_cannot_end_and_that_one_gets_no_work_before(caplog):
    queue = queue_for(2)
    one, two = add(queue), add(queue)
    assert queue.take(0, 8) == [one]
    assert queue.take(1, 8) == [two]
    queue.stick(0, 1, "ps:0 (cut off)")
    queue.relieve()
    assert queue.idle_worker() is None  # Worker 1 is busy, and may not reach the server either.
    queue.finish(1, 2, NOTHING)
    queue.relieve()
    (again,) = queue.take(1, 8)
    assert (again.number, again.attempt, again.lost_on, one.attempt) == (1, 2, [], 1)
    assert "worker:0 waits for ps:0 (cut off); idle workers run its functions" in caplog.text
    three = add(queue)
    assert (queue.idle_worker(), queue.take(0, 8)) == (None, [])
    queue.finish(0, 1, NOTHING)  # What it was stuck in: worker 1 still runs it.
    assert not one.result.done()
    assert queue.idle_worker() == 0
    assert queue.take(0, 8) == [three]
    queue.finish(1, 1, NOTHING)
    queue.finish(0, 3, NOTHING)
    queue.join(0.0)
    assert one.result.done()


def test_a_stuck_worker_that_is_lost_returns_empty(caplog):
    queue = queue_for(2)
    one = add(queue)
    assert queue.take(0, 8) == [one]
    queue.stick(0, 1, "ps:0")
    queue.relieve()
    assert len(queue.take(1, 8)) == 1
    queue.lose(0, GONE)
    queue.arrive(0)
    queue.finish(0, 1, NOTHING)
    assert not one.result.done()
    queue.finish(1, 1, NOTHING)
    queue.join(0.0)
