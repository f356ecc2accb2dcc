"""`ndistribute run --dashboard`: pages of real jobs, read by urllib and by a real browser."""

import contextlib
import http.client
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from ndistribute import timeline
from ndistribute.launcher.dashboard import JobFolder, serve
from tests.jobs.launched import command, environment, run, started
from tests.processes import HANG_SECONDS

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
TRAIN = """
import os, sys
import numpy as np
import ndistribute as nd

limits = nd.Elastic(min_workers=1) if "elastic" in sys.argv else None
strategy = nd.MultiWorkerMirroredStrategy(elastic=limits)
with strategy.scope():
    model = nd.Sequential([nd.layers.Dense(1)])
    model.compile("sgd", "mse")
print("\\x1b[31m<b>pid</b>\\x1b[0m", os.getpid(), flush=True)
model.fit(np.ones((64, 2)), np.ones((64, 1)), 2, epochs=100_000, verbose=0)
"""


def get(address: str, host: str = "", method: str = "GET") -> tuple[int, Any]:
    """Return the status and the content, decoded if it is JSON."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection("127.0.0.1", parts.port, timeout=HANG_SECONDS)
    with contextlib.closing(connection):
        connection.request(method, parts.path, headers={"Host": host} if host else {})
        answer = connection.getresponse()
        text, kind = answer.read().decode(), answer.headers["Content-Type"]
        return answer.status, json.loads(text) if kind == "application/json" else text


def state_when(address: str, condition: Any) -> dict[str, Any]:
    """Return the state as soon as it fulfils a condition."""
    deadline = time.monotonic() + HANG_SECONDS
    while True:
        _, state = get(f"{address}state")
        if condition(state):
            return state
        assert time.monotonic() < deadline, state


@contextlib.contextmanager
def job(tmp_path: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a training with a dashboard; yield it and the address of the page."""
    (tmp_path / "train.py").write_text(TRAIN)
    flags = ["run", "-n", "2", "--dashboard", "--log-dir", tmp_path / "kept", *options]
    elastic = ["elastic"] if "--elastic" in options else []
    with started(*flags, tmp_path / "train.py", *elastic) as launcher:
        said = launcher.stderr.readline()
        assert said.startswith("ndistribute run: dashboard: http://127.0.0.1:"), said
        yield launcher, said.split()[3]


def is_training(state: dict[str, Any]) -> bool:
    newest = [task.get("newest", {}) for task in state["tasks"].values()]
    return len(newest) == 2 and all({"loss", "steps/s"} <= {*each} for each in newest)


@pytest.mark.slow
def test_a_running_job_is_shown_and_what_is_left_of_it_later(tmp_path):
    with job(tmp_path) as (launcher, address):
        state = state_when(address, is_training)
        assert [*state["tasks"]] == ["worker 0", "worker 1"]
        for task in state["tasks"].values():
            assert task["state"] == "running"
            assert "<b>pid</b>" in task["log"]
            (since, before), (until, after) = task["window"]
            assert until > since
            assert after["steps"] > 0
            assert after["compute"] > before.get("compute", 0)
        assert state["runs"]
        assert state["end"] is None
        _, shown = get(f"{address}timeline")
        assert {name for name, _ in shown} >= {"worker 0", "worker 1"}
        assert "compute" in {span[2] for _, spans in shown for span in spans}
        assert "2 processes" in get(f"{address}report")[1]
        launcher.terminate()
        assert launcher.wait(HANG_SECONDS) == 128 + signal.SIGTERM
    with pytest.raises(ConnectionRefusedError):
        get(f"{address}state")
    later = JobFolder(tmp_path / "kept").state()
    assert not later["runs"]
    assert later["end"]["code"] == 128 + signal.SIGTERM
    assert "stopped by signal 15." in [text for _, text in later["events"]]
    assert set(later["series"]) == {"steps/s", "loss"}


@pytest.mark.slow
def test_a_paused_worker_is_the_one_that_the_others_wait_for(tmp_path):
    with job(tmp_path) as (_, address):
        state = state_when(address, is_training)
        words = state["tasks"]["worker 1"]["log"].split()
        pid = int(words[1 + next(i for i, word in enumerate(words) if "<b>pid</b>" in word)])
        os.kill(pid, signal.SIGSTOP)
        state = state_when(address, lambda state: state["waits"])
        assert state["tasks"]["worker 1"]["state"] == "paused"
        assert state["waits"].startswith("worker 0 has waited "), state["waits"]
        assert " s for worker 1 (paused): " in state["waits"]
        os.kill(pid, signal.SIGCONT)
        state = state_when(address, lambda state: not state["waits"])
        assert state["tasks"]["worker 1"]["state"] == "running"


