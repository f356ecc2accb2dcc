"""Imitated hosts: what each has of its own, and what the network between them does and loses."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.rig import Host, Process, Rig, skip_reason
from tests.processes import HANG_SECONDS, ROOT, wait_until

pytestmark = pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "-")

ECHO = """
import socket, sys
with socket.create_server((sys.argv[1], 5000)) as server:
    print("listens", flush=True)
    peer, _ = server.accept()
    while data := peer.recv(9):
        peer.sendall(data)
"""
# For each line that it reads, it sends a byte, and writes how many came back.
ASK = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as peer:
    for line in sys.stdin:
        peer.sendall(b"x")
        print(len(peer.recv(9)), flush=True)
"""


def python(host: Host, code: str, *words: str) -> Process:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return host.start([sys.executable, "-c", code, *words], **pipes)


def ask(process: Process) -> None:
    process.stdin.write("\n")
    process.stdin.flush()


def talk(one: Host, other: Host) -> Process:
    """Return a process of one host that is connected with another host."""
    assert python(other, ECHO, other.address).stdout.readline() == "listens\n"
    asking = python(one, ASK, other.name)
    ask(asking)
    assert asking.stdout.readline() == "1\n"
    return asking


def answers(process: Process, seconds: float = 0.5) -> bool:
    """Say whether a process writes something in some seconds; most answers take a millisecond."""
    return bool(select.select([process.stdout], [], [], seconds)[0])


def test_a_host_vanishes_unseen_and_comes_back_empty():
    with Rig(2, ssh=False) as rig:
        one, other = rig.hosts
        asking = talk(one, other)
        other.run(["touch", "/tmp/mark"]).check_returncode()
        read = "hostname; cat /proc/sys/kernel/random/boot_id; ls /proc | grep -c '^[0-9]'"
        said = [host.run(["sh", "-c", read]).stdout.split() for host in rig.hosts]
        assert [name for name, _, _ in said] == ["node0", "node1"]
        assert said[0][1] != said[1][1]
        assert int(said[1][2]) < 8  # Its processes are its own, as its files are.
        assert one.run(["ls", "/tmp/mark"]).stdout == ""
        other.vanish()
        ask(asking)
        assert not answers(asking)
        assert asking.poll() is None
        other.boot()
        assert asking.wait(HANG_SECONDS)  # The new system knows no such connection, and says so.
        assert other.run(["ls", "/tmp/mark"]).stdout == ""
        talk(one, other)


def test_nothing_outlives_a_killed_test_process(tmp_path):
    code = """
import os, sys
from tests.hosts.rig import Rig
with Rig(2) as rig:
    rig.hosts[0].start(["sleep", "300"])
    print(*(host.pid for host in rig.hosts), flush=True)
    sys.stdin.read()
"""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], env=environ, **pipes) as tests:
        holders = [Path(f"/proc/{pid}") for pid in tests.stdout.readline().split()]
        assert all(map(Path.exists, holders))
        tests.send_signal(signal.SIGKILL)
    wait_until(lambda: not any(map(Path.exists, holders)))
