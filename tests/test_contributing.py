"""What CONTRIBUTING.md shows how to add passes the contract tests, by the row that it shows."""

import os
import re
import subprocess
import sys

import pytest

from tests.test_docs import ROOT

# The row that an example adds, and contract tests which run what it adds.
EXAMPLES = {
    "strategy": ("every-core-2", ["strategies/test_run.py", "strategies/test_reduce.py"]),
    "kind of variable": ("counted-2", ["variables/test_on_write.py", "variables/test_scatter.py"]),
    "backend": ("last-comer-3", ["strategies/test_mismatch.py", "variables/test_on_write.py"]),
}


@pytest.mark.parametrize(("row", "files"), EXAMPLES.values(), ids=EXAMPLES)
def test_an_example_passes_the_contract_tests(row, files):
    paths = [f"tests/{file}" for file in files]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.contributed", "-k", row, *paths]
    environ = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
    environ["PYTEST_DEBUG_TEMPROOT"] = os.environ["PYTEST_DEBUG_TEMPROOT"]
    ran = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=100, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed, ran.stdout
    assert int(passed[1]) > 20