def test_the_page_of_a_folder_ends_with_ctrl_c(tmp_path):
    with subprocess.Popen(
        command("dashboard", tmp_path), env=environment(), stdout=subprocess.PIPE, text=True
    ) as server:
        address = server.stdout.readline().strip()
        assert get(f"{address}state")[1]["tasks"] == {}
        server.send_signal(signal.SIGINT)
        assert server.wait(HANG_SECONDS) == 0
    assert "is not a directory" in run("dashboard", tmp_path / "none").stderr


@pytest.mark.parametrize(
    ("path", "host", "method", "status"),
    [
        ("TOKEN/", "", "GET", 200),
        ("TOKEN/", "localhost:8000", "GET", 200),  # As through a tunnel of ssh.
        ("TOKEN/state", "", "GET", 200),
        ("TOKEN/other", "", "GET", 404),
        ("TOKEN/state", "", "POST", 501),
        ("", "", "GET", 403),
        ("state", "", "GET", 403),
        ("wrong/state", "", "GET", 403),
        ("TOKEN/state", "attacker.example", "GET", 403),
        ("TOKEN/state", "127.0.0.1.attacker.example:80", "GET", 403),
        ("TOKEN/state", "[broken", "GET", 403),
    ],
)
def test_only_who_has_the_token_and_asks_this_machine_gets_an_answer(
    tmp_path, path, host, method, status
):
    with serve(tmp_path) as server:
        root, _, token = server.address.strip("/").rpartition("/")
        assert get(f"{root}/{path.replace('TOKEN', token)}", host, method)[0] == status


def test_a_connection_without_a_request_does_not_hold_up_the_end(tmp_path):
    with serve(tmp_path) as server:
        idle = socket.create_connection(server.server_address, HANG_SECONDS)
        assert get(f"{server.address}state")[0] == 200
    with idle:  # The fixture of all tests finds threads that are left.
        assert idle.recv(1) == b""


def test_who_waits_for_whom_is_known_before_the_wait_ends(tmp_path):
    names = [f"rank {rank}" for rank in range(3)]
    with contextlib.ExitStack() as opened:
        for rank, name in enumerate(names):
            recorder = opened.enter_context(contextlib.closing(timeline.Recorder(tmp_path)))
            recorder.identify(name, names)
            recorder.add("compute", "", 0, 1)
            recorder.flush()
            if rank != 1:
                recorder.wait('wait "all_reduce" #1', time.monotonic_ns() - 5 * 10**9)
        job = JobFolder(tmp_path)
        assert job.state()["waits"].startswith(
            "worker 0 and worker 2 have waited 5 s for worker 1: 'all_reduce' #1"
        )
        recorder.wait(None)
        assert job.state()["waits"].startswith(
            "worker 0 has waited 5 s for worker 1 and worker 2: "
        )


def test_a_trace_is_followed_while_it_grows_and_after_its_process_starts_again(tmp_path):
    job, later = JobFolder(tmp_path), 0
    for steps in (3, 2):
        with contextlib.closing(timeline.Recorder(tmp_path)) as recorder:
            recorder.identify("worker:0", ["worker:0"])
            for step in range(steps):
                later += 2 * 10**9  # Two seconds a step.
                recorder.add("compute", "", later - 10**9, later)
                recorder.count("loss", float("nan") if step else 0.5)
                recorder.flush(last=True)
                (task,) = job.state()["tasks"].values()
                assert task["window"][1][1]["steps"] == step + 1
    assert [value for _, value in job.state()["series"]["loss"]["worker 0"]][:4] == [
        *(0.5, None, None, 0.5),
    ]


def test_a_long_job_keeps_few_points_which_become_rarer_with_age(tmp_path):
    with contextlib.closing(timeline.Recorder(tmp_path)) as recorder:
        for step in range(5000):
            recorder.count("loss", step)
        recorder.flush()
    (points,) = JobFolder(tmp_path).state()["series"]["loss"].values()
    values = [value for _, value in points]
    assert len(values) <= 400
    assert (values[0], values[-1]) == (0, 4999)
    assert values == sorted(values)
    assert values[-1] - values[-100] < values[100] - values[0]


