"""Servers that keep each shard twice are killed and stopped: no update is lost or made twice.

FAULTS_KILLS says how many are killed, FAULTS_SEED which, and when.
"""

import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import threading
import time

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.parameter_server.copies import WITNESS
from ndistribute.parameter_server.messages import Beat, Number, Vote
from ndistribute.transport.rpc import Client, PendingCall
from tests.jobs.clusters import DEADLINE, marked, schedule_all, taking_part, training
from tests.jobs.launched import run
from tests.jobs.loops import Counters
from tests.kinds import in_thread
from tests.processes import Tasks, wait_until

KILLS = int(os.environ.get("FAULTS_KILLS", "4"))
SEED = int(os.environ.get("FAULTS_SEED", "0")) or random.SystemRandom().getrandbits(32)
WORKERS = 2
TWICE = {"TASK_OPTIONS": json.dumps({"replicas": 2})}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(100 + 4 * KILLS)]


def beats_of(strategy, shard):
    """Return what both copies of a shard say of themselves, or less if one is silent."""
    until, beats = time.monotonic() + 1.0, []
    for copy in strategy.servers._clients[shard]._caller.copies:
        with contextlib.suppress(nd.DistributeError):
            call = PendingCall(copy, Beat(), until)
            beats.append(call.result(until) or call.cancel())
    return [beat for beat in beats if beat is not None]


def is_whole(strategy):
    """Return whether each shard has two equal copies."""
    roles = [{beat.role for beat in beats_of(strategy, i)} for i in range(len(strategy.servers))]
    return all(each == {"follows", "leads"} for each in roles)


def wait_until_whole(strategy):
    wait_until(lambda: is_whole(strategy))


class Job(Tasks):
    """Workers that count, and servers; this process watches them as an evaluator."""

    def __init__(self, folder, servers=2, environs=None, **settings):
        super().__init__(WORKERS, servers, chief=False, **settings)
        self.folder, self.environs = folder, environs or [{}] * servers
        self.servers = servers

    def begin(self, strategy):
        self.strategy, self.counters = strategy, Counters(strategy)
        credentials = strategy.servers._clients[0]._caller.copies[0].credentials
        who = {"name": "evaluator:0", "purpose": WITNESS, "replies": Number}
        self.witness = Client(self.cluster["worker"][0], credentials, **who, repeats=False)
        for index in range(WORKERS):
            result = str(self.folder / f"{index}.json")
            self.start("worker", index, TASK_RUNS="count_up", TASK_RESULT=result, **TWICE)
        self.wait_until_all_count()
        self.wait_until_whole()

    def is_known(self, shard):
        """Return whether the worker that is the witness knows both copies of a shard."""
        beats = beats_of(self.strategy, shard)
        leads = [beat.role for beat in beats].index("leads")
        vote = Vote(shard, leads, beats[leads].epoch, False)
        return self.servers > 2 or self.witness.call(vote).value

    def wait_until_whole(self):
        wait_until_whole(self.strategy)
        wait_until(lambda: all(map(self.is_known, range(self.servers))))

    def wait_until_all_count(self):
        """Wait until each worker has made updates on each server that came after this call."""
        before = self.counted()
        wait_until(lambda: bool(np.all(self.counted() > before)))

    def counted(self):
        return np.array([each.numpy()[:WORKERS] for each in self.counters.counts])

    def end(self):
        """Stop the workers, and return what they acknowledged, and what waits they had."""
        self.witness.close()
        self.counters.stop.assign(1)
        assert [self.code("worker", index) for index in range(WORKERS)] == [0] * WORKERS
        results = [json.loads((self.folder / f"{i}.json").read_text()) for i in range(WORKERS)]
        assert [result["lost"] for result in results] == [0] * WORKERS
        waits = [tuple(wait) for result in results for wait in result["waits"]]
        return [result["added"] for result in results], waits


