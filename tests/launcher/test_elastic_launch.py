"""`ndistribute run --elastic`: real workers that are killed, preempted, removed and added."""

import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndistribute import cli
from ndistribute.launcher.commands import Host
from ndistribute.launcher.elastic_job import places_on, replan
from ndistribute.launcher.job import JobOptions
from ndistribute.launcher.launch import _listen
from tests.jobs.launched import lasting, read_pids, run, started
from tests.processes import HANG_SECONDS

# In most scripts, the second worker 1 connects to the others, which then end.
PREAMBLE = """
from pathlib import Path

def first_life():
    try:
        Path(f"life-{rank}").touch(exist_ok=False)
        return True
    except FileExistsError:
        return False

def release(*ranks):
    for other in ranks:
        connect("worker", other).close()

def refused(job, index, then=lambda: None):
    try:
        with connect(job, index) as waiting:
            then()
            assert not waiting.recv(1)
    except (ConnectionRefusedError, ConnectionResetError):
        pass

def wait_for_release():
    own_socket().accept()[0].close()

def spares():
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            _, option, code, *_ = path.read_bytes().split(b"\\0", 3)
            if option == b"-c" and b"launcher.spare" in code and (
                os.readlink(path.parent / "cwd") == os.getcwd()
            ):
                yield int(path.parent.name)
        except (OSError, ValueError):
            pass

def wait_for_spare():
    deadline = time.monotonic() + 50
    while not (pids := list(spares())):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return pids[0]
"""
NAMED = "print(os.environ['TF_CONFIG'], os.environ['NDISTRIBUTE_SECRET'], *sys.argv[1:])\n"


def lines_of(done, rank):
    return [line for line in done.stdout.splitlines() if line.startswith(f"[{rank}] ")]


