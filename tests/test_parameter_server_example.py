"""The example of parameter servers trains in either style, however its processes are started."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.faults.tasks import free_addresses

ROOT = Path(__file__).parents[1]
SCRIPT = "examples/parameter_server.py"
ENVIRON = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
LAUNCHER = f"{sys.executable} -m ndistribute run --workers 2 --ps 1".split()
SECONDS = 110.0
EPOCHS = ("--epochs", "12")


def accuracy_in(output: str) -> float:
    found = re.findall(r"test accuracy ([0-9.]+)", output)
    assert len(found) == 1, output
    return float(found[0])


def test_four_command_lines_train_on_two_servers_and_two_workers() -> None:
    cluster = free_addresses({"ps": 2, "worker": 2})
    hosts = [f"--{job}_hosts={','.join(addresses)}" for job, addresses in cluster.items()]
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                SCRIPT,
                *EPOCHS,
                *hosts,
                "--replicas_to_aggregate=2",
                "--job_name",
                job,
                "--task_index",
                str(index),
            ],
            cwd=ROOT,
            env=ENVIRON,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for job in ("ps", "worker")
        for index in range(2)
    ]
    try:
        said = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0] * 4, "\n".join(said)
    assert accuracy_in(said[2]) > 0.9


def test_the_launcher_starts_a_chief_that_sends_its_workers_functions() -> None:
    done = subprocess.run(
        [*LAUNCHER, "--chief", SCRIPT, *EPOCHS],
        cwd=ROOT,
        env=ENVIRON,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert accuracy_in(done.stdout) > 0.9
