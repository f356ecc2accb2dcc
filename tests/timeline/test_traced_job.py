"""Real jobs are traced, and the report finds what is made late in them."""

import os
import subprocess
import sys

import pytest

from ndistribute import cli
from tests.processes import ROOT

STEPS, LATE = 20, 0.02
# The late worker begins each step when the other one has come, and takes longer.
WORKERS = f"""
import pathlib, time
import numpy as np
import ndistribute as nd

folder = pathlib.Path(__file__).parent
with nd.MultiWorkerMirroredStrategy() as strategy:
    with strategy.scope():
        variable = nd.Variable(np.zeros(50_000, np.float32))
        optimizer = nd.optimizers.SGD(0.1)

    def step(arrived):
        if strategy.cluster_resolver.task_id == RANK:
            while not arrived.exists():
                time.sleep(0.001)
            time.sleep({LATE})
        else:
            arrived.touch()
        optimizer.apply_gradients([(np.ones(50_000, np.float32), variable)])
        return nd.get_replica_context().all_reduce("sum", np.float32(1))

    for number in range({STEPS}):
        total = strategy.run(step, args=(folder / str(number),))
    assert float(total) == 2.0
"""

REPLICAS = f"""
import time
import numpy as np
import ndistribute as nd

with nd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
    with strategy.scope():
        variable = nd.Variable(np.zeros(50_000, np.float32))
        optimizer = nd.optimizers.SGD(0.1)
    dataset = strategy.distribute_dataset(nd.Dataset.range({2 * STEPS}).batch(2))

    def step(numbers):
        if nd.get_replica_context().replica_id_in_sync_group == 1:
            time.sleep({LATE})
        optimizer.apply_gradients([(np.ones(50_000, np.float32), variable)])

    for batch in dataset:
        strategy.run(step, args=(batch,))
"""

SERVERS = f"""
import time
import numpy as np
import ndistribute as nd
from ndistribute.parameter_server.store import Store

task = nd.TFConfigClusterResolver()
if task.task_type == "ps":
    if task.task_id == 1:
        answer = Store.handle
        Store.handle = lambda *asked: time.sleep({LATE}) or answer(*asked)
    nd.Server(task.cluster_spec(), "ps", task.task_id).join()
else:
    with nd.ParameterServerStrategy() as strategy:
        with strategy.scope():
            variables = [nd.Variable(np.zeros(5_000, np.float32)) for _ in range(2)]
            optimizer = nd.optimizers.SGD(0.1)

        def step():
            gradients = [variable + 1.0 for variable in variables]
            optimizer.apply_gradients(zip(gradients, variables))

        for _ in range({STEPS}):
            strategy.run(step)
"""


@pytest.mark.parametrize(
    ("program", "launcher", "count", "names", "late"),
    [
        (WORKERS.replace("RANK", "0"), "-n 2", 2, "pack wait reduce update", "Rank 0"),
        (WORKERS.replace("RANK", "1"), "-n 2", 2, "pack wait reduce update", "Rank 1"),
        (REPLICAS, "", 1, "input wait update", "Replica 1"),
        (SERVERS, "--workers 2 --ps 2", 4, "pull push serve", "Server ps:1"),
    ],
    ids=["worker 0", "worker 1", "replica", "server"],
)
def test_who_is_late_in_a_real_job_is_found(tmp_path, capfd, program, launcher, count, names, late):
    script, traces = tmp_path / "train.py", tmp_path / "traces"
    script.write_text(program)
    run = ["-m", "ndistribute", "run", *launcher.split()] if launcher else []
    environ = {**os.environ, "NDISTRIBUTE_TRACE": str(traces), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, *run, script], env=environ, timeout=100, check=True)
    assert cli.main(["trace", "report", str(traces)]) == 0
    said = capfd.readouterr().out
    assert said.startswith(f"{count} process"), said
    for name in ("compute", *names.split()):
        assert name in said.splitlines()[2]
    assert f"{late} is late: " in said, said
    assert "There is no trace of" not in said
    assert cli.main(["trace", "merge", str(traces)]) == 0
