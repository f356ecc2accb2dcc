"""The example trains under every strategy, to the same result."""

from __future__ import annotations

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

from tests.processes import find_mpiexec

ROOT = Path(__file__).parents[1]
SCRIPT = "examples/train_digits.py"
STRATEGIES = [
    ("one_device", 1),
    ("mirrored", 3),
    ("central_storage", 2),
    ("parameter_server", 1),
]
# float32 sums in another order may move one of the 360 test images over the border.
NEAR = 1.5 / 360


def arguments(strategy: str, replicas: int) -> list[str]:
    return [SCRIPT, "--strategy", strategy, "--replicas", str(replicas), "--epochs", "6"]


def result_in(output: str) -> tuple[float, float]:
    """Return the loss and the accuracy that the example prints, once, however it is started."""
    found = re.findall(r"loss ([0-9.]+), test accuracy ([0-9.]+)", output)
    assert len(found) == 1, output
    return float(found[0][0]), float(found[0][1])


@functools.cache
def result_here(strategy: str, replicas: int) -> tuple[float, float]:
    """Run the example in this process."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(sys, "argv", arguments(strategy, replicas))
        patch.setattr("tqdm.tqdm.monitor_interval", 0)  # Else it keeps a thread.
        patch.chdir(ROOT)
        runpy.run_path(SCRIPT, run_name="__main__")
    return result_in(out.getvalue())


def result_of(*launcher: str, replicas: int = 1) -> tuple[float, float]:
    """Let a launcher start the example as the workers of a job."""
    done = subprocess.run(
        [*launcher, *arguments("multi_worker", replicas)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return result_in(done.stdout)


@pytest.mark.parametrize(("strategy", "replicas"), STRATEGIES)
def test_digits_train_alike_under_every_strategy(strategy: str, replicas: int) -> None:
    plain = result_here("none", 1)
    assert plain[1] > 0.9
    assert result_here(strategy, replicas) == pytest.approx(plain, abs=NEAR)


def test_two_processes_with_two_replicas_each_give_the_result_of_one() -> None:
    found = result_of(sys.executable, "-m", "ndistribute", "run", "-n", "2", replicas=2)
    assert found == pytest.approx(result_here("none", 1), abs=NEAR)


def test_two_processes_that_mpi_started_give_the_result_of_one() -> None:
    pytest.importorskip("mpi4py")
    mpiexec = find_mpiexec()
    if mpiexec is None:
        pytest.skip("there is no mpiexec")
    found = result_of(mpiexec, "-n", "2", sys.executable)
    assert found == pytest.approx(result_here("none", 1), abs=NEAR)


def test_one_replica_strategies_refuse_more() -> None:
    with pytest.raises(SystemExit, match="one replica"):
        result_here("none", 2)
