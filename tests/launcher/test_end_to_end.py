"""The launcher and the strategy together: one script, started in each way, gives one result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ndistribute import cli
from tests.launcher.jobs import run
from tests.launcher.test_mpiexec import has_mpi

PREAMBLE = """
import sys
import numpy as np
import ndistribute as nd

def step():
    context = nd.get_replica_context()
    rank = context.replica_id_in_sync_group
    if rank == 1 and "fail" in sys.argv:
        raise KeyError("mine")
    return context.all_reduce("sum", np.full(1000, rank + 1.0))

with nd.MultiWorkerMirroredStrategy() as strategy:
    for _ in range(3):
        (total,) = strategy.local_results(strategy.run(step))
    print(strategy.num_replicas_in_sync, set(total.tolist()))
"""

WAYS = [
    pytest.param([], id="tcp"),
    pytest.param(
        ["--mpi"],
        id="mpi",
        marks=pytest.mark.skipif(not has_mpi(), reason="mpi4py and mpiexec are not installed"),
    ),
]


@pytest.mark.parametrize("way", WAYS)
def test_the_rank_that_raised_is_named_and_not_those_that_lost_it(script, way):
    done = run("run", *way, "-n", "2", script(""), "fail")
    assert done.returncode == 1
    _, _, end = done.stderr.partition("ndistribute run: rank 1 failed first (exit code 1)")
    assert "[1] KeyError: 'mine'" in end


def test_the_trace_of_a_job_is_merged_and_explained(script, tmp_path, capfd):
    folder = str(tmp_path / "trace")
    assert run("run", "-n", "2", script(""), env={"NDISTRIBUTE_TRACE": folder}).returncode == 0
    assert cli.main(["trace", "merge", folder]) == 0
    (path,) = capfd.readouterr().out.splitlines()
    assert json.loads(Path(path).read_text())["traceEvents"]
    assert cli.main(["trace", "report", folder]) == 0
    assert "2 processes" in capfd.readouterr().out
