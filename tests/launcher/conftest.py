"""What the tests of the launcher share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def script(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Path]:
    """Return what writes a script, which begins with the PREAMBLE of the test's module."""

    def write(text: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(request.module.PREAMBLE + text)
        return path

    return write
