"""Workers and servers that keep a log are killed at random: no acknowledged update is lost.

FAULTS_KILLS says how many are killed in each test, FAULTS_SEED which, and when.
"""

import os
import random
import signal
import threading
import time

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.coordinator import closures
from tests.jobs.clusters import DEADLINE, training

KILLS = int(os.environ.get("FAULTS_KILLS", "10"))
SEED = int(os.environ.get("FAULTS_SEED", "0")) or random.SystemRandom().getrandbits(32)
PER_KILL = 4
WORKERS = 2
MOST = 1 << 15

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60 + 3 * KILLS)]


def logged(folder):
    """Return what servers need to be told to keep a log."""
    return {
        "NDISTRIBUTE_SNAPSHOT_DIR": str(folder / "kept"),
        "NDISTRIBUTE_SNAPSHOT_SECONDS": "0.2",
        "NDISTRIBUTE_DURABILITY": "log",
    }


def victim(rng):
    """Wait for some moment, and return whom to kill then."""
    threading.Event().wait(rng.uniform(0, 0.01))
    return rng.choice([("ps", 0), ("ps", 1), *(("worker", n) for n in range(WORKERS))])


STEPS = 4


def test_every_function_changes_everything_once_whoever_is_killed(tmp_path, monkeypatch):
    """Of a function whose worker or server was killed half way, some updates were made twice.

    They read by the clock: one that was run again sent its updates in other parts.
    """
    print(f"FAULTS_SEED={SEED}")
    monkeypatch.setattr(closures, "ATTEMPTS", KILLS + 1)  # Any number may hit one function.
    rng = random.Random(SEED)
    log = tmp_path / "log"
    log.touch()
    partitioner = nd.partitioners.FixedShardsPartitioner(2)
    options = {"variable_partitioner": partitioner, "devices": ["cpu:0", "cpu:1"]}
    settings = {"workers": WORKERS, "servers": 2, **logged(tmp_path)}
    with training({"durability": "log", **options}, **settings) as (tasks, strategy, coordinator):
        with strategy.scope():
            marks = nd.Variable(np.zeros(MOST, np.int8))
            counts = [nd.Variable(np.zeros(2, np.int64)) for _ in range(3)]
            weights = nd.Variable(np.zeros(2))
            seen = nd.Variable(np.zeros(2), synchronization="on_read", aggregation="sum")
        optimizer = nd.optimizers.SGD(1.0)
        optimizer.build([weights])

        def clock():
            return time.monotonic_ns() // 1000 % 2

        def see():  # Which of the replicas is first differs from one attempt to the next.
            if clock():
                threading.Event().wait(1e-4)
            seen.assign_add(np.arange(2) == nd.get_replica_context().local_replica_id)
            if clock():
                seen.numpy()

        def train(number):
            with log.open("a") as file:
                file.write(f"{os.getpid()}\n")
            marks.scatter_add([number], np.ones(1, np.int8))
            marks.numpy()  # What was changed goes out before it is read.
            for step in range(STEPS):
                strategy.run(see)
                for count in counts:
                    count.assign_add(np.ones(2, np.int64))
                optimizer.apply_gradients([(-np.ones(2), weights)])
                if clock():
                    counts[(number + step) % 3].numpy()
            return number

        results = []
        for _ in range(KILLS):
            while True:  # Until a worker, for one, has begun something since its start.
                more = range(len(results), len(results) + PER_KILL)
                results += [coordinator.schedule(train, args=(number,)) for number in more]
                job, index = victim(rng)
                begun = set(map(int, log.read_text().split()))
                if begun & {tasks.pid("worker", n) for n in range(WORKERS)} and (
                    job == "ps" or tasks.pid(job, index) in begun
                ):
                    break
            tasks.kill(job, index)
            assert tasks.code(job, index) == -signal.SIGKILL
            tasks.start(job, index)
        coordinator.join(timeout=DEADLINE + KILLS)
        count = len(results)
        assert coordinator.fetch(results) == list(range(count))
        np.testing.assert_array_equal(marks.numpy(), np.arange(MOST) < count)
        total = STEPS * count
        sums = [variable.numpy().tolist() for variable in (*counts, weights, seen)]
        again = len(log.read_text().split()) - count
        print(f"{KILLS} kills, {count} functions, {again} were run again: {sums}")
        assert sums == [[total] * 2] * 5
        assert optimizer.iterations == total
        assert strategy.lost_updates == 0
