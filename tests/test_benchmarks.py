"""The benchmarks run from end to end; what they measure is no test's business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_all_benchmarks_run_and_write_their_results(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.run_all", "--quick", "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name in ("mlp", "overhead", "all_reduce", "input_pipeline", "machine"):
        assert json.loads((tmp_path / f"{name}.json").read_text())
    assert "run of an empty step" in (tmp_path / "comparison.md").read_text()
