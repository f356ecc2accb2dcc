"""A web page about a job, on loopback: which tasks run, wait and restart, and their metrics.

`JobFolder` reads files that a job writes anyway: the launcher's journal and logs, and the traces of
the processes. So the page also works after the job has ended. It never writes. The address contains
a random token, and a browser's `Host` must be this machine. So neither other users nor pages of
other sites can read the page.
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
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any
from urllib.parse import urlsplit

from ndistribute import trace_report
from ndistribute.launcher.commands import MPIEXEC
from ndistribute.launcher.output import Console, exit_text
from ndistribute.timeline import PROGRESS

JOURNAL = "journal.jsonl"
_CHUNK_BYTES = 4 << 20
_LOG_BYTES = 4096
_TAIL_BYTES = 128 << 10  # The part of each trace that the timeline shows.
_MOST_SPANS = 500
_MOST_POINTS = 400
_MOST_EVENTS = 100
_REPORT_BYTES = 64 << 20  # A report on larger traces takes several seconds.
_LONG_WAIT_SECONDS = 1.0
_SHARE_SECONDS = 10.0
_LAST_LOOK_SECONDS = 2.0
# The page runs no code but its own, and loads nothing from elsewhere.
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; img-src data:; "
    "script-src 'unsafe-inline'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

Points = list[tuple[float, float | None]]  # Seconds since 1970 and a value; None: not finite.
Tasks = dict[str, dict[str, Any]]  # The facts that the page shows about each task, by label.


class Follower:
    """Reads the lines that a process adds to its trace."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.about: dict[str, Any] = {}
        self.progress: list[tuple[float, dict[str, float]]] = []
        self.values: dict[str, Points] = defaultdict(list)
        self.changes: dict[str, float] = {}  # When the members of an elastic job changed.
        self.wait: tuple[float, str] | None = None  # The wait that the process is in.
        self._end = 0

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
            while end := (data := file.read(_CHUNK_BYTES)).rfind(b",\n") + 1:
                for line in data[:end].split(b",\n"):
                    if b'"ph": "C"' in line or b'"name":"members"' in line:
                        self._take(json.loads(line.rstrip(b",")))
                self._end += end + 1
                file.seek(self._end)

    def _take(self, entry: Mapping[str, Any]) -> None:
        moment, name, values = self._wall(entry["ts"]), entry["name"], entry["args"]
        if entry["ph"] == "X":
            self.changes.setdefault(values["title"], moment + entry["dur"] / 1e6)
        elif name == PROGRESS:
            _keep(self.progress, (moment, values))
        else:
            _keep(self.values[name], (moment, values["value"]))

    def _wall(self, microseconds: float) -> float:
        return (microseconds + float(self.about["wall_minus_clock_us"])) / 1e6

    def rates(self) -> Points:
        """Return the steps per second, with at most one point per second."""
        rates: Points = []
        since, before = 0.0, float("inf")
        for moment, values in self.progress:
            if values["steps"] < before:  # The first point, or another process began.
                since, before = moment, values["steps"]
            elif values["steps"] > before and moment - since >= 1:
                rates.append((moment, (values["steps"] - before) / (moment - since)))
                since, before = moment, values["steps"]
        return rates

    def shares(self) -> dict[str, float]:
        """Return the share of the last seconds that spans of each name take."""
        until, after = self.progress[-1]
        old = [point for point in self.progress if point[0] <= until - _SHARE_SECONDS]
        since, before = old[-1] if old else self.progress[0]
        spent = {name: after[name] - before.get(name, 0.0) for name in after if name != "steps"}
        whole = max(until - since, sum(spent.values()))
        return {name: part / whole for name, part in spent.items() if part > 0}


