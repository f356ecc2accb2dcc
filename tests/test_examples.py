"""The examples train to the same result under every strategy, however they are started."""

import contextlib
import functools
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import find_mpiexec, free_addresses

ROOT = Path(__file__).parents[1]
SCRIPT = "examples/train_digits.py"
SERVERS = ["examples/parameter_server.py", "--epochs", "12"]
LAUNCHER = [sys.executable, "-m", "ndistribute", "run"]
ENVIRON = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
SECONDS = 110.0
# float32 sums in another order may move one of the 360 test images over the border.
NEAR = 1.5 / 360


def arguments(strategy, replicas):
    return [SCRIPT, "--strategy", strategy, "--replicas", str(replicas), "--epochs", "6"]


def numbers_in(output, pattern="test accuracy ([0-9.]+)"):
    """Return what an example prints, once, however it is started."""
    (found,) = re.finditer(pattern, output)
    return tuple(map(float, found.groups()))


@functools.cache
def result_here(strategy, replicas):
    """Run the example in this process; return its loss and accuracy."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(sys, "argv", arguments(strategy, replicas))
        patch.setattr("tqdm.tqdm.monitor_interval", 0)  # Else it keeps a thread.
        patch.chdir(ROOT)
        runpy.run_path(SCRIPT, run_name="__main__")
    return numbers_in(out.getvalue(), "loss ([0-9.]+), test accuracy ([0-9.]+)")


def output_of(*commands):
    """Run commands beside each other to their end, and return what each wrote."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with contextlib.ExitStack() as stack:
        started = []
        for command in commands:
            process = subprocess.Popen(command, cwd=ROOT, env=ENVIRON, **options)
            started.append(stack.enter_context(process))
            stack.callback(process.kill)
        said = [process.communicate(timeout=SECONDS)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(said)
    return said


@pytest.mark.parametrize(
    ("strategy", "replicas"),
    [("one_device", 1), ("mirrored", 3), ("central_storage", 2), ("parameter_server", 1)],
)
def test_digits_train_alike_under_every_strategy(strategy, replicas):
    plain = result_here("none", 1)
    assert plain[1] > 0.9
    assert result_here(strategy, replicas) == pytest.approx(plain, abs=NEAR)


@pytest.mark.parametrize("mpi", [False, True])
def test_two_processes_give_the_result_of_one(mpi):
    launcher = [*LAUNCHER, "-n", "2"]
    if mpi:
        pytest.importorskip("mpi4py")
        mpiexec = find_mpiexec()
        if mpiexec is None:
            pytest.skip("there is no mpiexec")
        launcher = [mpiexec, "-n", "2", sys.executable]
    (said,) = output_of([*launcher, *arguments("multi_worker", 1 if mpi else 2)])
    found = numbers_in(said, "loss ([0-9.]+), test accuracy ([0-9.]+)")
    assert found == pytest.approx(result_here("none", 1), abs=NEAR)


def test_one_replica_strategies_refuse_more():
    with pytest.raises(SystemExit, match="one replica"):
        result_here("none", 2)


@pytest.mark.slow
def test_four_command_lines_train_on_two_servers_and_two_workers():
    cluster = free_addresses({"ps": 2, "worker": 2})
    hosts = [f"--{job}_hosts={','.join(addresses)}" for job, addresses in cluster.items()]
    said = output_of(
        *(
            [sys.executable, *SERVERS, *hosts, f"--job_name={job}", f"--task_index={index}"]
            for job in ("ps", "worker")
            for index in range(2)
        )
    )
    assert numbers_in(said[2]) > (0.9,)


def test_the_launcher_starts_a_chief_that_sends_its_workers_functions():
    (said,) = output_of([*LAUNCHER, *"--workers 2 --ps 1 --chief".split(), *SERVERS])
    assert numbers_in(said) > (0.9,)
