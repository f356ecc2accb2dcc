"""`ndistribute run` on this machine: real processes that print, raise, hang and are killed."""

import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios

import pytest

from tests.jobs.launched import lasting, read_pids, real_mpi, run, started

SHOW_SECRET = "print(os.environ.get('NDISTRIBUTE_SECRET'))"
LOSE_ANOTHER = "if rank == 0:\n    raise WorkerLostError('rank 1 is gone')"
PRINT_FOREVER = """
if rank == 1:
    sys.exit(3)
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
while True:
    os.write(1, b"more" * 500 + b"\\n")
"""


@pytest.mark.parametrize(
    ("options", "text", "code", "out", "err"),
    [
        ("-n 2", "rank == 0 and sys.exit(7)\nwait()", 7, "", "rank 0 failed first (exit code 7)"),
        # All ranks lost each other.
        ("-n 2", LOSE_ANOTHER, 1, "", "rank 0 failed first (exit code 1)"),
        # A rank that never stops printing does not hide that another failed.
        ("-n 3", PRINT_FOREVER, 3, None, "rank 1 failed first (exit code 3)"),
        ("-n 2 --timeout 0.5", "wait()", 124, "", "run: stopped after --timeout 0.5 s.\n"),
        (
            "-n 1 --max-restarts 1",
            "print('try')\nsys.exit(5)",
            5,
            "[0] try\n" * 2,
            "(restarts left: 1)",
        ),
        ("NDISTRIBUTE_SECRET=x -n 1", SHOW_SECRET, 0, "[0] x\n", ""),
        ("NDISTRIBUTE_SECRET_FILE=f -n 1", SHOW_SECRET, 0, "[0] None\n", ""),
        ("-n 1 -m", "print(__name__, sys.argv[1:])", 0, "[0] __main__ ['-x']\n", ""),
        # No ssh is on the path.
        ("PATH=/none --hosts far:1", "", 2, "", "ndistribute: [Errno 2] No such file or directory"),
    ],
)
def test_how_a_job_ends(script, tmp_path, options, text, code, out, err):
    script(text)
    words = options.split()
    env = dict(word.split("=") for word in words if "=" in word)
    words = [word for word in words if "=" not in word]
    name = ["script", "-x"] if "-m" in words else ["script.py"]
    done = run("run", *words, *name, env=env, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert err in done.stderr
    assert out is None or done.stdout == out


def test_every_rank_listens_at_the_address_that_the_others_know(script):
    path = script("""
own = own_socket()
assert own.getsockname() == place("worker", rank), cluster
if rank == 0:
    with connect("worker", 1) as peer:
        peer.sendall(b"hello")
        print("answer", peer.recv(5).decode(), *sys.argv[1:])
else:
    own.settimeout(50)
    peer, _ = own.accept()
    with peer:
        peer.sendall(peer.recv(5)[::-1])
""")
    done = run("run", "-n", "2", path, "--flag", "two words")
    assert (done.returncode, done.stdout) == (0, "[0] answer olleh --flag two words\n"), done.stderr


def test_output_comes_whole_line_by_line_and_live(script):
    path = script("""
for number in range(200):
    sys.stdout.write("a" * 50)
    sys.stdout.write(f" {number}\\n")
print("half", end="")
print("error", file=sys.stderr)
""")
    done = run("run", "-n", "2", path)
    for rank in "01":
        mine = [line for line in done.stdout.splitlines() if line.startswith(f"[{rank}] ")]
        expected = [f"[{rank}] {'a' * 50} {number}" for number in range(200)]
        assert mine == [*expected, f"[{rank}] half"]
    assert sorted(done.stderr.splitlines()) == ["[0] error", "[1] error"]


@pytest.mark.parametrize(
    ("options", "lines", "tracebacks", "again"),
    [("", 1, 2, False), ("", 100, 4, True), ("--verbose", 1, 4, True)],
)
def test_the_first_failure_is_printed_once_or_again_if_it_is_out_of_sight(
    script, options, lines, tracebacks, again
):
    path = script("""
def end(*_):
    print("late\\n" * int(sys.argv[1]), file=sys.stderr)
    sys.exit()

signal.signal(signal.SIGTERM, end)
if rank == 1:
    own = own_socket()
    peers = [own.accept() for _ in range(2)]  # All are here, and would say that they end.
    try:
        {}["lost"]
    except KeyError as error:
        raise ValueError("boo") from error
peer = connect("worker", 1)
wait()
""")
    done = run("run", *options.split(), "-n", "3", path, str(lines))
    assert done.returncode == 1
    _, said, end = done.stderr.partition("ndistribute run: rank 1 failed first (exit code 1)")
    assert said
    assert done.stderr.count("Traceback") == tracebacks
    assert end.endswith("[1] ValueError: boo\n") is again
    assert ("[1] KeyError: 'lost'" in end) is again
    assert ("--verbose" in end) is (not options)


@pytest.mark.parametrize(("options", "tracebacks"), [("", 1), ("--verbose", 4)])
def test_an_error_that_all_ranks_raise_is_printed_once(script, options, tracebacks):
    path = script("""
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if rank == 0:
    own = own_socket()
    peers = [own.accept()[0] for _ in range(2)]  # All are here.
    [peer.sendall(b"go") for peer in peers]
else:
    connect("worker", 0).recv(2)
{}["lost"]
""")
    done = run("run", *options.split(), "-n", "3", path)
    assert done.stderr.count("Traceback") == tracebacks, done.stderr
    assert done.stderr.count("] KeyError: 'lost'") == max(3, tracebacks)


def test_one_that_only_lost_another_is_not_blamed(script):
    """Rank 0 ends first, but tells of rank 1, which then ends by a signal."""
    path = script("""
if rank == 0:
    peer = connect("worker", 1)
    raise WorkerLostError("rank 1 is gone")
own_socket().accept()[0].recv(1)  # until rank 0 has ended: its connection goes with it
os.kill(os.getpid(), signal.SIGKILL)
""")
    done = run("run", "-n", "2", path)
    assert "rank 1 failed first (signal 9)" in done.stderr
    assert done.returncode == 137


def test_what_ignores_sigterm_or_was_stopped_is_killed_after_a_grace(script):
    """By the launcher, and where that is killed itself by the reaper."""
    path = script("""
leave_behind(start_new_session=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("pid", os.getpid())
wait()
""")
    with (
        started("run", "-n", "1", path) as job,
        started("run", "-n", "1", path) as stopped,
        started("run", "-n", "2", path) as killed,
    ):
        pids, asleep, orphans = read_pids(job, 2), read_pids(stopped, 2), read_pids(killed, 4)
        killed.kill()
        os.kill(asleep[1], signal.SIGSTOP)
        for one in (job, stopped, stopped):  # Asked twice, it does not wait for the grace to pass.
            one.terminate()
        assert job.wait(50) == stopped.wait(50) == 128 + signal.SIGTERM
        assert lasting([*pids, *asleep], 0) == []
        assert lasting(orphans) == []


FIRST = "rank 1 failed first (exit code 1)"
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"
WAYS = [
    pytest.param("-n 2", id="here"),
    pytest.param("--hosts far:1,farther:1", id="other hosts"),
    pytest.param("--mpi -n 2", id="mpi", marks=real_mpi),
]


@pytest.mark.parametrize("way", WAYS)
def test_no_rank_outlives_the_launcher(script, fake_ssh, way):
    path = script("print('pid', os.getpid())\nsignal.pause()")
    with started("run", *way.split(), path, env=fake_ssh) as job:
        pids = read_pids(job, 2)
        job.kill()
        job.wait(50)
        assert lasting(pids) == []


@pytest.mark.parametrize(
    ("way", "failing", "code", "said"),
    [
        ("-n 2", "os.kill(os.getpid(), signal.SIGSEGV)", 139, ["(signal 11)"]),
        pytest.param("--mpi -n 2", KILLED, 137, ["(signal 9)"], marks=real_mpi),
        ("--hosts far:1,farther:1", "raise ValueError('boo')", 1, [FIRST, "[1] ValueError: boo\n"]),
    ],
)
def test_a_rank_that_fails_is_reported_and_ends_the_others(
    script, fake_ssh, way, failing, code, said
):
    path = script(f"if rank == 1:\n    {failing}\nsignal.pause()")
    done = run("run", *way.split(), path, env=fake_ssh)
    assert done.returncode == code, done.stderr
    assert all(text in done.stderr for text in ["failed first", *said])


def test_what_a_rank_leaves_behind_ends_with_the_job(script):
    done = run("run", "-n", "1", script("leave_behind()"))
    assert done.returncode == 0
    assert lasting([int(done.stdout.rpartition(" ")[2])], 0) == []


def test_a_failed_job_starts_again_at_its_addresses_with_a_fresh_secret(script, tmp_path):
    path = script(f"""
with open({str(tmp_path / "tries")!r} + str(rank), "a") as tries:
    names = "NDISTRIBUTE_SECRET", "NDISTRIBUTE_JOB_ID", "TF_CONFIG"
    tries.write(" ".join(os.environ[name] for name in names) + "\\n")
print("try")
own = own_socket()
if rank == 0:
    own.setblocking(False)
    try:
        own.accept()
        print("somebody of the last attempt")
    except BlockingIOError:
        own.setblocking(True)
    socket.create_connection(own.getsockname(), timeout=50)
    with open({str(tmp_path / "tries")!r} + "0") as tries:
        sys.exit(len(tries.readlines()) < 3 and 5)
""")
    done = run("run", "-n", "2", "--max-restarts", "3", "--log-dir", tmp_path / "logs", path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("restarting in") == 2
    tries = (tmp_path / "tries0").read_text().splitlines()
    assert [len({line.split(" ", 2)[part] for line in tries}) for part in range(3)] == [3, 1, 1]
    logs = {path.name: path.read_text() for path in (tmp_path / "logs").glob("rank-0*")}
    assert logs == dict.fromkeys(["rank-0.log", "rank-0.1.log", "rank-0.2.log"], "try\n")


def test_a_reader_that_goes_away_ends_the_job(script):
    path = script("print('pid', os.getpid())\nwhile True:\n    print('more')")
    with started("run", "-n", "2", path) as job:
        pids = read_pids(job, 2)
        job.stdout.close()
        assert job.wait(50) == 128 + signal.SIGPIPE
        assert lasting(pids) == []


def test_a_dry_run_starts_nothing_and_shows_no_secret():
    secret = "s3cr3t-of-the-user"
    done = run("run", "-n", "2", "--dry-run", "gone.py", "a b", env={"NDISTRIBUTE_SECRET": secret})
    first, second = done.stdout.splitlines()
    assert first.startswith("[0] ")
    assert first.endswith(f"{sys.executable} gone.py 'a b'")
    assert '"index": 1' in second
    assert secret not in done.stdout
    assert done.returncode == 0


def test_workers_know_the_width_of_the_terminal_beside_their_labels(script):
    path = script("print(os.environ.get('NDISTRIBUTE_COLUMNS'))")
    here, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    words = [sys.executable, "-m", "ndistribute", "run", "-n", "2", path]
    try:
        done = subprocess.run(words, stderr=there, stdout=-1, text=True, timeout=60, check=True)
    finally:
        os.close(here)
        os.close(there)
    assert sorted(done.stdout.splitlines()) == ["[0] 76", "[1] 76"]
