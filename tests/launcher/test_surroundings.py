"""A launcher in bad surroundings: nobody reads, the disk is full, limits are low, a port is wanted.

And jobs that are started by nohup, and servers that take long over their last snapshot.
"""

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from tests.jobs.launched import SECONDS, command, environment, lasting, read_pids, run, started

PREAMBLE = """
folder = os.path.dirname(os.path.abspath(__file__))

def await_end_of(name):
    with open(wait_for_file(name)) as file:
        try:
            select.select([os.pidfd_open(int(file.read()))], [], [], 20)
        except ProcessLookupError:
            pass

def wait_for_file(name):
    path = os.path.join(folder, name)
    while not os.path.exists(path):
        signal.sigtimedwait([signal.SIGUSR2], 0.01)
    return path

def write(name, text):
    with open(os.path.join(folder, name + "~"), "w") as file:
        file.write(text)
    os.rename(file.name, os.path.join(folder, name))

def say_pid(name, pid=os.getpid()):
    write(name, str(pid))
    print("pid", os.getpid())

"""


@pytest.mark.parametrize("closed", ["< /dev/null > /dev/null 2>&1", "<&- >&- 2>&-"])
def test_a_job_in_the_background_ignores_what_it_was_told_to_ignore(script, tmp_path, closed):
    """As under nohup and after `&` in sh."""
    path = script("""
own = own_socket()
ignored = [signal.getsignal(s) == signal.SIG_IGN for s in (signal.SIGHUP, signal.SIGINT)]
write("ready", " ".join(map(str, (*own.getsockname(), *ignored))))
with own.accept()[0] as peer:
    print(peer.recv(5).decode())
""")
    line = f'trap "" HUP INT; exec "$@" {closed}'
    arguments = ("run", "-n", "1", "--log-dir", tmp_path / "logs", path)
    with subprocess.Popen(
        ["/bin/sh", "-c", line, "sh", *command(*arguments)], env=environment()
    ) as job:
        deadline = time.monotonic() + SECONDS
        while not (tmp_path / "ready").exists():
            assert job.poll() is None
            assert time.monotonic() < deadline
            threading.Event().wait(0.01)
        host, port, *ignored = (tmp_path / "ready").read_text().split()
        assert ignored == ["True", "True"]
        job.send_signal(signal.SIGHUP)
        job.send_signal(signal.SIGINT)
        with socket.create_connection((host, int(port)), timeout=50) as peer:
            peer.sendall(b"hello")
        assert job.wait(SECONDS) == 0
    assert (tmp_path / "logs" / "rank-0.log").read_text() == "hello\n"


def test_output_that_nobody_reads_holds_nothing_up(script, tmp_path):
    """A rank that fails is noticed, and its log is whole, while the console stands still."""
    size = 20 << 20
    path = script(f"""
for _ in range({size >> 10}):
    os.write(1, b"x" * 1023 + b"\\n")
sys.exit(5)
""")
    with started("run", "-n", "1", "--log-dir", tmp_path / "logs", path) as job:
        assert "rank 0 failed first (exit code 5)" in job.stderr.readline()
        assert (tmp_path / "logs" / "rank-0.log").stat().st_size == size
        lines = job.stdout.read().splitlines()
        assert job.wait(SECONDS) == 5
    told = [int(line.split()[2]) for line in lines if line.startswith("ndistribute run: ")]
    assert sum(told) == ((size >> 10) - len(lines) + len(told)) * (1024 + len("[0] "))
    assert told


def test_nobody_can_take_the_port_of_a_task_that_has_ended(script):
    path = script("""
if rank == 0:
    say_pid("zero")
    sys.exit()
await_end_of("zero")
with socket.socket() as thief:
    thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        thief.bind(place("worker", 0))
        thief.listen()
        print("taken")
    except OSError as error:
        print(error.strerror)
""")
    done = run("run", "-n", "2", path)
    assert "[1] Address already in use\n" in done.stdout, done.stdout + done.stderr


def test_a_signal_ends_a_job_that_waits_to_start_again(script):
    with started("run", "-n", "1", "--max-restarts", "9", script("sys.exit(3)")) as job:
        while "restarting in 1 s" not in job.stderr.readline():
            assert job.poll() is None
        job.terminate()
        assert job.wait(SECONDS) == 128 + signal.SIGTERM


