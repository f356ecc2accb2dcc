"""`ndistribute run --workers W --ps P`: real servers, workers, chiefs that end and are killed."""

import os
import signal
from pathlib import Path

import pytest

from ndistribute.launcher import supervisor
from ndistribute.launcher.commands import Host
from ndistribute.launcher.job import JobOptions
from ndistribute.launcher.launch import launch
from tests.jobs.launched import lasting, read_pids, run, started

# How often the task was started, and words for servers, which end by one or by SIGKILL.
PREAMBLE = """
with open(os.path.join(os.path.dirname(__file__), f"{job}{rank}"), "a+") as file:
    print(os.getpid(), file=file, flush=True)
    file.seek(0)
    life = len(file.readlines())

def serve():
    with own_socket() as server:
        while True:
            peer, _ = server.accept()
            with peer:
                word = peer.recv(8)
                if word == b"die":
                    os.kill(os.getpid(), signal.SIGKILL)
                peer.sendall(f"{life}".encode())
                if word == b"end":
                    return

def tell(index, word):
    while True:
        try:
            with connect("ps", index) as peer:
                peer.sendall(word)
                return peer.recv(8)
        except OSError:
            time.sleep(0.01)  # until it listens
"""


def cluster(workers: int, servers: int, *more: str | Path) -> tuple[str | Path, ...]:
    return ("run", "--workers", str(workers), "--ps", str(servers), *more)


def lives(folder: Path, task: str) -> list[int]:
    """Return the processes that were a task, one after the other."""
    return [int(line) for line in (folder / task).read_text().splitlines()]


def test_every_task_knows_the_cluster_and_the_servers_end_by_themselves(script, tmp_path):
    path = script("""
if job == "ps":
    print("keeps", os.environ["NDISTRIBUTE_SNAPSHOT_DIR"], os.environ["OMP_NUM_THREADS"])
    serve()
elif job == "chief":
    sizes = {name: len(tasks) for name, tasks in cluster.items()}
    assert sizes == {"chief": 1, "worker": 2, "ps": 2}
    print(tell(0, b"end").decode(), tell(1, b"end").decode(), *sys.argv[1:])
else:
    print("NDISTRIBUTE_SNAPSHOT_DIR" in os.environ, os.environ["OMP_NUM_THREADS"])
""")
    options = ("--chief", "--snapshot-dir", tmp_path / "kept", "--log-dir", tmp_path / "logs")
    done = run(*cluster(2, 2, *options, path, "--flag"))
    assert done.returncode == 0, done.stderr
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert sorted(done.stdout.splitlines()) == [
        "[chief] 1 1 --flag",
        f"[ps:0] keeps {tmp_path / 'kept'} 1",
        f"[ps:1] keeps {tmp_path / 'kept'} 1",
        f"[worker:0] False {share}",
        f"[worker:1] False {share}",
    ]
    logs = {path.name for path in (tmp_path / "logs").iterdir()}
    assert logs == {"chief.log", "ps-0.log", "ps-1.log", "worker-0.log", "worker-1.log"}


def test_what_is_killed_comes_back_alone_at_the_same_address(script, tmp_path):
    path = script("""
if job == "ps":
    serve()
elif rank == 0:
    tell(0, b"die") if life == 1 else None
    while tell(0, b"life") != b"2":
        pass
    if life == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    tell(0, b"end")
    tell(1, b"end")
else:
    while tell(0, b"life") != b"2":
        pass
""")
    done = run(*cluster(2, 2, "--max-restarts", "2", path))
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        "ndistribute run: ps:0 ended (signal 9); restarting it in 0 s (restarts left: 1).",
        "ndistribute run: worker:0 ended (signal 9); restarting it in 0 s (restarts left: 0).",
    ]
    counts = {task: len(lives(tmp_path, task)) for task in ("ps0", "ps1", "worker0", "worker1")}
    assert counts == {"ps0": 2, "ps1": 1, "worker0": 2, "worker1": 1}


def test_who_waits_for_a_server_that_ends_is_told_and_served_by_its_next_life(script):
    path = script("""
if job == "ps":
    serve()
else:
    with connect("ps", 0) as first, connect("ps", 0) as second:
        first.sendall(b"die")  # Before it accepts the second.
        try:
            print(second.recv(8))
        except ConnectionResetError:
            print("reset")
    while True:
        try:
            third = connect("ps", 0)
            break
        except ConnectionRefusedError:
            time.sleep(0.01)
    third.sendall(b"end")
    print("life", third.recv(8).decode())
""")
    done = run(*cluster(1, 1, "--max-restarts", "1", path))
    assert (done.returncode, done.stdout) == (0, "[worker:0] reset\n[worker:0] life 2\n"), (
        done.stderr
    )


def test_once_the_restarts_are_used_up_the_job_has_failed(script, tmp_path):
    path = script('if job == "ps":\n    raise KeyError(f"life {life}")\nwait()')
    done = run(*cluster(1, 1, "--max-restarts", "2", path))
    assert done.returncode == 1
    assert "ndistribute run: ps:0 failed first (exit code 1)" in done.stderr
    assert done.stderr.count("[ps:0] KeyError: 'life 3'\n") == 1
    assert lasting(lives(tmp_path, "worker0"), 0) == []


def test_a_restarted_task_leaves_nothing_of_its_former_life(script):
    path = script("""
if job == "worker" and life == 1:
    leave_behind()
    os.kill(os.getpid(), signal.SIGKILL)
if job == "chief":
    wait()
""")
    with started(*cluster(1, 1, "--chief", "--max-restarts", "1", path)) as job:
        assert lasting(read_pids(job, 1)) == []
        assert job.poll() is None


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL, None])
def test_no_task_outlives_the_launcher_or_the_chief(script, signum):
    path = script("print('pid', os.getpid())\nwait()")
    with started(*cluster(1, 1, "--chief", "--max-restarts", "5", path)) as job:
        pids = read_pids(job, 3)
        if signum is None:
            (chief,) = lives(path.parent, "chief0")
            os.kill(chief, signal.SIGKILL)
            assert "chief failed first (signal 9)" in job.stderr.readline()
        else:
            job.send_signal(signum)
        expected = -signum if signum == signal.SIGKILL else 128 + (signum or signal.SIGKILL)
        assert job.wait(50) == expected
        assert lasting(pids) == []


def test_servers_that_do_not_end_are_stopped_once_the_work_is_done(script, tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "_FINISH_SECONDS", 0.3)
    path = script("if job == 'ps':\n    wait()\nprint('done')")
    options = JobOptions((str(path),), (Host("localhost", 2),), servers=1, timeout=20)
    out, err = tmp_path / "out", tmp_path / "err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        assert launch(options, stdout.fileno(), stderr.fileno()) == 0
    assert sorted(out.read_text().splitlines()) == ["[worker:0] done", "[worker:1] done"]
    assert err.read_text() == ""
    assert lasting(lives(tmp_path, "ps0"), 0) == []
