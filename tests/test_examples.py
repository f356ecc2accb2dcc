"""The example trains under every strategy, to the same result."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STRATEGIES = [
    ("one_device", 1),
    ("mirrored", 2),
    ("mirrored", 3),
    ("central_storage", 2),
]


@functools.cache
def accuracy(strategy: str, replicas: int) -> float:
    done = subprocess.run(
        [
            sys.executable,
            "examples/train_digits.py",
            *("--strategy", strategy, "--replicas", str(replicas), "--epochs", "6"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"test accuracy ([0-9.]+)", done.stdout)
    assert found is not None, done.stdout
    return float(found[1])


@pytest.mark.parametrize(("strategy", "replicas"), STRATEGIES)
def test_digits_train_alike_under_every_strategy(strategy: str, replicas: int) -> None:
    plain = accuracy("none", 1)
    assert plain > 0.9
    # float32 sums in another order may move one of the 360 test images over the border.
    assert accuracy(strategy, replicas) == pytest.approx(plain, abs=1.5 / 360)


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