# A worker that SIGTERM does not end, and a server whose last snapshot takes until it is killed.
SLOW_SERVER = """
if job == "worker":
    if rank == 1:
        wait_for_file("ps")
        wait_for_file("stubborn")
        sys.exit(7) if "fail" in sys.argv else signal.pause()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say_pid("stubborn")
    wait()

def save(*_):
    await_end_of("stubborn")
    signal.sigtimedwait([signal.SIGUSR2], 0.3)  # A disk that is slow.
    write("snapshot", "whole")
    os._exit(143)

signal.signal(signal.SIGTERM, save)
say_pid("ps")
wait()
"""


@pytest.mark.parametrize(("end", "code"), [("fail", 7), ("kill", -signal.SIGKILL)])
def test_a_last_snapshot_is_waited_for(script, tmp_path, end, code):
    """When a task fails, and when the launcher itself is gone."""
    options = ("--workers", "2", "--ps", "1", "--snapshot-dir", tmp_path / "kept")
    with started("run", *options, script(SLOW_SERVER), end) as job:
        pids = read_pids(job, 2)
        if end == "kill":
            job.kill()
        assert job.wait(SECONDS) == code
        assert lasting(pids) == []
        assert (tmp_path / "snapshot").read_text() == "whole"
        assert ("for the last snapshot of ps:0" in job.stderr.read()) == (end == "fail")


def test_a_last_snapshot_is_not_waited_for_without_end(script, tmp_path):
    path = script("""
if job == "ps":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say_pid("ps")
    wait()
wait_for_file("ps")
sys.exit(7)
""")
    options = ("--workers", "1", "--ps", "1", "--snapshot-dir", tmp_path / "kept")
    done = run("run", *options, path, env={"NDISTRIBUTE_SNAPSHOT_WAIT_SECONDS": "3.5"})
    assert done.returncode == 7
    assert "waiting at most 3.5 s for the last snapshot of ps:0" in done.stderr
    assert lasting([int((tmp_path / "ps").read_text())], 0) == []
    wrong = run("run", *options, path, env={"NDISTRIBUTE_SNAPSHOT_WAIT_SECONDS": "long"})
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "NDISTRIBUTE_SNAPSHOT_WAIT_SECONDS" in wrong.stderr


@pytest.mark.parametrize(("kept", "code"), [(True, 3), (False, 0)])
def test_a_last_snapshot_that_failed_gives_the_exit_code(script, tmp_path, kept, code):
    path = script("""
if job == "ps":
    await_end_of("over")
    print("OSError: the disk is full", file=sys.stderr)
    sys.exit(3)
say_pid("over", os.getppid())  # Of which the launcher knows.
""")
    keep = ("--snapshot-dir", tmp_path / "kept") if kept else ()
    done = run("run", "--workers", "1", "--ps", "1", *keep, path)
    assert done.returncode == code, done.stderr
    message = "ps:0 ended without a last snapshot (exit code 3)."
    assert (message in done.stderr) is kept


@pytest.mark.parametrize("name", ["RLIMIT_NOFILE", "RLIMIT_AS", "RLIMIT_NPROC"])
def test_a_limit_that_is_too_low_is_named_and_nothing_is_started(tmp_path, name):
    path = tmp_path / "script.py"
    path.write_text(f"open({str(tmp_path / 'started')!r}, 'w')")
    value = {"RLIMIT_NOFILE": 30, "RLIMIT_NPROC": 4}.get(name, 0)
    if name == "RLIMIT_AS":  # A little more than what the command has mapped before it starts.
        text = "import ndistribute.cli; print(open('/proc/self/status').read())"
        status = subprocess.check_output([sys.executable, "-c", text], env=environment(), text=True)
        value = (int(status.partition("VmPeak:")[2].split()[0]) << 10) + (16 << 20)
    limit = getattr(resource, name)
    other_user: list[str] = []
    if name == "RLIMIT_NPROC" and os.getuid() == 0:  # Whose threads have no limit.
        if shutil.which("setpriv") is None:
            pytest.skip("root cannot become another user here: there is no setpriv")
        keeps = ("--inh-caps=+dac_override", "--ambient-caps=+dac_override")
        other_user = ["setpriv", "--reuid=65534", *keeps]
    done = subprocess.run(
        [*other_user, *command("run", "-n", "8", path)],
        env=environment({"OPENBLAS_NUM_THREADS": "1"}),
        cwd="/",
        preexec_fn=lambda: resource.setrlimit(limit, (value, value)),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"ndistribute: the limit {name} is {value} ")
    assert "of 8 processes needs " in done.stderr
    assert not (tmp_path / "started").exists()