def test_a_worker_that_is_killed_starts_again_alone_as_it_was(script, tmp_path):
    path = script(f"""
{NAMED}
own = own_socket()
if rank == 1 and first_life():
    peer = connect("worker", 0)
    peer.recv(1)  # Worker 0 has connected, and this process never accepts it.
    os.kill(os.getpid(), signal.SIGKILL)
elif rank == 1:
    own.setblocking(False)
    try:
        own.accept()
        print("somebody of the first life")
    except BlockingIOError:
        pass
    release(0, 2)
elif rank == 0:
    peer = own.accept()[0]
    refused("worker", 1, lambda: peer.sendall(b"go"))
    print("refused")
if rank != 1:
    own.accept()
""")
    done = run("run", "--elastic", "-n", "3", path, "a b", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (
        done.stderr
        == "ndistribute run: worker 1 ended (signal 9); restarting it in 0 s (restarts left: 4).\n"
    )
    once, twice = lines_of(done, 2), lines_of(done, 1)
    assert len(once) == 1
    assert twice == [once[0].replace("[2]", "[1]").replace('"index": 2', '"index": 1')] * 2
    assert lines_of(done, 0)[1:] == ["[0] refused"]


def test_a_worker_that_hands_over_starts_again_and_that_counts_as_no_failure(script, tmp_path):
    path = script("""
print("here")
if rank == 1 and first_life():
    os.kill(os.getpid(), signal.SIGTERM)
    wait()
release(0, 2) if rank == 1 else wait_for_release()
""")
    done = run("run", "--elastic", "-n", "3", "--max-restarts", "0", path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "worker 1 ended (signal 15); restarting it in 0 s" in done.stderr
    assert [len(lines_of(done, rank)) for rank in range(3)] == [1, 2, 1]


def test_the_others_go_on_without_a_worker_that_fails_too_often(script, tmp_path):
    path = script("""
if rank == 1:
    print("try")
    connect("worker", 0)
    sys.exit(3)
own = own_socket()
others = [own.accept() for _ in range(2)]
refused("worker", 1)
""")
    done = run("run", "--elastic", "-n", "2", "--max-restarts", "1", path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert lines_of(done, 1) == ["[1] try"] * 2
    assert done.stderr.splitlines() == [
        "ndistribute run: worker 1 ended (exit code 3); restarting it in 0 s (restarts left: 0).",
        "ndistribute run: worker 1 ended (exit code 3); the others continue.",
    ]


def test_fewer_workers_than_the_least_end_the_job(script, tmp_path):
    path = script("rank == 1 and sys.exit(3)\nwait()")
    few = ["--min-workers", "2", "--max-restarts", "1"]
    done = run("run", "--elastic", "-n", "2", *few, path, cwd=tmp_path)
    assert done.returncode == 3
    assert "(restarts left: 0)" in done.stderr
    assert "failed and is not restarted (exit code 3); the others were stopped." in done.stderr


def test_what_a_worker_writes_after_the_others_have_ended_is_waited_for(script, tmp_path):
    path = script("""
if rank == 1:
    peer = connect("worker", 0)
    sys.exit(0)
own_socket().accept()[0].recv(1)  # Until worker 1 has ended.
refused("worker", 1)  # The launcher knows it.
print("saved")
""")
    done = run("run", "--elastic", "-n", "2", path, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "[0] saved\n"), done.stderr


DESCRIBE = """
import inspect, pickle, threading, __main__
import ndistribute

class Here:
    pass

def files():
    for path in Path("/proc/self/fd").iterdir():
        try:
            yield str(path.readlink()).split(":")[0]
        except FileNotFoundError:  # That of the folder.
            pass

name = os.environ["NDISTRIBUTE_LISTEN_FD"]
about = {
    "files": sorted(files()),
    "argv": [sys.argv, sys.orig_argv, sys.path, str(sys.flags), sys.executable],
    "main": {n: repr(v).partition(" at 0x")[0] for n, v in vars(__main__).items() if "__" in n},
    "names": sorted(vars(__main__)),
    "environ": {**os.environ, "NDISTRIBUTE_LISTEN_FD": ""},
    "frame": [inspect.currentframe().f_code.co_filename, Here.__module__],
    "pickled": pickle.dumps(Here()).hex(),
    "listener": [os.get_inheritable(int(name)), own_socket().getsockname()],
    "signals": {s.name: repr(signal.getsignal(s)) for s in signal.Signals},
    "threads": [thread.name for thread in threading.enumerate()],
    "process": [os.getcwd(), os.getsid(0) == os.getpid(), sys.stdin.read(), os.nice(0)],
}
print(json.dumps(about, sort_keys=True))
"""


@pytest.mark.parametrize("module", [False, True])
def test_a_spare_is_what_a_new_worker_is_but_for_its_imports(script, tmp_path, module):
    path = script(f"""
early = "ndistribute" in sys.modules
{DESCRIBE}
if first_life():
    Path("spare").write_text(str(wait_for_spare()))
    os.kill(os.getpid(), signal.SIGKILL)
print(early, os.getpid() == int(Path("spare").read_text()))
print("error", file=sys.stderr)
def fail():
    raise ValueError("boo")
fail()
""")
    command = ["-m", "script"] if module else [path.name]
    options = ["--elastic", "-n", "1", "--spares", "1", "--max-restarts", "1", "--verbose"]
    done = run("run", *options, *command, "a", "b c", cwd=tmp_path)
    first, second, was_spare = done.stdout.splitlines()
    assert json.loads(second[4:]) == json.loads(first[4:])
    assert json.loads(first[4:])["argv"][0][1:] == ["a", "b c"]
    assert was_spare == "[0] True True"
    assert done.returncode == 1
    traceback = done.stderr.partition("[0] error\n")[2].splitlines()
    frames = [line for line in traceback if " File " in line and "frozen" not in line]
    assert frames[0].startswith(f'[0]   File "{path}"'), done.stderr
    assert len(frames) == 4  # Twice, as it is repeated at the end.


def wait_for_line(stream, text):
    """Return the first line with a text."""
    while line := stream.readline():
        if text in line:
            return line
    raise EOFError(text)


def test_spares_end_with_the_launcher_and_with_the_job(script, tmp_path, monkeypatch):
    path = script("""
print("pid", wait_for_spare())
wait() if sys.argv[1:] else None
""")
    monkeypatch.chdir(tmp_path)
    options = ["run", "--elastic", "-n", "1", "--spares", "2", path.name]
    with started(*options, "wait") as job:
        pids = read_pids(job, 1)
        job.kill()
        assert lasting(pids) == []
    done = run(*options)
    assert done.returncode == 0, done.stderr
    assert lasting([int(done.stdout.split()[-1])], 0) == []


def test_a_spare_that_ends_by_itself_is_named_and_not_replaced(script, tmp_path, monkeypatch):
    path = script("os.kill(wait_for_spare(), signal.SIGKILL)\nwait()")
    monkeypatch.chdir(tmp_path)
    with started("run", "--elastic", "-n", "1", "--spares", "1", path.name) as job:
        assert "ended unexpectedly (signal 9); spares left: 0." in wait_for_line(
            job.stderr, "spare"
        )
        job.terminate()
        assert job.wait(HANG_SECONDS) == 128 + signal.SIGTERM


def test_workers_follow_the_hosts_file(script, tmp_path, fake_ssh):
    path = script("""
def leave(*_):
    print("hands over")
    sys.exit(143)

signal.signal(signal.SIGTERM, leave)
print("pid", os.getpid())
print("knows", rank, *cluster["worker"])
wait()
""")
    with socket.create_server((socket.gethostname(), 0)) as server:
        port = server.getsockname()[1]
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("localhost\nfar slots=1\n")
    limits = ["--min-workers", "2", "--max-workers", "3", "--port", str(port)]
    with started("run", "--elastic", "--hosts-file", hosts, *limits, path, env=fake_ssh) as job:
        here, far, near = f"{socket.gethostname()}:{port}", f"far:{port}", f"near:{port}"
        knowing = sorted(wait_for_line(job.stdout, "knows") for _ in range(2))
        assert knowing == [f"[{rank}] knows {rank} {here} {far}\n" for rank in range(2)]
        hosts.write_text("localhost\n")
        assert "fewer places than --min-workers 2" in wait_for_line(job.stderr, "hosts.txt")
        hosts.write_text("localhost\nnear slots=7\n")
        assert wait_for_line(job.stderr, "removed").startswith("ndistribute run: worker 1 is")
        wait_for_line(job.stderr, "worker 3 is added")
        # Worker 0 and two new ones are the most.
        knowing = sorted(wait_for_line(job.stdout, "knows") for _ in range(2))
        known = f"{here} {far} {near} near:{port + 1}"
        assert knowing == [f"[{rank}] knows {rank} {known}\n" for rank in (2, 3)]
        assert "1 ended (signal 15); the others continue." in wait_for_line(job.stderr, "ended")
        hosts.write_text("localhost\nfar\n")
        # It comes back at its place.
        assert wait_for_line(job.stdout, "knows") == f"[1] knows 1 {known}\n"
        job.terminate()
        assert job.wait(HANG_SECONDS) == 128 + signal.SIGTERM


def test_a_job_grows_and_shrinks_and_its_workers_know_the_new_addresses(tmp_path):
    path, hosts = tmp_path / "train.py", tmp_path / "hosts.txt"
    path.write_text("""
import numpy as np
import ndistribute as nd

strategy = nd.MultiWorkerMirroredStrategy(elastic=nd.Elastic(min_workers=1, max_workers=3))
data, seen = nd.Dataset.from_tensor_slices(np.ones(12)).repeat().batch(6), []
for batch in strategy.elastic(data):
    strategy.run(lambda x: nd.get_replica_context().all_reduce("sum", x.sum()), args=(batch,))
    if (count := strategy.num_replicas_in_sync) not in seen[-1:]:
        seen.append(count)
        print("workers", count, flush=True)
    if seen[-1] == 1 and 3 in seen:  # The workers may leave one by one.
        break
strategy.close()
""")
    hosts.write_text("localhost slots=2\n")
    limits = ["--min-workers", "1", "--max-workers", "3"]
    with started("run", "--elastic", "--hosts-file", hosts, *limits, path) as job:
        wait_for_line(job.stdout, "[0] workers 2")
        hosts.write_text("localhost slots=3\n")
        wait_for_line(job.stdout, "[0] workers 3")
        hosts.write_text("localhost slots=1\n")
        wait_for_line(job.stdout, "[0] workers 1")
        assert job.wait(HANG_SECONDS) == 0
        assert "Error" not in job.stderr.read()


def test_failures_of_ssh_are_not_those_of_a_worker(script, tmp_path, fake_ssh):
    ssh = tmp_path / "bin" / "ssh"
    away = 'echo x >> "$0.tries"; [ $(wc -l < "$0.tries") -gt 2 ] || exit 255\n'
    ssh.write_text(ssh.read_text().replace("\n", f"\n{away}", 1))
    path = script("sys.exit(3) if first_life() else 0")
    few = ["--hosts", "far", "--max-restarts", "1"]
    done = run("run", "--elastic", *few, path, cwd=tmp_path, env=fake_ssh)
    assert done.returncode == 0, done.stderr
    left = [line.split()[-2:] for line in done.stderr.splitlines()]
    assert left == [["left:", "1)."], ["left:", "1)."], ["left:", "0)."]]


def test_of_the_ports_that_new_workers_need_all_are_taken_or_none():
    with socket.create_server((socket.gethostname(), 0)) as taken, contextlib.ExitStack() as opened:
        port, listeners = taken.getsockname()[1] - 1, {}
        options = JobOptions(("x",), (Host("localhost", 2),), port=port, hosts_file=Path("hosts"))
        for _ in range(2):
            with pytest.raises(OSError, match=f"port {port + 1}"):
                _listen(options, listeners, opened)
            assert listeners == {}
        taken.close()
        _listen(options, listeners, opened)
        assert [each.getsockname()[1] for each in listeners.values()] == [port, port + 1]


HOSTS = st.lists(
    st.builds(Host, st.sampled_from("abc"), st.integers(1, 3)), unique_by=lambda host: host.name
)


@given(st.lists(HOSTS, min_size=1), st.integers(1, 5))
def test_workers_keep_their_places_and_come_back_to_them(changes, most):
    known, present = [], []
    for hosts in changes:
        before = present
        present, new = replan(known, before, hosts, most)
        room = places_on(hosts)
        assert set(present) >= {index for index in before if known[index] in room}
        present += range(len(known), len(known) + len(new))
        known += new
        assert len(set(known)) == len(known)
        places = [known[index] for index in present]
        assert set(places) <= set(room)
        assert len(places) == len(set(places)) == min(most, len(room))


def test_a_dry_run_shows_the_spares(capfd):
    assert cli.main("run --elastic -n 2 --spares 1 --dry-run x.py a".split()) == 0
    *workers, spare = capfd.readouterr().out.splitlines()
    assert [line[:3] for line in workers] == ["[0]", "[1]"]
    assert spare.startswith("[spare] NDISTRIBUTE_BLAS_THREADS=")
    assert spare.endswith(f"{os.getcwd()} -1 x.py a")
    assert f" {sys.executable} -c " in spare
    assert "TF_CONFIG" not in spare
