"""Real jobs are traced, and the report finds what is made late in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ndistribute import cli, timeline, trace_report
from tests.processes import ROOT, Ranks, wait_until

STEPS, LATE = 20, 0.02


def train(rank: int, size: int, late: int, folder: str) -> float:
    import ndistribute as nd

    made: list[Path] = []
    with nd.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            variable = nd.Variable(np.zeros(50_000, np.float32))
            optimizer = nd.optimizers.SGD(0.1)

        def step() -> Any:
            arrived = Path(folder) / str(len(made))
            made.append(arrived)
            if rank == late:
                wait_until(arrived.exists)
                time.sleep(LATE)  # What a slower worker would compute.
            else:
                arrived.touch()
            optimizer.apply_gradients([(np.ones(50_000, np.float32), variable)])
            return nd.get_replica_context().all_reduce("sum", np.float32(1))

        for _ in range(STEPS):
            total = strategy.run(step)
        return float(total)


def written(rank: int, size: int) -> bool:
    timeline.flush()
    return timeline.enabled()


@pytest.mark.parametrize("late", [0, 1])
def test_the_late_worker_of_a_real_job_is_found(tmp_path: Path, late: int, capfd):
    (tmp_path / "steps").mkdir()
    with Ranks(2, "python", {"NDISTRIBUTE_TRACE": str(tmp_path)}) as ranks:
        outcomes = ranks.run(train, late, str(tmp_path / "steps"))
        assert [outcome.result() for outcome in outcomes] == [2.0, 2.0]
        assert [outcome.result() for outcome in ranks.run(written)] == [True, True]
    traces = trace_report.read(tmp_path)
    names = {event.name for trace in traces for event in trace.events}
    assert {"compute", "pack", "wait", "reduce", "update"} <= names
    said = trace_report.report(tmp_path)
    assert f"Rank {late} is late" in said, said
    lost = trace_report.lateness(traces)[late]
    assert lost.steps >= STEPS
    assert lost.cost > 0
    assert cli.main(["trace", "merge", str(tmp_path)]) == 0
    merged = json.loads(Path(capfd.readouterr().out.strip()).read_text())
    assert merged["otherData"]["clock_offsets_us"] == {"rank 0": 0.0, "rank 1": 0.0}


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


def traced(directory: Path, capfd, program: str, *launcher: str) -> str:
    """Run a program, with the launcher or alone, and return what the report says of it."""
    script, traces = directory / "train.py", directory / "traces"
    script.write_text(program)
    environ = {**os.environ, "NDISTRIBUTE_TRACE": str(traces), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, *launcher, script], env=environ, timeout=100, check=True)
    assert cli.main(["trace", "report", str(traces)]) == 0
    return capfd.readouterr().out


def test_the_late_replica_of_a_single_process_is_found(tmp_path: Path, capfd):
    said = traced(tmp_path, capfd, REPLICAS)
    assert said.startswith("1 process, ")
    for word in ("input", "compute", "wait", "update"):
        assert word in said.splitlines()[2]
    assert "Replica 1 is late: it comes last to " in said, said
    assert "It computes " in said


def test_the_late_server_of_a_job_with_two_is_found(tmp_path: Path, capfd):
    launcher = "-m ndistribute run --workers 2 --ps 2".split()
    said = traced(tmp_path, capfd, SERVERS, *launcher)
    assert said.startswith("4 processes, "), said
    rows = {line.split("  ")[0].strip(): line for line in said.splitlines()}
    assert {"worker:0", "worker:1", "ps:0", "ps:1"} <= rows.keys()
    for word in ("compute", "pull", "push", "serve"):
        assert word in said.splitlines()[2]
    assert "Server ps:1 is late: " in said, said
    assert "No trace of" not in said
