"""The example trains under every strategy, to the same result."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import find_mpiexec

ROOT = Path(__file__).parents[1]
STRATEGIES = [
    ("one_device", 1),
    ("mirrored", 2),
    ("mirrored", 3),
    ("central_storage", 2),
]


@functools.cache
def accuracy(strategy: str, replicas: int) -> float:
    return results([sys.executable], strategy, replicas)[1]


def results(launcher: list[str], strategy: str, replicas: int) -> tuple[float, float]:
    """Return the loss and the accuracy that the example prints, once, however it is started."""
    arguments = ["--strategy", strategy, "--replicas", str(replicas), "--epochs", "6"]
    done = subprocess.run(
        [*launcher, "examples/train_digits.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"loss ([0-9.]+), test accuracy ([0-9.]+)", done.stdout)
    assert len(found) == 1, done.stdout
    return float(found[0][0]), float(found[0][1])


@pytest.mark.parametrize(("strategy", "replicas"), STRATEGIES)
def test_digits_train_alike_under_every_strategy(strategy: str, replicas: int) -> None:
    plain = accuracy("none", 1)
    assert plain > 0.9
    # float32 sums in another order may move one of the 360 test images over the border.
    assert accuracy(strategy, replicas) == pytest.approx(plain, abs=1.5 / 360)


def test_two_processes_give_the_result_of_one() -> None:
    plain = results([sys.executable], "none", 1)
    launcher = [sys.executable, "-m", "ndistribute", "run", "-n", "2"]
    assert results(launcher, "multi_worker", 1) == pytest.approx(plain, abs=1.5 / 360)
    alone = results([sys.executable], "multi_worker", 1)
    assert alone == pytest.approx(plain, abs=1.5 / 360)


def test_two_processes_with_two_replicas_each_give_the_result_of_one() -> None:
    launcher = [sys.executable, "-m", "ndistribute", "run", "-n", "2"]
    plain = results([sys.executable], "none", 1)
    assert results(launcher, "multi_worker", 2) == pytest.approx(plain, abs=1.5 / 360)


def test_two_processes_that_mpi_started_give_the_result_of_one() -> None:
    pytest.importorskip("mpi4py")
    mpiexec = find_mpiexec()
    if mpiexec is None:
        pytest.skip("there is no mpiexec")
    plain = results([sys.executable], "none", 1)
    launcher = [mpiexec, "-n", "2", sys.executable]
    assert results(launcher, "multi_worker", 1) == pytest.approx(plain, abs=1.5 / 360)


def test_one_replica_strategies_refuse_more() -> None:
    done = subprocess.run(
        [sys.executable, "examples/train_digits.py", "--strategy", "none", "--replicas", "2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode != 0
    assert "one replica" in done.stderr
