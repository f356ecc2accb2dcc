"""The benchmarks of faults run from end to end; what they measure is no test's business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_every_fault_is_measured_and_so_is_the_cost_of_the_checks(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *[sys.executable, "-m", "benchmarks.faults", "--quick", "--wires", "shared", "ring"],
            *["--out", str(tmp_path / "f.json")],
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "| shared | killed " in done.stdout
    written = json.loads((tmp_path / "f.json").read_text())
    found = {(row["wire"], row["fault"]): row["errors"] for row in written["detection"]}
    assert found["shared", "raises"] == ["WorkerLostError"]
    assert found["ring", "skips a call"] == ["CollectiveMismatchError"]
    assert found["ring", "late"] == ["CollectiveTimeoutError"]
    assert {row["wire"] for row in written["cost"]} == {"shared", "ring"}


@pytest.mark.timeout(120)
def test_calls_are_counted_and_what_servers_take_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "f.json"
    for command in ("overhead --calls", f"server_limits --quick --out {out}"):
        done = subprocess.run(
            [sys.executable, "-m", *f"benchmarks.{command}".split()],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "| threads " in done.stdout
    rows = {row[""]: row for row in json.loads(out.read_text())["rows"]}
    # Each worker is one more connection of a server, and one more thread there.
    few, more = (rows[f"{n} workers, 2 servers: a server"] for n in (1, 2))
    assert [more[what] - few[what] for what in ("sockets", "threads")] == [1, 1]


def test_what_a_killed_server_loses_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "f.json"
    done = subprocess.run(
        [sys.executable, *"-m benchmarks.server_faults --quick --only servers --out".split(), out],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(out.read_text())["faults"]
    assert row["twice"] == 0
    assert sum(row["lost"]) < row["acknowledged"]