@contextlib.contextmanager
def counting(folder, **settings):
    """Yield a job that counts, with each shard on two servers; it ends well after the block."""
    with Job(folder, **settings) as job:
        for index, environ in enumerate(job.environs):
            job.start("ps", index, **environ)
        with taking_part(job, replicas=2) as strategy:
            job.begin(strategy)
            yield job


def test_no_update_is_lost_or_made_twice_whichever_server_is_killed(tmp_path):
    print(f"FAULTS_SEED={SEED}")
    rng, moments = random.Random(SEED), []
    with counting(tmp_path, servers=3) as job:
        for _ in range(KILLS):
            threading.Event().wait(rng.uniform(0, 0.1))
            victim = rng.randrange(3)
            moments.append(time.monotonic())
            job.kill("ps", victim)
            if rng.random() < 0.5:  # Others go on before it is back, or must not notice.
                job.wait_until_all_count()
            job.start("ps", victim)
            job.wait_until_whole()
        job.wait_until_all_count()
        added, waits = job.end()
        np.testing.assert_array_equal(job.counted(), [added] * 3)
    pauses = [
        max([took for ended, took in waits if ended - took < moment + 2 and ended > moment] or [0])
        for moment in moments
    ]
    assert max(pauses) < 10
    print(f"{sum(added) * 3} updates, pauses of {statistics.median(pauses):.3f} s", end=", ")
    print(f"{max(pauses):.3f} s at most after {KILLS} kills")


def test_a_copy_that_leaves_a_change_out_is_noticed(tmp_path):
    with counting(tmp_path, environs=[{}, {"TASK_RUNS": "serve_and_drop"}]) as job:
        job.wait_until_all_count()
        job.kill("ps", 0)
        job.wait_until_all_count()
        added, _ = job.end()
        lacking = np.array([added] * 2) - job.counted()
        assert lacking.sum() == 1


def test_a_server_that_is_stopped_is_left_out_and_takes_part_again(tmp_path):
    with counting(tmp_path) as job:
        for index in range(2):
            job.stop("ps", index)
            job.wait_until_all_count()
            threading.Event().wait(float(os.environ.get("FAULTS_STOP_SECONDS", "1")))
            job.wait_until_all_count()
            job.send("ps", index, signal.SIGCONT)
            job.wait_until_whole()
        job.wait_until_all_count()
        added, waits = job.end()
        np.testing.assert_array_equal(job.counted(), [added] * 2)
        print(f"pauses of {max(took for _, took in waits):.3f} s at most")


def test_functions_of_a_chief_count_once_whichever_server_is_killed():
    rng = random.Random(SEED)
    with training({"replicas": 2}, servers=2) as (tasks, strategy, coordinator):
        marks, mark = marked(strategy, 50 * KILLS)
        wait_until_whole(strategy)
        for kill in range(KILLS):
            schedule_all(coordinator, mark, range(50 * kill, 50 * kill + 50))
            threading.Event().wait(rng.uniform(0, 0.02))
            victim = rng.randrange(2)
            tasks.kill("ps", victim)
            coordinator.join(timeout=DEADLINE)
            tasks.start("ps", victim)
            wait_until_whole(strategy)
        np.testing.assert_array_equal(marks.numpy(), 1)
        assert strategy.lost_updates == 0
        coordinator.close()
        strategy.close()
        assert [tasks.code("ps", index) for index in range(2)] == [0, 0]


@contextlib.contextmanager
def alone(environ=None, **options):
    """Yield two servers that may be killed, and the strategy of the only worker."""
    with Tasks(1, 2, chief=False, **(environ or {})) as tasks:
        tasks.start_all("ps")
        with taking_part(tasks, "worker", replicas=2, **options) as strategy:
            with strategy.scope():
                both = [nd.Variable(np.zeros(3)) for _ in range(2)]
            wait_until_whole(strategy)
            yield tasks, strategy, both