class JobFolder:
    """Reads the folder of a job; remembers only how far it has read each trace."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._followers: dict[Path, Follower] = {}
        self.lock = threading.Lock()  # To hold during `state` and `timeline`.

    def state(self) -> dict[str, Any]:
        """Return the data of the page, except the timeline."""
        notes, tasks, traces = self._read()
        changes: dict[str, float] = {}
        series: dict[str, dict[str, Points]] = defaultdict(lambda: defaultdict(list))
        for label, followers in traces.items():
            tasks[label] |= _traced(followers, tasks[label]["state"] == "running")
            for each in followers:
                for name, points in {"steps/s": each.rates(), **each.values}.items():
                    series[name][tasks[label]["name"]] += points
                for text, moment in each.changes.items():
                    if ":" in text:  # Each worker records it; the first record counts.
                        changes[text] = min(moment, changes.get(text, moment))
        for label, task in tasks.items():
            task["log"] = self._log(label)
        end = next((note for note in notes if "end" in note), None)
        events = [(note["time"], note["text"]) for note in notes if "text" in note]
        events += [(moment, text) for text, moment in changes.items()]
        return {
            "now": time.time(),
            "job": notes[0]["job"] if notes else str(self._folder),
            "since": notes[0]["time"] if notes else None,
            "end": end,
            "runs": end is None and any(task["state"] == "running" for task in tasks.values()),
            "waits": _who_waits(tasks),
            "events": sorted(events)[-_MOST_EVENTS:],
            "series": {name: lines for name, lines in series.items() if any(lines.values())},
            "tasks": list(tasks.values()),
        }

    def timeline(self) -> list[tuple[str, list[tuple[float, float, str, str]]]]:
        """Return each thread's last spans: start since 1970 and duration in ms, name, title."""
        _, tasks, traces = self._read()
        rows = []
        for label in filter(traces.get, tasks):
            path = traces[label][-1].path
            trace = trace_report.read_file(path, _TAIL_BYTES) or trace_report.Trace(label)
            for thread in sorted({span.thread for span in trace.events}):
                last = [span for span in trace.events if span.thread == thread][-_MOST_SPANS:]
                times = [((trace.wall + s.start) / 1e3, (s.end - s.start) / 1e3) for s in last]
                spans = [(*t, s.name, s.title) for t, s in zip(times, last, strict=True)]
                rows.append((tasks[label]["name"], sorted(spans)))
        return rows

    def report(self) -> str:
        """Return the trace report of the whole job."""
        _, folder = self._notes()
        if sum(path.stat().st_size for path in folder.glob("trace-*.json")) > _REPORT_BYTES:
            return f"The traces are large. Run: ndistribute trace report {folder}"
        try:
            return trace_report.report(folder)
        except FileNotFoundError as error:
            return str(error)

    def _notes(self) -> tuple[list[dict[str, Any]], Path]:
        """Return the journal's lines, and the folder of the traces."""
        notes: list[dict[str, Any]] = []
        path = self._folder / JOURNAL
        for line in path.read_bytes().splitlines() if path.exists() else ():
            with contextlib.suppress(ValueError):  # It is being written, or a full disk cut it.
                notes.append(json.loads(line))
        return notes, Path(notes[0]["traces"]) if notes else self._folder

    def _read(self) -> tuple[list[dict[str, Any]], Tasks, dict[str, list[Follower]]]:
        """Return the journal's lines, the tasks, and each task's followers, the oldest first."""
        notes, folder = self._notes()
        tasks, traces = _noted(notes), defaultdict[str, list[Follower]](list)
        since = notes[0]["time"] - 1 if notes else 0.0  # File times may be whole seconds.
        moments = {path: path.stat().st_mtime for path in folder.glob("trace-*.json")}
        for path in sorted(moments, key=lambda path: moments[path]):
            follower = self._followers.setdefault(path, Follower(path))
            follower.follow()
            if follower.about and moments[path] >= since:  # Otherwise it belongs to an earlier job.
                label = _label(follower.about, tasks)
                tasks.setdefault(label, _from_trace(label, follower.about))
                traces[label].append(follower)
        for label, task in tasks.items():
            if label not in traces and task["host"] != platform.node():
                task["note"] = "Its steps and metrics are in its trace, on that host."
        number = {label: int(re.sub(r"\D", "", label) or 0) for label in tasks}
        order = sorted(tasks, key=lambda label: (tasks[label]["role"], number[label]))
        return notes, {label: tasks[label] for label in order}, traces

    def _log(self, label: str) -> str:
        name = f"rank-{label}" if label.isdigit() else label.replace(":", "-")
        paths = [*self._folder.glob(f"{name}.log"), *self._folder.glob(f"{name}.*.log")]
        if not paths:
            return ""
        with max(paths, key=lambda path: path.stat().st_mtime).open("rb") as file:
            cut = max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES)
            file.seek(cut)
            text = file.read().decode(errors="replace")
        return text.partition("\n")[2] if cut else text


