"""Other hosts: which there are, what ssh is told, and a job through an `ssh` that stays here."""

import os
import signal
import socket
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndistribute.blas import cores
from ndistribute.launcher import commands, reaper
from ndistribute.launcher.commands import Host, assign, parse_hosts, ssh_command
from tests.jobs.launched import lasting, run, started
from tests.processes import HANG_SECONDS

NAMES = st.text("ab1.-", min_size=1, max_size=9).map("h".__add__)
HOSTS = st.lists(
    st.builds(Host, NAMES, st.integers(1, 9)), min_size=1, max_size=5, unique_by=lambda h: h.name
)


@settings(max_examples=20)
@given(HOSTS)
def test_hosts_are_read_as_they_were_written(hosts):
    assert parse_hosts(",".join(f"{host.name}:{host.slots}" for host in hosts)) == hosts
    for form in ("{}:{}", "{} {}", "{} slots={}", "{}  slots = {}  # a comment"):
        lines = [form.format(host.name, host.slots) for host in hosts]
        assert parse_hosts("\n# a comment\n\n" + "\n".join(lines), "\n") == hosts


@settings(max_examples=20)
@given(HOSTS, st.data())
def test_hosts_are_filled_in_order(hosts, data):
    room = sum(host.slots for host in hosts)
    processes = data.draw(st.integers(1, room))
    used = assign(hosts, processes)
    assert sum(host.slots for host in used) == processes
    assert [host.name for host in used] == [host.name for host in hosts[: len(used)]]
    assert used[:-1] == hosts[: len(used) - 1]
    assert assign(hosts, None) == hosts


def test_malformed_hosts_are_named():
    for text in ("", "a:", "a:0", "a:x", "a,,b", "a b", "-oProxyCommand=x", "a,a:2"):
        with pytest.raises(ValueError, match=r"is not HOST or HOST:PROCESSES|named twice"):
            parse_hosts(text)
    for text in ("", "# nothing\n", "a slots=", "a:2 slots=2", "a slots=2 b"):
        with pytest.raises(ValueError, match=r"hostfile|is not HOST"):
            parse_hosts(text, "\n")
    for processes in (0, -1, 3):
        with pytest.raises(ValueError, match=r"-n"):
            assign([Host("a", 2)], processes)


def test_a_name_alone_takes_one_process_and_this_machine_is_known_by_its_names():
    assert parse_hosts("me@a,[::1]:2") == [Host("me@a", 1), Host("[::1]", 2)]
    for name in ("localhost", "127.0.0.1", "[::1]", socket.gethostname()):
        assert commands.is_this_machine(name)
    assert not commands.is_this_machine("elsewhere.example")


SHOW = """
from pathlib import Path
print(rank, *cluster["worker"], *sys.argv[1:])
secret = os.environ["NDISTRIBUTE_SECRET"].encode()
shown = False
for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
    try:
        shown = shown or secret in cmdline.read_bytes()
    except OSError:
        pass
print(len(secret), shown, os.environ["OMP_NUM_THREADS"], os.getcwd())
print(os.environ["NDISTRIBUTE_JOB_ID"], os.environ.get("MINE"), sys.stdin.read() == "")
"""