def add(both, count):
    for _, each in itertools.product(range(count), both):
        each.assign_add(np.ones(3))


def test_who_lost_both_copies_is_told_so():
    with alone(timeout_seconds=2.0) as (tasks, _, both):
        add(both, 5)
        for index in range(2):
            tasks.kill("ps", index)
        with pytest.raises(nd.WorkerLostError, match="nothing listens there"):
            add(both, 1)
        tasks.start_all("ps")
        with pytest.raises(nd.DistributeError, match="there is no variable 'Variable"):
            add(both, 1)


def test_with_a_log_both_copies_come_back_and_who_has_more_leads(tmp_path):
    environ = {"NDISTRIBUTE_SNAPSHOT_DIR": str(tmp_path), "NDISTRIBUTE_SNAPSHOT_SECONDS": "3600"}
    with alone(environ, durability="log") as (tasks, strategy, both):
        for first in (0, 1):
            add(both, 5)
            tasks.kill("ps", first)
            add(both, 5)  # Which the first one lacks.
            tasks.kill("ps", 1 - first)
            tasks.start("ps", first)
            with in_thread(lambda: add(both, 5)) as adding:
                with pytest.raises(TimeoutError):
                    adding.result(0.5)
                tasks.start("ps", 1 - first)
                adding.result(DEADLINE)
            wait_until_whole(strategy)
        assert [each.numpy().tolist() for each in both] == [[30.0] * 3] * 2
        assert strategy.lost_updates == 0


LAUNCHED = """
import os, signal, sys
from pathlib import Path
import numpy as np
import ndistribute as nd
resolver = nd.TFConfigClusterResolver()
here = Path(sys.argv[1])
if resolver.task_type == "ps":
    (here / f"{resolver.task_id}").write_text(str(os.getpid()))
    nd.Server(resolver.cluster_spec(), "ps", resolver.task_id).join()
    sys.exit()
from tests.faults.test_replicated_servers import add, wait_until_whole
with nd.ParameterServerStrategy(replicas=2) as strategy:
    with strategy.scope():
        both = [nd.Variable(np.zeros(3)) for _ in range(2)]
    for server in (0, 1):
        wait_until_whole(strategy)
        os.kill(int((here / f"{server}").read_text()), signal.SIGKILL)
        add(both, 10)
    wait_until_whole(strategy)
    print([float(each.numpy()[0]) for each in both])
"""


def test_a_server_that_the_launcher_starts_again_is_filled(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LAUNCHED)
    options = ["--workers", "1", "--ps", "2", "--max-restarts", "2"]
    done = run("run", *options, script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "[worker:0] [20.0, 20.0]" in done.stdout, done.stderr
    assert done.stderr.count("restarting it") == 2


def test_a_worker_with_a_new_index_joins_a_running_job(tmp_path):
    with Tasks(2, 2, chief=False, NDISTRIBUTE_JOB_ID="a job that grows") as tasks:
        grown = tasks.cluster
        tasks.cluster = {**grown, "worker": grown["worker"][:1]}
        results = [tmp_path / f"{index}.json" for index in range(2)]
        tasks.start_all("ps")
        tasks.start("worker", 0, TASK_RUNS="count_up", TASK_RESULT=str(results[0]))
        with taking_part(tasks) as strategy:
            counters = Counters(strategy)
            wait_until(lambda: counters.counts[1].numpy()[0] > 0)
            tasks.cluster = grown
            tasks.start("worker", 1, TASK_RUNS="count_up", TASK_RESULT=str(results[1]))
            wait_until(lambda: counters.counts[1].numpy()[1] > 0)
            counters.stop.assign(1)
            assert [tasks.code("worker", index) for index in range(2)] == [0, 0]
            added = [json.loads(result.read_text())["added"] for result in results]
            assert [each.numpy()[:2].tolist() for each in counters.counts] == [added, added]
        assert [tasks.code("ps", index) for index in range(2)] == [0, 0]
