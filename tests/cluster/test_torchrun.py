"""Processes that have torchrun's variables find each other; so do those that torchrun starts."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys

import pytest

from tests.launcher.jobs import environment

SCRIPT = """
import ndistribute as nd
with nd.MultiWorkerMirroredStrategy() as strategy:
    ones = strategy.run(lambda: 1.0)
    found = type(strategy.cluster_resolver).__name__
    print(f"{found} {float(strategy.reduce('SUM', ones))}\\n", end="")  # In one piece.
"""
SAYS = "TorchrunClusterResolver 2.0"


@contextlib.contextmanager
def ranks(port: int, count: int = 2):
    """Start processes as torchrun does; kill those that do not end."""
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env=environment({**shared, "MASTER_PORT": str(port), "RANK": str(rank)}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_processes_with_the_variables_of_torchrun_find_each_other():
    store = socket.create_server(("127.0.0.1", 0))  # torchrun itself listens here.
    with store, ranks(store.getsockname()[1]) as processes:
        outputs = [process.communicate(timeout=50)[0] for process in processes]
    assert [output.strip() for output in outputs] == [SAYS, SAYS]


def test_a_port_that_is_taken_is_an_error_that_names_the_option():
    other = socket.create_server(("127.0.0.1", 0))
    with other, ranks(other.getsockname()[1] - 1, count=1) as (process,):
        output = process.communicate(timeout=50)[0]
    assert process.returncode == 1
    assert "Another program has this port" in output
    assert "torchrun's --master-port" in output


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torchrun is not installed")
def test_a_script_runs_unchanged_under_torchrun(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    job = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script],
        env={**environment(), "TMPDIR": os.fspath(tmp_path)},
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert job.returncode == 0, job.stderr
    assert job.stdout.splitlines() == [SAYS, SAYS]