def test_a_job_runs_on_other_hosts_in_the_same_folder(script, tmp_path, fake_ssh):
    script(SHOW)
    env = {**fake_ssh, "MINE": "not for others", "NDISTRIBUTE_JOB_ID": "j1"}
    with socket.create_server((socket.gethostname(), 0)) as server:
        port = server.getsockname()[1]
    hosts = ["--hosts", "far.example:2,localhost:1", "--port", str(port)]
    done = run("run", *hosts, "script.py", "it's", env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    addresses = f"far.example:{port} far.example:{port + 1} {socket.gethostname()}:{port}"
    far = max(1, len(os.sched_getaffinity(0)) // 2)  # Its shell knows no quota.
    for rank, threads in ((0, far), (1, far), (2, cores())):
        mine = [line for line in done.stdout.splitlines() if line.startswith(f"[{rank}]")]
        assert mine == [
            f"[{rank}] {rank} {addresses} it's",
            f"[{rank}] 64 False {threads} {tmp_path}",
            f"[{rank}] j1 {'not for others' if rank == 2 else None} True",
        ]
    asked = (tmp_path / "asked").read_text()
    options = "BatchMode=yes ConnectTimeout=60 ServerAliveInterval=15 ServerAliveCountMax=3"
    given = "".join(f"-o {option} " for option in options.split())
    assert asked == f"{given}-- far.example {ssh_command('', 60)[-1]}\n" * 2


def test_an_order_to_end_that_arrives_with_the_script_is_heeded():
    script = commands.remote_script(["/bin/sleep", "1000"], {}, {}, 1).encode()
    command = ["/bin/sh", "-c", ssh_command("far", 60)[-1]]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        os.write(process.stdin.fileno(), script + reaper.ASK)
        try:
            assert process.wait(HANG_SECONDS) == 128 + signal.SIGTERM
        finally:
            process.kill()


def test_a_port_that_is_taken_is_named_before_anything_is_started(tmp_path, fake_ssh):
    with socket.create_server((socket.gethostname(), 0)) as server:
        port = server.getsockname()[1]
        hosts = ["--hosts", "far.example:1,localhost:1", "--port", str(port)]
        done = run("run", *hosts, "show.py", env=fake_ssh)
    assert done.returncode == 2
    assert f"cannot listen at {socket.gethostname()} port {port}" in done.stderr
    assert not (tmp_path / "asked").exists()


def test_a_host_that_ssh_can_not_connect_to_is_named(tmp_path, fake_ssh):
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text("#!/bin/sh\necho 'ssh: connect to host far: No route to host' >&2\nexit 255\n")
    done = run("run", "--hosts", "far:1", "show.py", env=fake_ssh)
    assert done.returncode == 255
    what = (
        "exit code 255: ssh could not connect to far, or far did not answer for 60 s; "
        "check that far and its network are up and `ssh far true` works"
    )
    assert f"rank 0 failed first ({what}); the others were stopped." in done.stderr
    assert "No route to host" in done.stderr


def test_a_launcher_that_stands_still_loses_the_tasks_on_other_hosts(script, fake_ssh):
    """As when its host vanishes or sleeps; a task on its own machine goes on."""
    path = script("print('pid', os.getpid())\nsignal.pause()")
    env = {**fake_ssh, "NDISTRIBUTE_HEARTBEAT_SECONDS": "0.1"}  # The shortest is two seconds.
    with socket.create_server((socket.gethostname(), 0)) as server:
        port = str(server.getsockname()[1])
    with started("run", "--hosts", "far:1,localhost:1", "--port", port, path, env=env) as job:
        lines = [job.stdout.readline().split() for _ in range(2)]
        pids, own = ([int(line[2]) for line in lines if line[0] == f"[{r}]"] for r in range(2))
        job.send_signal(signal.SIGSTOP)
        assert lasting(pids) == []
        assert lasting(own, 0) == own
        job.send_signal(signal.SIGCONT)
        _, said = job.communicate(timeout=50)
    assert "the launcher did not answer for 2 s, so this task of its job was stopped" in said
    assert "rank 0 failed first (signal 15)" in said
    assert lasting(own) == []


def test_tries_to_reach_a_host_cost_no_restart(script, tmp_path, fake_ssh):
    path = script(f"""
away = {str(tmp_path / "away")!r}
if not os.path.exists(away):
    open(away, "w").close()
    sys.exit(3)
""")
    ssh = tmp_path / "bin" / "ssh"
    begin, rest = ssh.read_text().split("\n", 1)
    # The host is away from the end of the first attempt until the second try.
    gone = f'[ -e "{tmp_path}/away" ] && mkdir "{tmp_path}/tried" 2>/dev/null && exit 255'
    ssh.write_text(f"{begin}\n{gone}\n{rest}")
    done = run("run", "--hosts", "far:1", "--max-restarts", "1", path, env=fake_ssh)
    assert done.returncode == 0, done.stderr
    assert "restarting in 0 s, once ssh reaches all hosts (restarts left: 1)." in done.stderr
    assert "ssh far ended (exit code 255: ssh could not connect to far, or" in done.stderr
    assert "restarting it in 0 s (restarts left: 19)." in done.stderr


def test_a_host_that_stays_away_is_waited_for_until_the_timeout(script, tmp_path, fake_ssh):
    path = script(f"open({str(tmp_path / 'away')!r}, 'w').close()\nsys.exit(3)")
    ssh = tmp_path / "bin" / "ssh"
    begin, rest = ssh.read_text().split("\n", 1)
    ssh.write_text(f'{begin}\n[ -e "{tmp_path}/away" ] && exit 255\n{rest}')
    options = ["--max-restarts", "5", "--timeout", "3"]
    done = run("run", "--hosts", "far:1", *options, path, env=fake_ssh)
    assert done.returncode == 124
    assert done.stderr.count("rank 0 failed first (exit code 3)") == 1
    assert done.stderr.count("ssh far ended (exit code 255") >= 2
    assert "stopped after --timeout 3.0 s." in done.stderr
