"""Jobs on clusters of Ray and Dask that are really started, each on this machine."""

import contextlib
import importlib.util
import json
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ndistribute.errors import MissingDependencyError
from ndistribute.launcher import dask, ray
from ndistribute.launcher.placed import PlacedTask, run_job
from ndistribute.transport.listener import set_accepting
from tests.jobs.launched import environment, lasting
from tests.processes import python_says

pytestmark = pytest.mark.timeout(240)
MODULES = {"ray": "ray", "dask": "distributed"}
WITHOUT = [name for name, module in MODULES.items() if not importlib.util.find_spec(module)]


class Driver:
    """A program that uses an engine."""

    def __init__(self, engine: str, directory: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.jobs.engine_program", engine, directory],
            env=environment({"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.read()

    def read(self, seconds: float = 120.0) -> str:
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        return self.process.stdout.readline() if ready else ""

    def start(self, work: str, *args: Any, workers: int = 2, **options: Any) -> None:
        job = {"work": work, "options": {"num_workers": workers, "args": args, **options}}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def run(self, work: str, *args: Any, **options: Any) -> dict[str, Any]:
        self.start(work, *map(str, args), **options)
        return json.loads(self.read())


@contextlib.contextmanager
def started(engine: str, directory: Path) -> Iterator[Driver]:
    if engine in WITHOUT:
        pytest.skip(f"{MODULES[engine]} is not installed")
    driver = Driver(engine, directory)
    with driver.process:
        try:
            yield driver
            driver.process.stdin.close()
            driver.process.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(driver.process.pid, signal.SIGKILL)


@pytest.fixture(scope="module", params=MODULES)
def driver(request, tmp_path_factory) -> Iterator[Driver]:
    # Ray's sockets have paths that must be short.
    with started(request.param, tmp_path_factory.mktemp("e")) as driver:
        yield driver


def pids(folder: Path, count: int) -> dict[str, list[int]]:
    """Return the processes of each task, once there are as many tasks."""
    deadline = time.monotonic() + 60.0
    while len(names := sorted(folder.iterdir())) < count or not all(
        path.read_text().endswith("\n") for path in names
    ):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return {path.name: [int(pid) for pid in path.read_text().split()] for path in names}


def have_ended(folder: Path, seconds: float = 20.0) -> bool:
    """Return True if no process of any task is left."""
    return not lasting([pid for task in pids(folder, 1).values() for pid in task], seconds)


def test_a_function_runs_in_each_worker_and_its_results_come_in_order(driver):
    answer = driver.run("total", 1.0, environ={"GREETING": "hello"})
    assert answer["results"] == [[0, 3.0, "hello"], [1, 3.0, "hello"]]
    assert sorted(answer["output"]) == ["[worker:0] I am 0", "[worker:1] I am 1"]


def test_what_a_worker_raises_is_raised_and_ends_the_others(driver, tmp_path):
    answer = driver.run("fail", tmp_path)
    assert answer["error"] == "LookupError"
    assert answer["text"].startswith("no such thing\nIt was raised by worker:1 at ")
    assert "[worker:1] LookupError: no such thing" in answer["output"]
    assert have_ended(tmp_path)


@pytest.mark.parametrize(
    ("environ", "who", "what"),
    [({}, "worker:1 at ", "ended with signal 9"), ({"ENGINE": "1"}, "worker:", "is lost")],
)
def test_a_worker_or_an_engine_that_is_killed_ends_the_job(driver, tmp_path, environ, who, what):
    answer = driver.run("be_killed", tmp_path, environ=environ)
    assert answer["error"] == "WorkerLostError"
    assert answer["text"].startswith(who)
    assert what in answer["text"]
    assert have_ended(tmp_path)


def test_workers_start_again_together(driver, tmp_path):
    answer = driver.run("fail_once", tmp_path, max_restarts=1)
    assert answer["results"] == [2, 2]
    assert have_ended(tmp_path)


def test_a_worker_of_an_elastic_job_starts_again_alone(driver, tmp_path):
    answer = driver.run("be_killed_once", tmp_path, min_workers=1)
    assert answer["results"] == [1, 2]
    assert have_ended(tmp_path)


@pytest.mark.parametrize("most", [0, 1])
def test_a_worker_starts_again_where_it_was_placed(tmp_path, capsys, monkeypatch, most):
    """On an engine that places all tasks here. While the worker does not run, it is refused."""
    monkeypatch.chdir(tmp_path)
    Path("script.py").write_text("""
import json, os, pathlib, socket, sys
task = json.loads(os.environ["TF_CONFIG"])
print(task["cluster"]["worker"])
own = socket.socket(fileno=int(os.environ["NDISTRIBUTE_LISTEN_FD"]))
others = [a.split(":") for a in task["cluster"]["worker"]]
if task["task"]["index"] == 1:
    with socket.create_connection(others[0]) as peer:
        peer.recv(1)
    sys.exit(3)
[own.accept()[0].close() for _ in range(1 + int(sys.argv[1]))]
while True:  # Until it is refused.
    try:
        socket.create_connection(others[1]).close()
    except ConnectionRefusedError:
        break
""")

    @contextlib.contextmanager
    def place(types):
        tasks = [PlacedTask(lambda: "127.0.0.1") for _ in types]
        yield tasks
        for task in tasks:
            task._port.close()

    def call(task, method, *args):
        return getattr(task, method)(*args)

    options = {"min_workers": 1, "max_restarts": most, "args": [most]}
    assert run_job("script.py", 2, 0, options, place, call, pickle.dumps) == [None, None]
    said = capsys.readouterr().out.splitlines()
    addresses = [line.partition(" ")[2] for line in said if line.startswith("[")]
    assert len(addresses) == 2 + most
    assert len(set(addresses)) == 1
    assert "ndistribute run: worker:1 ended (exit code 3); the others continue." in said


@pytest.mark.parametrize(
    ("options", "results"),
    [
        ({"workers": 2}, [2, 1]),
        ({"workers": 1, "chief": True, "environ": {"CHIEF": "1"}}, [1, None]),
    ],
)
def test_beside_servers_a_task_starts_again_alone(driver, tmp_path, options, results):
    answer = driver.run("serve_or_work", tmp_path, num_ps=1, max_restarts=1, **options)
    assert answer["results"] == results
    assert len(pids(tmp_path, 3)["ps-0"]) == 2  # It and its child, once.
    assert have_ended(tmp_path)


def test_an_interrupt_ends_the_job(driver, tmp_path):
    driver.start("sleep", str(tmp_path))
    pids(tmp_path, 2)
    driver.process.send_signal(signal.SIGINT)
    assert json.loads(driver.read())["error"] == "KeyboardInterrupt"
    assert have_ended(tmp_path)


def test_what_the_engine_has_not_is_asked_for_in_vain(driver):
    answer = driver.run("total", resources={"NOTHING": 1}, placement_timeout=1.0)
    assert answer["error"] == "TimeoutError"
    assert "NOTHING" in answer["text"]
    assert "within 1 s" in answer["text"]


def test_nothing_is_left_of_a_job_whose_program_is_killed(tmp_path_factory, tmp_path):
    with started("ray", tmp_path_factory.mktemp("r")) as driver:
        driver.start("sleep", str(tmp_path))
        pids(tmp_path, 2)
        driver.process.kill()
        assert have_ended(tmp_path, 120.0)


def test_a_task_ends_when_its_engine_drops_what_it_has_placed(tmp_path):
    """As Dask does, without a call, when the program that asked for the job is gone."""
    script = tmp_path / "hang.py"
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(300)\n")
    program = tmp_path / "engine.py"
    program.write_text(f"""
import os, select
from ndistribute.launcher.placed import PlacedTask
placed = PlacedTask(lambda: "127.0.0.1")
placed.start([{str(script)!r}], {{}}, 3.0)
while not (said := placed.follow(False)[0]):
    pass
end = os.pidfd_open(int(said))
del placed
print(bool(select.select([end], [], [], 20)[0]))
""")
    assert python_says(program, env=environment()) == "True\n"


def test_the_port_of_a_task_stays_its_own_while_it_does_not_run(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, socket\nfd = int(os.environ['NDISTRIBUTE_LISTEN_FD'])\n")
    placed = PlacedTask(lambda: "127.0.0.1")
    host, port = placed.address().split(":")
    with placed._port:
        for _ in range(2):
            socket.create_connection((host, port)).close()  # It waits for the task.
            placed.start([str(script)], {}, 3.0)
            while placed.follow(False)[1] is None:
                pass
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((host, port))
            with pytest.raises(OSError, match="already in use"):
                socket.create_server((host, int(port)))
            set_accepting(placed._port, True)


@pytest.mark.parametrize("engine", MODULES)
def test_an_engine_that_is_not_installed_is_named_and_a_job_without_workers_refused(engine):
    run = {"ray": ray.run, "dask": dask.run}[engine]
    error, message = ValueError, "at least one worker"
    if engine in WITHOUT:
        error, message = MissingDependencyError, rf"ndistribute\[{engine}\]"
    with pytest.raises(error, match=message):
        run(print, 0)


@pytest.mark.parametrize(
    "options", [{"min_workers": 0}, {"min_workers": 3}, {"min_workers": 1, "num_ps": 1}]
)
def test_an_elastic_job_that_can_not_be_is_refused(options):
    servers = options.pop("num_ps", 0)
    with pytest.raises(ValueError, match="between 1 and num_workers=2, and needs num_ps=0"):
        run_job(print, 2, servers, options, None, None, pickle.dumps)
