"""`TPUStrategy` over real processes, which JAX's distributed system connects."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.variables.mirrored import sharded_variable
from tests.kinds import context
from tests.processes import Ranks
from tests.test_equivalence import OPTIMIZERS, train

pytest.importorskip("jax")

DEVICES = 2  # Of each process.
DEADLINE = 30.0


def joined(deadline=DEADLINE):
    """Return the strategy of all processes."""
    os.environ["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={DEVICES}"  # It counts.
    options = nd.CommunicationOptions(timeout_seconds=deadline)
    return nd.TPUStrategy(nd.TPUClusterResolver(), options)


def trains(rank, size):
    """Compare training on all processes with one replica, and return what this one has."""
    with joined() as strategy:
        assert strategy.num_replicas_in_sync == DEVICES * size
        expected_losses, expected = train(nd.get_strategy(), OPTIMIZERS["adam"](), True)
        losses, values = train(strategy, OPTIMIZERS["adam"](), True)
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-12)
        for value, wanted in zip(values, expected, strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-12, atol=1e-12)
        return [value.tolist() for value in values]


def test_two_processes_train_as_one_replica_does():
    with Ranks(2) as workers:
        first, second = workers.results(trains)
    assert first == second


def combines(rank, size):
    """Return what goes across the processes outside of steps, and what stays."""
    with joined() as strategy:
        with strategy.scope():
            v = nd.Variable(float(rank + 1), aggregation="sum")  # Worker 0's value for all.
            own = nd.Variable(np.zeros(2), synchronization="on_read", aggregation="mean")
            cut = sharded_variable(np.arange(8.0), axis=0)
        replicas = strategy.num_replicas_in_sync

        def step(x):
            number = context().replica_id_in_sync_group
            v.assign_add(1.0 * x)
            own.assign(np.ones(2) * number)
            return number, np.reshape(number, (1,)), cut * 2, context().rng.random()

        nd.set_seed(3)
        numbers = strategy.distribute_values_from_function(lambda c: c.replica_id_in_sync_group)
        ids, rows, shards, drawn = strategy.run(step, args=(numbers,))
        batches = list(strategy.distribute_dataset(nd.Dataset.range(2 * replicas).batch(replicas)))
        drawn = strategy.gather(nd.PerReplica([[number] for number in drawn.values]), axis=0)
        return {
            "ids": [int(number) for number in ids.values],
            "shards": [part.tolist() for part in shards.values],
            "batches": [[part.tolist() for part in batch.values] for batch in batches],
            "repr": repr(strategy),
            "all": {
                "sum": int(strategy.reduce("sum", ids)),
                "rows": strategy.gather(rows, axis=0).tolist(),
                "v": float(v),
                "own": own.numpy().tolist(),
                "cut": cut.numpy().tolist(),
                "distinct": len(set(drawn.tolist())),
                "drawn": drawn.tolist(),
            },
        }


def test_values_go_across_processes_as_across_devices():
    with Ranks(2) as workers:
        results = workers.results(combines)
    everything = [result.pop("all") for result in results]
    assert everything[0] == everything[1]
    everything[0].pop("drawn")
    assert everything[0] == {
        "sum": 6,
        "rows": [0, 1, 2, 3],
        "v": 1.0 + 6.0,
        "own": [1.5, 1.5],
        "cut": list(range(8)),
        "distinct": 4,
    }
    for rank, result in enumerate(results):
        mine = [DEVICES * rank + k for k in range(DEVICES)]
        assert result == {
            "ids": mine,
            "shards": [[4.0 * number, 4.0 * number + 2] for number in mine],
            "batches": [[[number] for number in mine], [[4 + number] for number in mine]],
            "repr": f"TPUStrategy('tpu:0', 'tpu:1') of worker {rank} of 2",
        }


def is_killed(rank, size, victim):
    """Kill one process between steps, and return what the other one is told, and when."""
    strategy = joined()
    with strategy.scope():
        v = nd.Variable(0.0, aggregation="sum")
    for _ in range(3):
        strategy.run(lambda: v.assign_add(1.0))
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()

    def go_on():
        for _ in range(1000):
            strategy.run(lambda: v.assign_add(1.0))

    with pytest.raises(nd.WorkerLostError) as caught:
        go_on()
    return str(caught.value), time.monotonic() - began


def test_a_killed_process_is_named_within_the_deadline():
    with Ranks(2) as workers:
        (survivor, _) = workers.run(is_killed, 1)
        text, seconds = survivor.result()
    assert "worker 1" in text
    assert seconds < DEADLINE


def fails_in_one(rank, size):
    """Return what the processes are told when the step of one of them cannot be compiled."""
    with joined() as strategy:
        with strategy.scope():
            v = nd.Variable(0.0, aggregation="sum")

        def step():
            if rank == 1:
                float(v + 1)
            v.assign_add(1.0)

        with pytest.raises(TypeError) as caught:  # A TracingError is one.
            strategy.run(step)
        strategy.run(lambda: v.assign_add(1.0))  # It works again.
        return str(caught.value), float(v)


def test_an_error_of_one_process_while_it_compiles_is_told_to_all():
    with Ranks(2) as workers:
        (first, left), (second, right) = workers.results(fails_in_one)
    assert left == right == DEVICES * 2
    assert "worker 1" in first
    assert "float()" in first
    assert "float()" in second


SHORT = 2.0


def disagrees(rank, size, runs):
    """Return what this process is told when worker 1 does not run the step that the others run."""
    strategy = joined(SHORT)
    with strategy.scope():
        v = nd.Variable(0.0, aggregation="sum")
    steps = [lambda: v.assign_add(1.0), lambda: v.assign_add(2.0)]
    for step in steps * 2:
        strategy.run(step)
    told, began = None, time.monotonic()
    try:
        for k in runs[rank]:
            strategy.run(steps[k])
        if rank == 1:
            threading.Event().wait(3 * SHORT)  # It lives, and runs other code.
    except nd.errors.DistributeError as error:
        told = type(error).__name__, error.rank
    return told, time.monotonic() - began < DEADLINE


@pytest.mark.parametrize(
    ("runs", "told"),
    [
        (([0, 0], [1, 0]), [("CollectiveMismatchError", 1)] * 2),
        (([0, 1, 0], [0]), [("CollectiveTimeoutError", 1), None]),
    ],
    ids=["another step", "no step"],
)
def test_a_process_that_does_not_run_a_step_is_named(runs, told):
    with Ranks(2) as workers:
        assert workers.results(disagrees, runs) == [(each, True) for each in told]


SCRIPT = """
import ndistribute as nd

