"""The check for leaks that guards every other test, and the processes that tests start."""

import os
import socket
import subprocess
import sys
import tempfile
import threading
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from tests.leaks import Snapshot, leaks_since
from tests.processes import Ranks

_HOLD_SEGMENT = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_CREAT | os.O_RDWR)
os.ftruncate(fd, 64)
held = mmap.mmap(fd, 64)
print("up", flush=True)
sys.stdin.readline()
os.unlink(sys.argv[1])
"""


def test_a_running_thread_is_found_with_its_stack_and_one_that_ends_in_time_is_no_leak():
    before = Snapshot()
    threading.Timer(0.05, lambda: None).start()
    assert leaks_since(before) == []
    done = threading.Event()
    thread = threading.Thread(target=done.wait, args=(30,), name="left-behind", daemon=True)
    thread.start()
    (leak,) = leaks_since(before, 0.05)
    done.set()
    thread.join(40)
    assert leak.startswith("daemon thread 'left-behind'")
    assert "in wait" in leak


def test_a_child_a_listening_port_and_an_open_file_are_found(tmp_path):
    before = Snapshot()
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child,
        socket.create_server(("127.0.0.1", 0)) as server,
        (tmp_path / "log").open("w"),
    ):
        leaks = "\n".join(leaks_since(before, 0.0))
        port = server.getsockname()[1]
    assert f"process {child.pid}: " in leaks
    assert f"listening on port {port}" in leaks
    assert str(tmp_path / "log") in leaks


def test_a_file_that_only_a_cycle_holds_is_no_leak(tmp_path):
    before = Snapshot()
    holder = _Holder(tmp_path / "log")
    assert len(leaks_since(before, 0.0)) == 1
    del holder
    assert leaks_since(before) == []


def test_a_folder_for_temporary_files_is_found_of_a_child_too():
    before = Snapshot()
    make = "import tempfile; tempfile.mkdtemp(prefix='left-')"
    subprocess.run([sys.executable, "-c", make], check=True)
    (leak,) = leaks_since(before, 0.0)
    assert leak.startswith(f"temporary {tempfile.gettempdir()}/left-")
    os.rmdir(leak.removeprefix("temporary "))


@pytest.mark.parametrize("whose", ["ours", "a child's", "a stranger's"])
def test_a_shared_segment_is_found_unless_a_stranger_holds_it(whose):
    path = f"/dev/shm/test-of-leaks-{os.getpid()}"
    command = [sys.executable, "-c", _HOLD_SEGMENT, path]
    if whose == "a stranger's":  # The shell goes away at once, so its child is none of ours.
        command = ["sh", "-c", 'exec 3<&0; "$@" <&3 &', "sh", *command]
    before = Snapshot()
    if whose == "ours":
        segment = shared_memory.SharedMemory(path.removeprefix("/dev/shm/"), create=True, size=64)
        leaks = leaks_since(before, 0.0)
        segment.close()
        segment.unlink()
    else:
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            child.stdout.readline()
            if whose == "a stranger's":
                child.wait(30)
            leaks = leaks_since(before, 0.0)
            child.communicate(b"\n", timeout=30)
    assert (f"shared memory {path}" in leaks) == (whose != "a stranger's")


def test_a_leaking_test_fails_and_the_report_says_why(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import socket\n"
        "kept = []\n"
        "def test_leaky(): kept.append(socket.create_server(('127.0.0.1', 0)))\n"
        "def test_tidy(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", str(tmp_path)]
    changed = {"PYTHONPATH": str(Path(__file__).parents[1]), "LEAK_DEADLINE_SECONDS": "0.2"}
    options = {"env": {**os.environ, **changed}, "capture_output": True, "text": True}
    ran = subprocess.run(command, cwd=tmp_path, check=False, **options)
    assert "2 passed, 1 error" in ran.stdout
    assert "the test left behind:\nopen file" in ran.stdout
    assert "listening on port" in ran.stdout


class _Holder:
    """Holds a file, and itself, so that only the collector of cycles frees it."""

    def __init__(self, path):
        self.fd = os.open(path, os.O_CREAT)
        self.cycle = self

    def __del__(self):
        os.close(self.fd)


def test_a_stranger_with_the_number_of_a_process_that_has_ended_lives_on() -> None:
    """Numbers come back within a run of all tests, and processes were killed by theirs."""
    command = [sys.executable, "-c", "input()"]
    with Ranks(1) as ranks, subprocess.Popen(command, stdin=subprocess.PIPE) as stranger:
        ranks.kill()
        ranks.pids[0] = stranger.pid
        ranks.kill()
        stranger.communicate(b"\n", timeout=30)
    assert stranger.returncode == 0
