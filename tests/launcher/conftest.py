"""What the tests of the launcher share."""

from __future__ import annotations

import os
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


@pytest.fixture
def fake_ssh(tmp_path: Path) -> dict[str, str]:
    """Set an ssh that notes its command line and runs the command here, as sshd does."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(
        f'#!/bin/sh\necho "$*" >> "{tmp_path}/asked"\n'
        'while [ "${1#-}" != "$1" ]; do\n'
        "  case $1 in -o) shift;; esac\n  shift\ndone\nshift\n"
        'exec env -i HOME="$HOME" PATH="$PATH" sh -c "$*"\n'
    )
    ssh.chmod(0o755)
    return {"PATH": f"{ssh.parent}{os.pathsep}{os.environ['PATH']}"}
