"""What the tests of the launcher share."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

# What the scripts of tests begin with: the task of the process, and what several of them do.
PREAMBLE = """
import json, os, select, signal, socket, subprocess, sys, time
config = json.loads(os.environ.get("TF_CONFIG") or "{}")
cluster, task = config.get("cluster"), config.get("task", {})
job, rank = task.get("type"), task.get("index")
if rank is None:
    rank = int(os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or 0)

class WorkerLostError(Exception):
    pass

def wait():
    while True:
        signal.pause()

def own_socket():
    return socket.socket(fileno=int(os.environ["NDISTRIBUTE_LISTEN_FD"]))

def place(job, index):
    host, port = cluster[job][index].split(":")
    return host, int(port)

def connect(job, index):
    return socket.create_connection(place(job, index), timeout=50)

def leave_behind(**options):
    command = [sys.executable, "-S", "-c", "import signal; signal.pause()"]
    print("pid", subprocess.Popen(command, **options).pid)
"""


@pytest.fixture
def script(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Path]:
    """Return what writes a script, which begins with `PREAMBLE` and that of the test's module."""

    def write(text: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(PREAMBLE + getattr(request.module, "PREAMBLE", "") + text)
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