def test_the_next_job_in_a_folder_shows_nothing_of_the_last(tmp_path):
    here, job = socket.gethostname(), JobFolder(tmp_path)
    for number, began in enumerate((time.time() - 60, time.time())):
        about = {"job": "train.py", "traces": str(tmp_path), "pid": os.getpid(), "host": here}
        notes = {"time": began, **about}, {"time": began, "task": "0", "pid": 1}
        (tmp_path / "journal.jsonl").write_text("".join(f"{json.dumps(n)}\n" for n in notes))
        for each in (job, JobFolder(tmp_path)):
            assert each.state()["series"] == {}
            assert not any(task["log"] for task in each.state()["tasks"].values())
        with contextlib.closing(timeline.Recorder(tmp_path)) as recorder:
            recorder.identify("rank 0", ["rank 0"])
            recorder.count("loss", number)
        for each in (job, JobFolder(tmp_path)):
            ((_, value),) = each.state()["series"]["loss"]["worker 0"]
            assert value == number
        (tmp_path / "rank-0.log").write_text(f"job {number}")
        for each in (job, JobFolder(tmp_path)):
            assert each.state()["tasks"]["worker 0"]["log"] == f"job {number}"
        for name in ("trace-0.json", "rank-0.log"):
            os.utime(tmp_path / name, (began, began))


def test_a_page_of_many_workers_stays_small(tmp_path):
    names = [f"rank {rank}" for rank in range(64)]
    for name in names:
        with contextlib.closing(timeline.Recorder(tmp_path)) as recorder:
            recorder.identify(name, names)
            for step in range(400):
                recorder.count("loss", step)
                recorder.add("compute", "", step, step + 1)
                recorder.flush()
            if name != "rank 1":
                recorder.wait("wait all_reduce #1", 1)
    job = JobFolder(tmp_path)
    state = job.state()
    assert [*state["tasks"]] == [f"worker {rank}" for rank in range(64)]
    assert {len(points) for points in state["series"]["loss"].values()} == {45}
    assert {points[-1][1] for points in state["series"]["loss"].values()} == {399}
    assert "63 workers have waited" in state["waits"]
    rows = job.timeline()
    assert len(rows) == 64
    assert all(len(spans) < 400 for _, spans in rows)


def test_a_log_is_shown_from_any_byte_on(tmp_path):
    (tmp_path / "rank-0.log").write_bytes(b"first\n" + b"\xff\xe4<b>" * 2_000_000)  # One line.
    (tmp_path / "rank-0.1.log").write_bytes(b"")
    os.utime(tmp_path / "rank-0.1.log", (0, 0))
    about = {"job": "train.py", "traces": str(tmp_path), "pid": os.getpid(), "host": "there"}
    notes = about, {"task": "0", "pid": 1, "host": "there"}
    lines = [json.dumps({"time": time.time(), **note}) + "\n" for note in notes]
    (tmp_path / "journal.jsonl").write_text("".join(lines))
    log = JobFolder(tmp_path).state()["tasks"]["worker 0"]["log"]
    assert 4000 < len(log) <= 4096
    assert log.endswith("\ufffd\ufffd<b>")


def test_what_the_page_does_not_know_of_other_hosts_and_of_mpi_is_said(tmp_path):
    here = socket.gethostname()
    about = {"job": "train.py", "traces": str(tmp_path), "pid": os.getpid(), "host": here}
    started_at = [("0", ""), ("1", "alice"), ("mpiexec", ""), ("ssh alice", "alice")]
    notes = [about, *({"task": task, "pid": 1, "host": host} for task, host in started_at)]
    notes += [{"task": "1", "code": 255}, {"text": "restarting it"}]
    lines = "".join(json.dumps({"time": time.time(), **note}) + "\n" for note in notes)
    (tmp_path / "journal.jsonl").write_text(f'{lines}{{"time": 1')  # The last one is being written.
    state = JobFolder(tmp_path).state()
    tasks = state["tasks"]
    assert set(tasks) == {"worker 0", "worker 1", "mpiexec"}
    assert [tasks[f"worker {k}"]["state"] for k in range(2)] == ["running", "exit code 255"]
    assert "on that host" in tasks["worker 1"]["note"]
    assert "note" not in tasks["worker 0"]
    assert "ranks" in tasks["mpiexec"]["note"]
    assert state["events"][0][1] == "restarting it"


def test_a_job_without_a_dashboard_pays_nothing(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os; print('NDISTRIBUTE_TRACE' in os.environ)")
    done = run("run", "-n", "1", script, cwd=tmp_path)
    assert done.stdout == "[0] False\n"
    assert list(tmp_path.iterdir()) == [script]
    modules = "{'ndistribute.launcher.dashboard', 'http.server'} & set(sys.modules)"
    code = f"import sys, ndistribute.cli; sys.exit(len({modules}))"
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True)