resolver = nd.TPUClusterResolver()
nd.initialize_tpu_system(resolver)
strategy = nd.TPUStrategy(resolver)
total = strategy.run(lambda: nd.get_replica_context().all_reduce("sum", 1.0))
assert total.values == (8.0,) * 4 if strategy.is_chief else total.values
if not strategy.is_chief:
    sum(range(30_000_000))  # Worker 0, which ends before, has JAX's coordinator.
"""


def test_a_script_ends_in_all_processes_whoever_is_first(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=4"
    environ = {**os.environ, "XLA_FLAGS": flags}
    ran = subprocess.run(
        [sys.executable, "-m", "ndistribute", "run", "-n", "2", str(tmp_path / "script.py")],
        env=environ,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr.decode()


X = np.random.default_rng(1).normal(size=(16, 3))


def network():
    dense = nd.layers.Dense(4, activation="tanh", dtype="float64"), nd.layers.Dense(1)
    model = nd.Sequential([*dense])
    model.compile(nd.optimizers.Adam(0.05), "mean_squared_error")
    model.build_for(X[:1])
    return model


def fits(rank, size, folder):
    """Continue a training from a checkpoint, and save another one."""
    with joined():
        model = network()
        checkpoint = nd.Checkpoint(model=model)
        checkpoint.restore(f"{folder}/start")
        history = model.fit(X, X.sum(1, keepdims=True), batch_size=8, epochs=2, shuffle=False)
        checkpoint.save(f"{folder}/end")
        return history.history["loss"]


def test_models_fit_and_checkpoints_go_from_one_process_to_two_and_back(tmp_path):
    alone = network()
    checkpoint = nd.Checkpoint(model=alone)
    checkpoint.save(tmp_path / "start")
    with Ranks(2) as workers:
        first, second = workers.results(fits, str(tmp_path))
    wanted = alone.fit(X, X.sum(1, keepdims=True), batch_size=8, epochs=2, shuffle=False)
    assert first == second == pytest.approx(wanted.history["loss"], rel=1e-6)
    weights = alone.get_weights()
    checkpoint.restore(tmp_path / "end")
    for value, expected in zip(alone.get_weights(), weights, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5)