def _noted(notes: Sequence[Mapping[str, Any]]) -> Tasks:
    """Return the tasks of a journal, with their states."""
    tasks: Tasks = {}
    for note in notes:
        label = note.get("task", "")
        if not label or label.startswith("ssh "):
            continue
        task = tasks.setdefault(label, _task(label, note.get("host") or notes[0]["host"]))
        if "pid" in note:
            task |= {"starts": task["starts"] + 1, "state": "running", "pid": note["pid"]}
        else:
            task["state"] = task["before"] = exit_text(note["code"]) if note["code"] else "done"
    if notes and (notes[-1].get("end") or _has_ended(notes[0])):
        for task in tasks.values():
            task["state"] = "stopped" if task["state"] == "running" else task["state"]
    if MPIEXEC in tasks:
        tasks[MPIEXEC]["note"] = "It starts the ranks; the launcher learns only of its own end."
    return tasks


def _task(label: str, host: str) -> dict[str, Any]:
    name = f"worker {label}" if label.isdigit() else label
    known = {"name": name, "role": re.sub("[ :].*", "", name), "host": host}
    return {**known, "state": "", "starts": 0, "pid": 0}


def _from_trace(label: str, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return a task that is known only from a trace."""
    state = "ended" if _has_ended(about) else "running" if about["host"] == platform.node() else ""
    return _task(label, about["host"]) | {"state": state}


def _has_ended(about: Mapping[str, Any]) -> bool:
    """Return True if the process ran on this host, and no process has its number now."""
    return about["host"] == platform.node() and not Path(f"/proc/{about['pid']}").exists()


def _label(about: Mapping[str, Any], tasks: Tasks) -> str:
    """Return the label of the task that wrote a trace, found by its reaper or by its name."""
    for label, task in tasks.items():
        if (about["ppid"], about["host"]) == (task["pid"], task["host"]) and label != MPIEXEC:
            return label
    name = str(about["name"]).removeprefix("rank ").replace("chief:0", "chief")
    number = name.removeprefix("worker").lstrip(": ")
    return number if number.isdigit() and name not in tasks else name


def _traced(traces: Sequence[Follower], runs: bool) -> dict[str, Any]:
    """Return the facts about a task from its newest trace."""
    newest = traces[-1]
    known: dict[str, Any] = {"wait": newest.wait if runs else None}
    known["metrics"] = {name: points[-1][1] for name, points in newest.values.items()}
    if newest.progress:
        last, values = newest.progress[-1]
        known |= {"last": last, "steps": values["steps"], "shares": newest.shares()}
        known["rate"] = (newest.rates() or [(0, None)])[-1][1]
    return known


def _who_waits(tasks: Tasks) -> str:
    """Return a sentence on tasks that have waited long, and for which ones; '' if none has."""
    now, workers = time.time(), [t for t in tasks.values() if t["role"] in ("worker", "chief")]
    waiting = [t for t in workers if (t.get("wait") or (now,))[0] < now - _LONG_WAIT_SECONDS]
    if not waiting:
        return ""
    others = [t for t in workers if t not in waiting and t["state"] != "done"]
    states = ["" if t["state"] == "running" else f" ({t['state']})" for t in others]
    whom = [f"{t['name']}{state}" for t, state in zip(others, states, strict=True)]
    began, title = min(t["wait"] for t in waiting)
    who = " and ".join(t["name"] for t in waiting) + (" has" if len(waiting) == 1 else " have")
    call = title.removeprefix("wait").strip()
    return f"{who} waited {now - began:.0f} s for {' and '.join(whom) or 'each other'}: {call}"


def _keep(points: list[Any], point: Any) -> None:
    points.append(point)
    if len(points) > _MOST_POINTS:  # Thin out the older points.
        del points[1 : len(points) // 2 : 2]


class PageServer(ThreadingHTTPServer):
    """A server on loopback that can end while browsers are connected."""

    daemon_threads = False  # The server joins them when it ends.

    def __init__(self, job: JobFolder) -> None:
        self.token, self.job = secrets.token_urlsafe(16), job
        self._connections: set[Any] = set()
        self.asked, self.has_told_end = 0.0, threading.Event()
        super().__init__(("127.0.0.1", 0), _Handler)
        self.address = f"http://127.0.0.1:{self.server_address[1]}/{self.token}/"

    def server_bind(self) -> None:
        """Bind without a look-up of this machine's name, which may take long."""
        TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: the browser has closed the connection."""

    def await_last_look(self) -> None:
        """If a page is open, wait briefly until it has received the end of the job."""
        if time.monotonic() - self.asked < _LAST_LOOK_SECONDS:
            self.has_told_end.wait(_LAST_LOOK_SECONDS)

    def server_close(self) -> None:
        for connection in [*self._connections]:
            with contextlib.suppress(OSError):  # Browsers open spare connections.
                connection.shutdown(socket.SHUT_RDWR)
        super().server_close()


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 30.0  # The time limit of a connection without a request.

    def do_GET(self) -> None:
        token, _, name = self.path.lstrip("/").partition("/")
        job = self.server.job
        answers = {"state": job.state, "timeline": job.timeline, "report": job.report}
        try:
            if not self._is_allowed(token):
                self._answer(403, "text/plain", "Use the whole address that was printed.\n")
            elif name in answers:
                with job.lock if name != "report" else contextlib.nullcontext():
                    told: Any = answers[name]()
                self._answer(200, "application/json", json.dumps(told))
                if name == "state":
                    self.server.asked = time.monotonic()
                if name == "state" and told["end"]:
                    self.server.has_told_end.set()
            elif name:
                self._answer(404, "text/plain", "There is no such page.\n")
            else:
                page = Path(__file__).with_suffix(".html").read_text()
                self._answer(200, "text/html; charset=utf-8", page)
        except (OSError, ValueError, KeyError) as error:
            self._answer(500, "text/plain", f"{error!r}\n")

    def _is_allowed(self, token: str) -> bool:
        """Return True if the token is right, and the browser asks for this machine by its name.

        Another site could make its name resolve to 127.0.0.1, but cannot change `Host`.
        """
        try:
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        except ValueError:
            return False
        right = hmac.compare_digest(token.encode(), self.server.token.encode())
        return right and host in ("127.0.0.1", "localhost")

    def _answer(self, code: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": len(body)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Print nothing."""


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[PageServer]:
    """Return a context manager in which the page of a folder is served."""
    with PageServer(JobFolder(folder)) as server:
        answer, name = server.serve_forever, "ndistribute dashboard"
        thread = threading.Thread(target=answer, args=(0.1,), name=name, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextlib.contextmanager
def begin(
    folder: Path, command: Sequence[str], environ: Mapping[str, str], console: Console
) -> Iterator[None]:
    """Return a context manager in which a job of the launcher has a page."""
    with serve(folder) as server:
        console.say(f"dashboard: {server.address} (later: ndistribute dashboard {folder})")
        console.journal = folder / JOURNAL
        about = {"pid": os.getpid(), "host": platform.node()}
        traces = os.path.abspath(environ["NDISTRIBUTE_TRACE"])
        console.note(job=shlex.join(command), traces=traces, **about)
        yield
        server.await_last_look()