class Browser:
    """Chromium, driven through its pipe: messages of JSON that end in a zero byte."""

    def __init__(self, profile: Path) -> None:
        (theirs, self._to), (self._from, answers) = os.pipe(), os.pipe()
        flags = f"--headless --no-sandbox --disable-gpu --user-data-dir={profile}"
        # Chromium reads from 3 and writes to 4, which may be in use here.
        script = f"""
import fcntl, os, sys
pipes = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in ({theirs}, {answers})]
for fd, pipe in zip((3, 4), pipes):
    os.dup2(pipe, fd)
os.execv(sys.argv[1], sys.argv[1:])
"""
        self._process = subprocess.Popen(
            [sys.executable, "-c", script, BROWSER, *flags.split(), "--remote-debugging-pipe"],
            pass_fds=(theirs, answers),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(answers)
        self._number, self._rest, self._session = 0, b"", {}

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                data = os.read(self._from, 1 << 16)
                assert data, "the browser has ended"
                self._rest += data
            text, _, self._rest = self._rest.partition(b"\0")
            if (answer := json.loads(text)).get("id") == self._number:
                return answer["result"]

    def open(self, address: str) -> None:
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session = {"sessionId": session}
        self.ask("Page.navigate", url=address)

    def until(self, condition: str) -> None:
        """Return when a condition holds in the page, which looks at each of its changes."""
        script = f"""new Promise((done, fail) => {{
            const look = () => document.body && ({condition}) && done(true);
            new MutationObserver(look).observe(document, {{subtree: true, childList: true}});
            setTimeout(() => done(document.body.innerText), {HANG_SECONDS * 500});
            look();
        }})"""
        answer = self.ask(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert answer["result"]["value"] is True, answer

    def close(self) -> None:
        os.close(self._to)  # It ends then.
        os.close(self._from)
        self._process.wait(HANG_SECONDS)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_a_browser_shows_a_killed_worker_within_two_seconds(tmp_path):
    text = "document.body.innerText"
    with (
        job(tmp_path, "--elastic") as (launcher, address),
        contextlib.closing(Browser(tmp_path / "profile")) as browser,
    ):
        browser.open(address)
        browser.until(f"{text}.match(/running/g)?.length === 3 && /loss/.test({text})")
        seconds = [math.inf]
        for left in (4, 3, 2):  # A machine that is busy for a moment is asked again.
            state = state_when(address, is_training)
            os.kill(int(state["tasks"]["worker 1"]["log"].split()[-1]), signal.SIGKILL)
            began = time.monotonic()
            said = rf"worker 1 ended .signal 9.; restarting it in [0-9.]+ s .restarts left: {left}"
            browser.until(f"/{said}/.test({text})")
            seconds.append(time.monotonic() - began)
            browser.until(f"/membership {11 - 2 * left}: worker:1 joined/i.test({text})")
            if seconds[-1] < 2:
                break
        assert min(seconds) < 2, seconds
        browser.until("document.querySelectorAll('#timeline rect').length > 10")
        log = "document.querySelector('#logs').textContent"  # Without the codes of colours.
        browser.until(f"{log}.includes('<b>pid</b>') && !{log}.includes('[31m')")
        browser.until("document.querySelector('#logs b') === null")  # It was not taken as HTML.
        with contextlib.closing(Browser(tmp_path / "other")) as other:
            other.open(address)
            other.until(f"{text}.match(/running/g)?.length === 3")
            launcher.terminate()
            for each in (browser, other):
                each.until(f"{text}.includes('ended with exit code 143')")


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_curves_of_large_ranges_are_logarithmic_and_those_without_a_number_say_so(tmp_path):
    with contextlib.closing(timeline.Recorder(tmp_path)) as recorder:
        for loss in (42.0, 0.5, 0.01):
            recorder.count("loss", loss)
            recorder.count("norm", math.nan)
            recorder.count("accuracy", 0.5)  # The same value each time is drawn, too.
    with serve(tmp_path) as server, contextlib.closing(Browser(tmp_path / "profile")) as browser:
        browser.open(server.address)
        browser.until("document.querySelectorAll('polyline').length === 2")
        charts = "document.querySelector('#charts').innerText"
        browser.until(rf"/loss, logarithmic\s+42\s+0.01\s/.test({charts})")
        browser.until(
            rf"/norm\s+not finite/.test({charts}) && !/NaN/.test(document.body.innerHTML)"
        )
