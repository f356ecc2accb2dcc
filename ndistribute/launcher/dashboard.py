"""A web page about a job, on loopback: which tasks run, wait and restart, and their metrics.

`JobFolder` reads the launcher's journal and logs, and the traces of the processes, so the page also
works after the job has ended. It never writes. The address contains a random token, and a browser's
`Host` must be this machine. So neither other users nor pages of other sites can read the page.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import platform
import re
import secrets
import shlex
import threading
import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any

from ndistribute import trace_report
from ndistribute.launcher.commands import MPIEXEC
from ndistribute.launcher.output import Console, exit_text
from ndistribute.timeline import PROGRESS

JOURNAL = "journal.jsonl"
_CHUNK_BYTES = 4 << 20
_LOG_BYTES = 4096
_TAIL_BYTES = 128 << 10  # The part of each trace that the timeline shows.
_MOST_POINTS = 400
_MOST_EVENTS = 100
_REPORT_BYTES = 64 << 20  # A report on larger traces takes several seconds.
_LONG_WAIT_SECONDS = 1.0
_SHARE_SECONDS = 10.0
_LAST_LOOK_SECONDS = 1.5  # More than between two requests of a page.
_THIS_MACHINE = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?")
# The page runs no code but its own, and loads nothing from elsewhere.
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; img-src data:; "
    "script-src 'unsafe-inline'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

Facts = dict[str, Any]
Span = tuple[float, float, str, str]  # Start since 1970 and duration in ms, name, title.
Points = list[tuple[float, float | None]]  # Seconds since 1970 and a value; None: not finite.


class Follower:
    """Reads the lines that a process adds to its trace."""

    def __init__(self, path: Path) -> None:
        self.path, self._end = path, 0
        self.about: Facts = {}
        self.wait: tuple[float, str] | None = None  # The wait that the process is in.
        self.progress = deque[tuple[float, dict[str, float]]]()  # Of the last seconds.
        self.values: dict[str, Points] = defaultdict(list)
        self.changes: dict[str, float] = {}  # When the members of an elastic job changed.
        self._since, self._steps = 0.0, float("inf")  # When and at which step the rate was known.

    def follow(self) -> None:
        """Read the new lines, or all lines if another process has replaced the file."""
        with self.path.open("rb") as file:
            first = file.readline()
            try:
                head = json.loads(first + b"]}")
            except ValueError:  # The process is writing the line.
                return
            if head["otherData"] != self.about or file.seek(0, os.SEEK_END) < self._end:
                self.about, self._end = head["otherData"], len(first)
            began, _, title = head.get("now", "").strip().partition(" ")
            self.wait = (self._wall(int(began)), title) if began else None
            file.seek(self._end)
            # A line is complete if a comma follows it.
            while (end := (data := file.read(_CHUNK_BYTES)).rfind(b",\n")) >= 0:
                for line in data[:end].split(b",\n"):
                    if b'"ph": "C"' in line or b'"name":"members"' in line:
                        self._take(json.loads(line))
                self._end += end + 2
                file.seek(self._end)

    def _take(self, entry: Mapping[str, Any]) -> None:
        moment, name, values = self._wall(entry["ts"]), entry["name"], entry["args"]
        if entry["ph"] == "X":
            self.changes.setdefault(values["title"], moment + entry["dur"] / 1e6)
        elif name != PROGRESS:
            self._keep(name, moment, values["value"])
        else:
            self.progress.append((moment, values))
            while self.progress[0][0] < moment - _SHARE_SECONDS and len(self.progress) > 2:
                self.progress.popleft()
            steps, seconds = values["steps"] - self._steps, moment - self._since
            if steps > 0 and seconds >= 1:
                self._keep("steps/s", moment, steps / seconds)
            if steps < 0 or (steps > 0 and seconds >= 1):  # Another process begins, or a point.
                self._since, self._steps = moment, values["steps"]

    def _keep(self, name: str, moment: float, value: float | None) -> None:
        points = self.values[name]
        points.append((moment, value))
        if len(points) > _MOST_POINTS:  # Thin out the older points.
            del points[1 : len(points) // 2 : 2]

    def _wall(self, microseconds: float) -> float:
        return (microseconds + float(self.about["wall_minus_clock_us"])) / 1e6


class JobFolder:
    """Reads the folder of a job; remembers only what it has read of each trace."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._followers: dict[tuple[Path, float], Follower] = {}  # By path and job.
        self.lock = threading.Lock()  # To hold during `state` and `timeline`.

    def state(self) -> Facts:
        """Return the data of the page, except the timeline."""
        notes, tasks, traces = self._read()
        events = {(note["text"], note["time"]): note["time"] for note in notes if "text" in note}
        series: dict[str, dict[str, Points]] = defaultdict(lambda: defaultdict(list))
        for name, follower in traces:
            for metric, points in follower.values.items():
                # Fewer points of each of many tasks, with the newest.
                series[metric][name] += points[:: -1 - len(tasks) // 8][::-1]
            newest = {metric: points[-1][1] for metric, points in follower.values.items()}
            window = [follower.progress[end] for end in (0, -1) if follower.progress]
            tasks[name] |= {"wait": follower.wait, "newest": newest, "window": window}
            for text, moment in follower.changes.items():
                if ":" in text:  # Each worker records it.
                    events[text, 0] = min(moment, events.get((text, 0), moment))
        end = next((note for note in notes if "end" in note), None)
        states = {task["state"] for task in tasks.values()}
        return {
            "now": time.time(),
            "job": notes[0]["job"] if notes else str(self._folder),
            "since": notes[0]["time"] if notes else None,
            "end": end,
            "runs": end is None and not {"running", "paused"}.isdisjoint(states),
            "waits": _who_waits(tasks),
            "events": sorted((time, text) for (text, _), time in events.items())[-_MOST_EVENTS:],
            "series": series,
            "tasks": tasks,
        }

    def timeline(self) -> list[tuple[str, list[Span]]]:
        """Return the last spans of each thread of each task."""
        _, tasks, traces = self._read()
        rows: list[tuple[str, list[Span]]] = []
        newest = {name: follower.path for name, follower in traces}
        for name in filter(newest.get, tasks):
            last_bytes = _TAIL_BYTES // (1 + len(tasks) // 8)
            trace = trace_report.read_file(newest[name], last_bytes) or trace_report.Trace(name)
            threads: dict[int, list[Span]] = defaultdict(list)
            for kind, title, start, end, thread in trace.events:
                times = (trace.wall + start) / 1e3, (end - start) / 1e3
                threads[thread].append((*times, kind, title))
            rows += [(name, sorted(spans)) for _, spans in sorted(threads.items())]
        return rows

    def report(self) -> str:
        """Return the trace report of the whole job."""
        _, folder = self._notes()
        if sum(path.stat().st_size for path in folder.glob("trace-*.json")) > _REPORT_BYTES:
            return f"The traces are large. Run: ndistribute trace report {folder}"
        return trace_report.report(folder)

    def _notes(self) -> tuple[list[Facts], Path]:
        """Return the journal's lines, and the folder of the traces."""
        notes: list[Facts] = []
        path = self._folder / JOURNAL
        for line in path.read_bytes().splitlines() if path.exists() else ():
            with contextlib.suppress(ValueError):  # It is being written, or a full disk cut it.
                notes.append(json.loads(line))
        return notes, Path(notes[0]["traces"]) if notes else self._folder

    def _read(self) -> tuple[list[Facts], dict[str, Facts], list[tuple[str, Follower]]]:
        """Return the journal's lines, the tasks, and their traces, the oldest first."""
        notes, folder = self._notes()
        tasks, reapers = _noted(notes)
        traces: list[tuple[str, Follower]] = []
        since = notes[0]["time"] - 1 if notes else 0.0  # File times may be whole seconds.
        for path in sorted(folder.glob("trace-*.json"), key=os.path.getmtime):
            if os.path.getmtime(path) < since:  # It belongs to an earlier job.
                continue
            follower = self._followers.setdefault((path, since), Follower(path))
            follower.follow()
            if not (about := follower.about):
                continue
            name = reapers.get((about["ppid"], about["host"]), _name(about["name"]))
            state = _process(about)
            process = tasks.setdefault(name, _task(about["host"], state))
            process.pop("note", None)
            if state == "paused" and process["state"] == "running":
                process["state"] = state
            traces.append((name, follower))
        for path in sorted(self._folder.glob("*.log"), key=os.path.getmtime):
            task = tasks.get(_name(path.name.partition(".")[0]))
            if task and os.path.getmtime(path) >= since:
                with path.open("rb") as file:
                    file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
                    task["log"] = file.read().decode(errors="replace")
        in_order = sorted(tasks, key=lambda name: [name.rstrip("0123456789"), len(name), name])
        return notes, {name: tasks[name] for name in in_order}, traces


def _noted(notes: Sequence[Facts]) -> tuple[dict[str, Facts], dict[tuple[int, str], str]]:
    """Return the tasks of a journal by name, and the names by the number and host of reapers."""
    tasks: dict[str, Facts] = {}
    reapers: dict[tuple[int, str], str] = {}
    for note in notes:
        if "task" not in note or note["task"].startswith("ssh "):
            continue
        name = _name(note["task"])
        task = tasks.setdefault(name, _task(note.get("host") or notes[0]["host"]))
        if "pid" in note:
            task |= {"starts": task["starts"] + 1, "state": "running"}
            if name != MPIEXEC:  # The ranks that it starts are other tasks.
                reapers[note["pid"], task["host"]] = name
        else:
            task["state"] = task["before"] = exit_text(note["code"]) if note["code"] else "done"
    has_ended = bool(notes) and ("end" in notes[-1] or _process(notes[0]) == "ended")
    for name, task in tasks.items():
        if has_ended and task["state"] == "running":
            task["state"] = "stopped"
        if name == MPIEXEC:
            task["note"] = "It starts the ranks; the launcher learns only of its own end."
        elif task["host"] != platform.node():
            task["note"] = "Its steps and metrics are in its trace, on that host."
    return tasks, reapers


def _name(label: str) -> str:
    """Return the name that the page shows for a task, a process or a log.

    >>> [_name(label) for label in ("0", "rank 0", "rank-0", "worker:0", "ps-1", "chief:0")]
    ['worker 0', 'worker 0', 'worker 0', 'worker 0', 'ps:1', 'chief']
    """
    name = re.sub(r"^(rank|worker)[-: ](?=\d+$)|^(?=\d+$)", "worker ", label)
    return name.replace("ps-", "ps:").replace("chief:0", "chief")


def _task(host: str, state: str = "") -> Facts:
    return {"host": host, "state": state, "starts": 0, "log": ""}


def _process(about: Facts) -> str:
    """Return "running", "paused" (by SIGSTOP) or "ended"; "" if the process is on another host."""
    if about["host"] != platform.node():
        return ""
    try:
        status = Path(f"/proc/{about['pid']}/stat").read_text()
    except OSError:
        return "ended"
    return "paused" if status.rpartition(")")[2].split()[0] in "Tt" else "running"


def _who_waits(tasks: Mapping[str, Facts]) -> str:
    """Return a sentence on tasks that have waited long, and for which ones; "" if none has."""
    now, others, waits = time.time(), [], {}
    for name in filter(re.compile("worker|chief").match, tasks):
        state, (began, title) = tasks[name]["state"], tasks[name].get("wait") or (now, "")
        if state == "running" and began < now - _LONG_WAIT_SECONDS:
            waits[name] = began, title.removeprefix("wait").strip()
        elif state != "done":
            others.append(name if state in ("running", "") else f"{name} ({state})")
    if not waits:
        return ""
    began, call = min(waits.values())
    who = f"{_listed(waits)} {'has' if len(waits) == 1 else 'have'} waited {now - began:.0f} s"
    return f"{who} for {_listed(others) or 'each other'}: {call}"


def _listed(names: Collection[str]) -> str:
    return " and ".join(names) if len(names) < 5 else f"{len(names)} workers"


class PageServer(ThreadingTCPServer):
    """A server on loopback; only who knows its address, with the token, gets an answer."""

    asked = 0.0  # When a page last asked for data.

    def __init__(self, job: JobFolder) -> None:
        self.token, self.job = secrets.token_urlsafe(16), job
        super().__init__(("127.0.0.1", 0), _Handler)
        self.address = f"http://127.0.0.1:{self.server_address[1]}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: the browser has closed the connection."""


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 1.0  # Of a connection without a request: browsers open spare ones.

    def do_GET(self) -> None:
        self.connection.settimeout(30.0)  # The browser may be far away.
        token, _, name = self.path.lstrip("/").partition("/")
        job = self.server.job
        answers = {"state": job.state, "timeline": job.timeline, "report": job.report}
        # Another site could make its name resolve to 127.0.0.1, but cannot change `Host`.
        is_here = _THIS_MACHINE.fullmatch(self.headers.get("Host", ""))
        code, kind = 200, "application/json"
        try:
            if not (hmac.compare_digest(token.encode(), self.server.token.encode()) and is_here):
                code, kind, text = 403, "text/plain", "Use the whole address that was printed."
            elif not name:
                page = Path(__file__).with_suffix(".html")
                kind, text = "text/html; charset=utf-8", page.read_text("utf-8")
            elif name not in answers:
                code, kind, text = 404, "text/plain", "There is no such page."
            else:
                with contextlib.nullcontext() if name == "report" else job.lock:
                    text = json.dumps(answers[name]())
                self.server.asked = time.monotonic()
        except (OSError, ValueError, KeyError) as error:
            code, kind, text = 500, "text/plain", str(error)
        self.send_response(code)
        for header, value in {**_HEADERS, "Content-Type": kind}.items():
            self.send_header(header, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: object) -> None:
        """Print nothing."""


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[PageServer]:
    """Return a context manager in which the page of a folder is served."""
    with PageServer(JobFolder(folder)) as server, ThreadPoolExecutor(1) as thread:
        thread.submit(server.serve_forever, 0.1)
        try:
            yield server
        finally:
            server.shutdown()


@contextlib.contextmanager
def begin(
    command: Sequence[str], folder: Path, environ: dict[str, str], console: Console
) -> Iterator[None]:
    """Return a context manager in which a job of the launcher has a page."""
    traces = os.path.abspath(environ.get("NDISTRIBUTE_TRACE") or folder)
    environ["NDISTRIBUTE_TRACE"] = traces
    with serve(folder) as server:
        console.say(f"dashboard: {server.address} (later: ndistribute dashboard {folder})")
        console.journal = folder / JOURNAL
        host, job = platform.node(), shlex.join(command)
        console.note(job=job, traces=traces, pid=os.getpid(), host=host)
        yield
        if time.monotonic() - server.asked < _LAST_LOOK_SECONDS:  # A page is open.
            threading.Event().wait(_LAST_LOOK_SECONDS)
