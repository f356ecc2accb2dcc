"""An elastic job whose workers are killed, stopped and started while they train.

What is done to it depends on the progress that its workers report, not on the time since its start.
"""

import contextlib
import json
import random
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

import ndistribute as nd
from tests.jobs.elastic_program import COLUMNS, POINTS, WorkerOptions, samples
from tests.processes import ROOT, Tasks, environment, tf_config

PROGRAM = str(Path(__file__).with_name("elastic_program.py"))
DEADLINE = 60.0
TOLERANCE = 1e-5

Report = dict[str, Any]


class Audience:
    """Hears what the workers of a job report.

    Args:
        options: what the workers do; see `WorkerOptions`.

    Attributes:
        door: the path of the socket where they report.
        reports: of each worker, of all its starts.
        killed: who, when, and after how many changes of members.
        living: the workers that have been started and whose line has not ended.
    """

    def __init__(self, **options: Any) -> None:
        self.options = WorkerOptions(**options)
        self.reports: dict[int, list[Report]] = {}
        self.killed: list[tuple[int, float, int]] = []
        self.living: set[int] = set()
        self._held = contextlib.ExitStack()
        self.folder = self._held.enter_context(tempfile.TemporaryDirectory(prefix="crew-"))
        self._listener = self._held.enter_context(socket.socket(socket.AF_UNIX))
        self.door = f"{self.folder}/door"
        self._listener.bind(self.door)
        self._listener.listen(64)
        self._selector = self._held.enter_context(selectors.DefaultSelector())
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._lines: dict[int, tuple[socket.socket, bytes]] = {}  # By file: what is read so far.
        self._who: dict[int, int] = {}  # The worker of each file.

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        for line, _ in self._lines.values():
            line.close()
        if error is not None:
            error.add_note(f"What the workers said:\n{self.said()}")
        self._held.close()

    def said(self, *tasks: str) -> str:
        """Return what the workers have written."""
        return ""

    @property
    def changes(self) -> int:
        """The most changes of members that any worker has reported."""
        steps = [each for index in self.reports for each in self.steps(index)]
        return max([each["changes"] for each in steps], default=0)

    def steps(self, index: int) -> list[Report]:
        """Return the steps that a worker has reported so far."""
        return [each for each in self.reports.get(index, ()) if each["what"] == "step"]

    @property
    def results(self) -> dict[int, Report]:
        """The results of the workers that came to the end, of those that had joined the job."""
        last = {index: each[-1] for index, each in self.reports.items()}
        return {index: each for index, each in last.items() if each.get("joined")}

    def progress(self) -> dict[int, Any]:
        """Return the last report of each worker."""
        return {index: each[-1] for index, each in self.reports.items()}

    def wait_for(self, condition: Callable[[], bool], seconds: float = DEADLINE) -> None:
        """Read reports until a condition holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"it has not come about in {seconds:g} s: {self.progress()}")
            self.listen(0.05)

    def wait_for_steps(self, count: int, *indices: int) -> None:
        """Wait until each of some workers, or of all living ones, has made so many steps more."""
        who = indices or tuple(self.living)
        before = {index: len(self.steps(index)) for index in who}
        self.wait_for(
            lambda: (
                all(len(self.steps(i)) >= before[i] + count for i in who if i in self.living)
                or not self.living
            )
        )

    def hear(self, seconds: float) -> None:
        """Read reports for some time."""
        deadline = time.monotonic() + seconds
        while (rest := deadline - time.monotonic()) > 0:
            self.listen(rest)

    def listen(self, seconds: float) -> None:
        """Read what workers report, or wait for it no longer than some time."""
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                line, _ = self._listener.accept()
                self._lines[line.fileno()] = line, b""
                self._selector.register(line, selectors.EVENT_READ)
                continue
            line, rest = self._lines[key.fd]
            try:
                data = line.recv(1 << 20)
            except ConnectionResetError:
                data = b""
            *whole, rest = (rest + data).split(b"\n")
            self._lines[key.fd] = line, rest
            for text in whole:
                self._note(key.fd, json.loads(text))
            if not data:
                self._selector.unregister(line)
                del self._lines[key.fd]
                self.living.discard(self._who.pop(key.fd, -1))
                line.close()

    def _note(self, line: int, report: Report) -> None:
        index = self._who.setdefault(line, report.get("index", -1))
        self.living.add(index)
        self.reports.setdefault(index, []).append(report)
        if report["what"] == "dies":
            self.killed.append((index, report["at"], self.changes))

    def recoveries(self) -> list[float]:
        """Return the seconds from each kill to the next step that others committed without it."""
        seconds = []
        steps = [each for index in self.reports for each in self.steps(index)]
        for _, at, changes in self.killed:
            after = [
                each["at"] - at for each in steps if each["at"] > at and each["changes"] > changes
            ]
            seconds += [min(after)] if after else []
        return seconds

    def faults(self) -> list[str]:
        """Return what is wrong with the results, in words; an empty list if all is right."""
        if not self.results:
            return [f"nobody came to the end: {self.progress()}"]
        wrong = []
        is_alike = self.options.source == "data" and not self.options.scaled
        weights = expected(self.options) if is_alike else None
        for index, result in self.results.items():
            if weights is not None:
                error = np.abs(np.array(result["weights"]) - weights).max()
                if not error <= TOLERANCE:
                    wrong.append(f"worker {index}: weights are wrong by {error:.2g}")
            counts = np.array(result["counts"]) * len(result["counts"]) / self.options.epochs
            if not np.all(counts == 1):
                lost, twice = np.sum(counts < 1), np.sum(counts > 1)
                wrong.append(f"worker {index}: {lost} samples were lost, {twice} counted twice")
            wrong += self._metric_faults(index, result)
        first, *others = self.results.values()
        if any(each["weights"] != first["weights"] for each in others):
            wrong.append("the weights of the workers differ")
        return wrong

    def _metric_faults(self, index: int, result: Report) -> list[str]:
        if "metrics do not contain" in self.said():
            return []
        full = self.options.rows * (self.options.rows + 1) / 2
        totals = result["totals"]  # Those of skipped epochs are what the others have read.
        if all(total == full for total in totals):
            return []
        return [f"worker {index}: the metric is {totals} of {full}"]


class Crew(Audience):
    """The workers of an elastic job.

    Args:
        size: how many start.
        seats: how many have an address; more may be started later.
        hosts: the host that each worker says it is on, if hosts are imitated.
        environ: what the workers have in their environment besides.
        options: see `WorkerOptions`.
    """

    def __init__(
        self,
        size: int,
        seats: int = 0,
        hosts: Sequence[str] = (),
        environ: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.size, self.hosts = size, hosts
        self._fresh: dict[int, subprocess.Popen[bytes]] = {}
        self.tasks = self._held.enter_context(
            Tasks(max(size, seats), 0, chief=False, **(environ or {}))
        )

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        for process in self._fresh.values():
            process.kill()
            process.wait()
        super().__exit__(kind, error, trace)

    def said(self, *tasks: str) -> str:
        """Return what the workers, or some such as ``worker:0``, have written."""
        return self.tasks.said(*tasks)

    def environ_of(self, index: int, **options: Any) -> dict[str, str]:
        """Return what a worker has in its environment besides its cluster."""
        environ = {
            "ELASTIC_DOOR": self.door,
            "ELASTIC_OPTIONS": json.dumps({**vars(self.options), **options}),
        }
        if self.hosts:
            environ["NDISTRIBUTE_HOST_ID"] = self.hosts[index % len(self.hosts)]
        return environ

    def start(self, index: int, *, fresh: bool = False, **options: Any) -> float:
        """Start a worker, and return when.

        Args:
            index: which one.
            fresh: whether it is an interpreter of its own, which has imported nothing.
            options: see `WorkerOptions`, besides those of all.
        """
        environ = self.environ_of(index, **options)
        self.living.add(index)
        begun = time.time()
        if fresh:
            config = {"TF_CONFIG": tf_config(self.tasks.cluster, "worker", index)}
            self._fresh[index] = subprocess.Popen(
                [sys.executable, PROGRAM],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                env=environment(self.tasks.environ, config, environ),
            )
        else:
            self._fresh.pop(index, None)
            self.tasks.start("worker", index, TASK_SCRIPT=PROGRAM, **environ)
        return begun

    def start_all(self, **options: Any) -> None:
        """Start all workers."""
        for index in range(self.size):
            self.start(index, **options)

    def send(self, index: int, number: signal.Signals) -> None:
        """Send a worker a signal."""
        if index in self._fresh:
            self._fresh[index].send_signal(number)
        else:
            self.tasks.send("worker", index, number)

    def kill(self, *indices: int) -> float:
        """Kill workers at once, and return when."""
        now = time.time()
        for index in indices:
            self.send(index, signal.SIGKILL)
        self.killed += [(index, now, self.changes) for index in indices]
        for index in indices:
            self.code(index)
        return now

    def code(self, index: int, timeout: float = DEADLINE) -> int:
        """Wait for the end of a worker, and return its exit status; hear the others meanwhile."""
        deadline = time.monotonic() + timeout
        while index in self.living and time.monotonic() < deadline:
            self.listen(0.05)
        self.living.discard(index)
        if index in self._fresh:
            return self._fresh[index].wait(10.0)
        return self.tasks.code("worker", index, 10.0)

    def wait_to_the_end(self, seconds: float = DEADLINE) -> dict[int, int]:
        """Wait until all have ended, and return the exit statuses."""
        try:
            self.wait_for(lambda: not self.living, seconds)
        except TimeoutError as error:
            raise AssertionError(f"workers {sorted(self.living)} hang: {error}") from None
        return {index: self.code(index) for index in self.reports}


def expected(options: WorkerOptions) -> np.ndarray:
    """Return the weights of an undisturbed run, which this process computes."""
    x, y = samples(options.rows)
    again = options.loop != "fit"
    data = nd.Dataset.from_tensor_slices((x, y))
    data = data.shuffle(options.rows, seed=1, reshuffle_each_iteration=again).batch(options.batch)
    weights, velocity = np.zeros(COLUMNS), np.zeros(COLUMNS)
    momentum = 0.9 * (options.updates == 2)
    for _ in range(options.epochs):
        for inputs, targets in data:
            gradient = 0.02 * inputs.T @ (inputs @ weights - targets) / options.batch
            velocity = momentum * velocity - gradient
            weights = weights + velocity
    return weights


WIRES: dict[str, dict[str, Any]] = {
    "shared memory": {},
    "ring": {"implementation": "ring"},
    "two groups": {"hosts": ("red", "blue")},
}
# What a worker says that comes after the end of the job.
_LATE = "to start", "waits for answers", "a coordinator that it can reach"
MODES = ("one", "two at once", "all but one", "in a change", "and back")


@dataclass(frozen=True)
class Drama:
    """What is done to a job."""

    size: int
    wire: str
    mode: str
    kills: tuple[tuple[int, float, tuple[int, ...]], ...]  # After how many steps, seconds, who.
    options: dict[str, Any] = field(default_factory=dict)
    die_at: str = ""  # Where the worker of this number dies by itself.
    dies: int = -1
    after: int = 0

    def __str__(self) -> str:
        point = f", {self.dies} dies {self.die_at!r} ({self.after})" if self.die_at else ""
        kills = ", ".join(f"{who} after {steps}" for steps, _, who in self.kills)
        return f"{self.size} workers, {self.wire}, {self.mode}: {kills}{point} {self.options}"


def random_drama(rng: random.Random, **fixed: Any) -> Drama:
    """Return what is done to a job, at random; what is given is fixed."""
    size = fixed.get("size") or rng.choice([3, 4])
    mode = fixed.get("mode") or rng.choice(MODES)
    wire = fixed.get("wire") or rng.choice(list(WIRES))
    options = {
        "updates": rng.choice([1, 2]),
        "reduces": rng.random() < 0.5,
        "seconds": rng.choice([0.0, 0.002, 0.01]),
        "devices": rng.choice([1, 1, 2]),
        "loop": rng.choice(["loop", "loop", "fit"]),
        **fixed.get("options", {}),
    }
    ranks = rng.sample(range(size), size)
    times = {"one": 1, "two at once": 1, "all but one": size - 1, "and back": 4}.get(mode, 1)
    count = 2 if mode == "two at once" else 1
    kills = []
    for number in range(times):
        who = (rng.randrange(size),) if mode == "and back" else tuple(ranks[number:][:count])
        kills.append((rng.randrange(1, 8), rng.random() * (0.003 + options["seconds"]), who))
    if mode != "in a change":
        return Drama(size, wire, mode, tuple(kills), options)
    places = [each for each in POINTS if options["loop"] == "loop" or "update" not in each]
    point = fixed.get("die_at") or rng.choice(places)
    return Drama(size, wire, mode, tuple(kills), options, point, ranks[1], rng.choice([0, 0, 1, 2]))


def play(drama: Drama) -> tuple[list[str], list[float], int]:
    """Run a job; return what was wrong, the seconds of each recovery, and how many were killed."""
    wire = dict(WIRES[drama.wire])
    hosts = wire.pop("hosts", ())
    with Crew(drama.size, hosts=hosts, **wire, **drama.options) as crew:
        wrong = []
        for index in range(drama.size):
            dies = index == drama.dies
            crew.start(index, **({"die_at": drama.die_at, "after": drama.after} if dies else {}))
        for steps, delay, who in drama.kills:
            crew.wait_for_steps(steps)
            crew.hear(delay)
            victims = [index for index in who if index in crew.living]
            if not victims or len(crew.living) < 2 or crew.results:
                continue
            crew.kill(*victims)
            if drama.mode == "and back":
                crew.start(victims[0])
        try:
            codes = crew.wait_to_the_end()
        except AssertionError as error:
            return [f"{error}\n{crew.said()}"], crew.recoveries(), len(crew.killed)
        died = {index for index, _, _ in crew.killed}
        for index, code in codes.items():
            text = crew.reports[index][-1].get("text", "")
            # It came before or after the end of the job.
            late = any(each in text for each in _LATE)
            allowed = (-signal.SIGKILL, 128 + signal.SIGTERM) if index in died else ()
            if code not in (0, *allowed) and not (late and index in died):
                wrong.append(f"worker {index} ended with {code}: {text}")
        wrong += crew.faults()
        if wrong:
            wrong.append(crew.said())
        return wrong, crew.recoveries(), len(crew.killed)
