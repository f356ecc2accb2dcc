"""Workers with loops of their own, some of which are killed: the others go on, or say why not."""

import json
import signal

import numpy as np
import pytest

from tests.jobs.clusters import taking_part
from tests.jobs.loops import Shared
from tests.processes import Tasks, wait_until


def training(**options):
    return {"TASK_RUNS": "train", "TASK_OPTIONS": json.dumps(options)}


def wait_for_steps(shared, *workers, count=20):
    """Wait until each of some workers has made so many steps more."""
    before = shared.steps.numpy()
    wait_until(lambda: all(shared.steps.numpy()[w] >= before[w] + count for w in workers))


@pytest.mark.parametrize("options", [{}, {"max_staleness": 1}], ids=str)
def test_a_worker_that_is_killed_comes_back_while_the_others_train(options):
    with Tasks(workers=2, servers=2, chief=False) as tasks:
        tasks.start_all("ps")
        tasks.start_all("worker", **training(**options))
        tasks.start("evaluator", 0, TASK_RUNS="watch")
        with taking_part(tasks) as observer:
            shared = Shared(observer)
            wait_for_steps(shared, 0, 1)
            tasks.kill("worker", 0)
            tasks.kill("evaluator", 0)
            wait_for_steps(shared, 1)
            tasks.start("worker", 0, **training(**options))
            wait_for_steps(shared, 0, 1)
            shared.stop.assign(1)
            codes = [tasks.code("worker", index) for index in range(2)]
            steps = int(np.sum(shared.steps))
            # One step may have been made and not been counted, by the worker that was killed.
            assert 0 <= -shared.weights.numpy()[0] - steps <= 1
            assert codes == [0, 0]
        assert [tasks.code("ps", index) for index in range(2)] == [0, 0]


def test_workers_in_step_go_on_with_spare_ones_and_say_so_where_too_few_are_left():
    options = {"replicas_to_aggregate": 2, "total_num_replicas": 3}
    impatient = {"NDISTRIBUTE_HEARTBEAT_SECONDS": "1"}
    with Tasks(workers=3, servers=2, chief=False, **impatient) as tasks:
        tasks.start_all("ps")
        tasks.start_all("worker", **training(**options))
        with taking_part(tasks) as observer:
            shared = Shared(observer)
            wait_for_steps(shared, 0, 1, 2, count=5)
            tasks.stop("worker", 2)
            wait_until(lambda: tasks.said().count("it sent nothing for") == 2)
            wait_for_steps(shared, 0, 1)
            tasks.send("worker", 2, signal.SIGCONT)
            wait_for_steps(shared, 0, 1, 2, count=5)
            tasks.kill("worker", 0)
            wait_for_steps(shared, 1, 2)
            tasks.kill("worker", 2)
            assert tasks.code("worker", 1) == 1
            assert "It needs 2, and has 1" in tasks.said()


@pytest.mark.parametrize(
    "options", [{}, {"max_staleness": 1}, {"replicas_to_aggregate": 2}], ids=str
)
def test_all_go_on_when_a_server_is_killed_and_comes_back(tmp_path, options):
    settings = {"NDISTRIBUTE_SNAPSHOT_DIR": str(tmp_path), "NDISTRIBUTE_SNAPSHOT_SECONDS": "0.05"}
    with Tasks(workers=2, servers=2, chief=False, **settings) as tasks:
        tasks.start_all("ps")
        tasks.start_all("worker", **training(**options))
        with taking_part(tasks) as observer:
            shared = Shared(observer)
            wait_for_steps(shared, 0, 1)
            for server in (0, 1):
                observer.save_snapshots()
                tasks.kill("ps", server)
                tasks.start("ps", server)
                wait_for_steps(shared, 0, 1)
            shared.stop.assign(1)
            codes = {tasks.code("worker", index) for index in range(2)}
            # One of two in step may see that it is enough a step before the other, which waits.
            assert codes == {0} or (codes == {0, 1} and "It needs 2, and has 1" in tasks.said())
