"""Parameter servers under real signals: no update is lost or made twice that should not be."""

import signal
import threading

import numpy as np
import pytest

import ndistribute as nd
from tests.coordinator import errands
from tests.jobs.clusters import (
    DEADLINE,
    commanded,
    marked,
    meet_workers,
    schedule_all,
    taking_part,
    training,
)
from tests.jobs.loops import Shared
from tests.processes import Tasks, wait_until

IMPATIENT = {"NDISTRIBUTE_HEARTBEAT_SECONDS": "0.5"}


def kept(folder):
    """Return what lets servers write snapshots when they are told."""
    return {"NDISTRIBUTE_SNAPSHOT_DIR": str(folder), "NDISTRIBUTE_SNAPSHOT_SECONDS": "3600"}


def test_a_worker_that_was_stopped_half_way_makes_nothing_twice(tmp_path):
    with training(servers=2, **IMPATIENT) as (tasks, strategy, coordinator):
        marks, mark = marked(strategy, 500)
        others, _ = marked(strategy, 500)

        def stopped_half_way(number):
            others.scatter_add([number], [1])
            others.numpy()  # What was changed goes out before it is read.
            mark(number)
            return errands.once(str(tmp_path / f"once-{number}"), signal.SIGSTOP)

        # Of the second one the servers have forgotten what they answered by the time it goes on.
        for first, count in ((0, 5), (100, 200)):
            late = coordinator.schedule(stopped_half_way, args=(first,))
            schedule_all(coordinator, mark, range(first + 1, first + count))
            coordinator.join(timeout=DEADLINE)
            tasks.send("worker", 1 - late.fetch(), signal.SIGCONT)
            assert meet_workers(coordinator, tmp_path / "fifo") == [0, 1]
        np.testing.assert_array_equal(np.flatnonzero(marks.numpy()), [*range(5), *range(100, 300)])
        assert marks.numpy().max() == 1
        assert others.numpy()[[0, 100]].tolist() == [1, 1]
        assert strategy.lost_updates == 0


def test_everybody_waits_for_a_stopped_server():
    with training(servers=2, **IMPATIENT) as (tasks, strategy, coordinator):
        marks, mark = marked(strategy, 300)
        schedule_all(coordinator, mark, range(300))
        tasks.stop("ps", 0)
        with pytest.raises(nd.CollectiveTimeoutError):
            coordinator.join(timeout=1.2)  # More than twice the silence that is borne.
        tasks.send("ps", 0, signal.SIGCONT)
        coordinator.join(timeout=DEADLINE)
        np.testing.assert_array_equal(marks.numpy(), 1)


def test_when_the_chief_is_killed_all_end_and_a_rerun_goes_on(tmp_path):
    with Tasks(workers=2, servers=2, TASK_CUT_SECONDS="0.5", **kept(tmp_path)) as tasks:
        tasks.start_all()
        tasks.start("chief", 0, TASK_RUNS="command")
        with taking_part(tasks) as strategy:
            shared = Shared(strategy)
            wait_until(lambda: int(np.min(shared.steps[:2])) > 100)
            seen = int(np.sum(shared.steps))
        tasks.kill("chief", 0)
        for job in ("ps", "worker"):
            assert [tasks.code(job, index) for index in range(2)] == [1, 1]
        tasks.start_all()
        with commanded(tasks, restore=True) as (strategy, coordinator):
            assert int(np.sum(Shared(strategy).steps)) >= seen
            meet_workers(coordinator, tmp_path / "fifo")
        assert [tasks.code("worker", index) for index in range(2)] == [0, 0]


def test_two_jobs_on_one_host_have_nothing_to_do_with_each_other():
    with training(workers=1) as mine, training(workers=1) as theirs:
        counted = []
        for (_, strategy, coordinator), count in ((mine, 30), (theirs, 50)):
            marks, mark = marked(strategy, 100)
            counted.append(marks)
            schedule_all(coordinator, mark, range(count))
        mine[0].kill("worker", 0)
        mine[0].start("worker", 0)
        for _, _, coordinator in (mine, theirs):
            coordinator.join(timeout=DEADLINE)
        assert [int(np.sum(marks)) for marks in counted] == [30, 50]


def test_a_server_that_was_stopped_while_nobody_asks_it_goes_on():
    """It took an idle chief for dead, whose connection had been cut, and ended."""
    settings = {"TASK_CUT_SECONDS": "1", **IMPATIENT}
    with training(workers=1, **settings) as (tasks, strategy, coordinator):
        marks, mark = marked(strategy, 10)
        tasks.stop("ps", 0)
        threading.Event().wait(1.5)  # Thrice the silence that is borne.
        tasks.send("ps", 0, signal.SIGCONT)
        with pytest.raises(TimeoutError):
            tasks.code("ps", 0, timeout=2.0)
        coordinator.schedule(mark, args=(1,))
        coordinator.join(timeout=DEADLINE)
        assert marks.numpy().tolist() == [0, 1] + 8 * [0]
