"""Elastic workers: what a loss and a newcomer cost, and whether a sample is lost or counted twice.

The jobs are those of `tests/jobs/elastic.py`: real processes, which are killed and stopped when
they report that they have come to some step. The workers count each sample in the update of the
step itself, so the counts are those of what was committed. ``--only`` runs the parts whose name has
a text: kills, control, joins, launcher, rate, cost, stops, torchrun.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.harness import OURS, Benchmark, Contender, Group, add_options, measure, options_of
from benchmarks.machine import machine
from benchmarks.worker import Prepared, strategy_of
from tests.jobs.elastic import MODES, PROGRAM, WIRES, Audience, Crew, play, random_drama
from tests.processes import ROOT, close_zygote, environment

Row = dict[str, Any]
_TORCH = str(Path(__file__).with_name("elastic_torch.py"))
_log = logging.getLogger("benchmarks")


def _row(part: str, what: str, figures: Sequence[float], unit: str = "ms", **more: Any) -> Row:
    row = {"part": part, "what": what, "unit": unit, "all": list(figures), **more}
    if figures:
        row |= {"median": statistics.median(figures), "max": max(figures), "min": min(figures)}
    _log.info("%s: %s: %s", part, what, [round(each, 4) for each in figures[:12]])
    return row


def kills(options: argparse.Namespace) -> Iterator[Row]:
    """Kill workers at random moments, until there were so many kills."""
    seconds: dict[str, list[float]] = {}
    count, wrong, number, jobs = 0, [], 0, dict[str, int]()
    while count < options.kills:
        drama = random_drama(random.Random(f"{options.seed} {number}"))
        number += 1
        faults, recoveries, killed = play(drama)
        count += killed
        wrong += [f"{options.seed} {number - 1}: {drama}: {fault}" for fault in faults[:1]]
        for fault in faults:
            _log.warning("%s: %s", drama, fault)
        jobs[drama.mode] = jobs.get(drama.mode, 0) + 1
        for key in (drama.wire, drama.mode, drama.options["loop"], "all"):
            seconds.setdefault(key, []).extend(1e3 * each for each in recoveries)
    for key in (*WIRES, *MODES, "loop", "fit", "all"):
        if key in seconds:
            what = f"kill to next committed step, {key}"
            yield _row("kills", what, seconds[key], jobs=jobs.get(key))
    yield _row(
        "kills", f"jobs with {count} kills that ended wrongly", [len(wrong)], "", wrong=wrong
    )


def control(options: argparse.Namespace) -> Iterator[Row]:
    """Leave out one sample of one part of a batch: the check must say so."""
    with Crew(3, drop=(1, 3)) as crew:
        crew.start_all()
        crew.wait_to_the_end()
        faults = crew.faults()
    silent = not any("samples were lost" in fault for fault in faults)
    wrong = ["a dropped sample was not noticed"] if silent else []
    yield _row(
        "control", "faults that the check reports", [len(faults)], "", said=faults, wrong=wrong
    )


def joins(options: argparse.Namespace) -> Iterator[Row]:
    """Kill a worker and start it again: the pause of the others, the time to the full number."""
    for fresh, name in ((True, "a new interpreter"), (False, "a process that has imported all")):
        pauses, wholes, wrong = [], [], []
        for number in range(options.repetitions):
            with Crew(3, epochs=3000, rows=240, counts=False, seconds=0.005) as crew:
                crew.start_all()
                crew.wait_for_steps(20)
                at = crew.kill(number % 3)
                crew.start(number % 3, fresh=fresh)
                crew.wait_for(lambda at=at: bool(_full(crew, at)))
                crew.wait_for_steps(20)
                others = [index for index in range(3) if index != number % 3]
                whole = _full(crew, at)[0]
                wholes.append(1e3 * (whole - at))
                pauses.append(1e3 * max(_pause(crew, index, at) for index in others))
                wrong += _counted(crew)
                _kill_all(crew)
        yield _row("joins", f"pause of the others, {name}", pauses, wrong=wrong)
        yield _row("joins", f"kill to the full number, {name}", wholes)


def _full(crew: Crew | LaunchedRun, after: float) -> list[float]:
    """Return the times of the steps that the full number has made after a moment."""
    every = [each for index in crew.reports for each in crew.steps(index)]
    changed = [each["at"] for each in every if each["at"] > after and each["changes"] >= 2]
    return sorted(
        at for at in changed if any(e["at"] == at and e["size"] == crew.size for e in every)
    )


def _pause(crew: Crew | LaunchedRun, index: int, after: float) -> float:
    """Return by how much the first step in full number took longer than others, on one worker."""
    steps = crew.steps(index)
    gaps = np.diff([each["at"] for each in steps])
    whole = [each["at"] > after and each["size"] == crew.size for each in steps]
    smaller = [each["at"] > after and each["size"] < crew.size for each in steps]
    first = whole.index(True, smaller.index(True)) if any(smaller) else whole.index(True)
    return float(gaps[first - 1] - np.median(gaps))


def _counted(crew: Audience) -> list[str]:
    """Return which workers do not agree on the weights after a step that both report."""
    seen: dict[tuple[int, int], float] = {}
    for index in crew.reports:
        for each in crew.steps(index):
            known = seen.setdefault((each["epoch"], each["step"]), each["weight"])
            if known != each["weight"]:
                return [f"worker {index} has other weights after {each}"]
    return []


def _kill_all(crew: Crew) -> None:
    for index in sorted(crew.living):
        crew.send(index, signal.SIGKILL)
    for index in sorted(crew.living):
        crew.code(index)


def rate(options: argparse.Namespace) -> Iterator[Row]:
    """Compare the samples a second of a job in which workers are killed, and of one undisturbed.

    The two jobs take turns. A killed worker's place is taken by a process that has imported all.
    """
    turns = max(1, round(options.minutes * 60 / (2 * options.turn)))
    share = options.disturbances / turns
    figures: dict[str, list[float]] = {"undisturbed": [], "with kills": []}
    wrong: list[str] = []
    rng, due, done = random.Random(options.seed), 0.0, 0
    for _ in range(turns):
        due += share
        for name, times in figures.items():
            with Crew(3, epochs=10**7, counts=False, seconds=options.step_seconds) as crew:
                crew.start_all()
                crew.wait_for_steps(20)
                begun, before = time.time(), _most(crew)
                count = round(due) - done if name == "with kills" else 0
                for number in range(count):
                    crew.hear(
                        max(
                            0.0,
                            begun + options.turn * (number + rng.random()) / count - time.time(),
                        )
                    )
                    victim = rng.choice(sorted(crew.living))
                    crew.kill(victim)
                    crew.start(victim)
                done += count
                crew.hear(max(0.0, begun + options.turn - time.time()))
                times.append((_most(crew) - before) * crew.options.batch / (time.time() - begun))
                wrong += _counted(crew)
                _kill_all(crew)
    for name, times in figures.items():
        yield _row("rate", f"samples a second, {name}", times, "1/s", kills=done, wrong=wrong)
    plain, disturbed = (statistics.mean(times) for times in figures.values())
    what = f"rate with {done} kills in {turns * options.turn / 60:g} minutes, of that undisturbed"
    yield _row("rate", what, [100 * disturbed / plain], "%")


def _most(crew: Crew) -> int:
    """Return how many steps the job has committed."""
    per_epoch = crew.options.rows // crew.options.batch
    last = [crew.steps(index)[-1] for index in crew.reports if crew.steps(index)]
    return max(each["epoch"] * per_epoch + each["step"] for each in last)


@contextlib.contextmanager
def steps(milliseconds: float, elastic: bool, wire: str) -> Iterator[Prepared]:
    """Set up a step with so much computation on each worker, and an update of 100 KB."""
    import ndistribute as nd

    options = nd.CommunicationOptions(implementation=wire)
    limits = {"elastic": nd.Elastic()} if elastic else {}
    strategy = strategy_of("MultiWorkerMirroredStrategy", communication_options=options, **limits)
    with strategy.scope():
        weights = nd.Variable(np.zeros(25_000, np.float32))
        optimizer = nd.optimizers.SGD(0.1)
    rows = nd.Dataset.from_tensor_slices(np.ones((1200, 8), np.float32)).batch(60).repeat()
    batches = iter(strategy.elastic(rows))

    def step(batch: Any) -> None:
        until = time.thread_time() + milliseconds / 1e3
        while time.thread_time() < until:
            pass
        optimizer.apply_gradients([(np.full(25_000, np.sum(batch), np.float32), weights)])

    def run() -> None:
        strategy.run(step, args=(next(batches),))

    run()
    yield Prepared(run, float(weights.numpy()[0]))


def cost(options: argparse.Namespace) -> Iterator[Row]:
    """Compare steps of elastic workers without faults with those of workers that never change."""
    groups = []
    for milliseconds in (1, 5, 20):
        for size, wire in ((2, "auto"), (3, "auto"), (3, "ring")):
            each = [
                Contender(
                    name,
                    OURS,
                    "elastic:steps",
                    {"milliseconds": milliseconds, "elastic": elastic, "wire": wire},
                    jobs=("worker",) * size,
                )
                for name, elastic in ((f"plain {wire}", False), (f"elastic {wire}", True))
            ]
            groups.append(Group(f"{milliseconds} ms, {size} workers, {wire}", each))
    benchmark = Benchmark("cost", "Steps without faults", "us", lambda quick: groups, rate=False)
    chosen = argparse.Namespace(**{**vars(options), "only": options.case})
    written = measure(benchmark, chosen)
    results = {
        (each["group"], each["name"].split()[0]): each["figure"] for each in written["results"]
    }
    for group in groups:
        if (group.name, "elastic") in results and (group.name, "plain") in results:
            plain, elastic = (results[group.name, name]["all"] for name in ("plain", "elastic"))
            pairs = [100 * (e / p - 1) for p, e in zip(plain, elastic, strict=True)]
            yield _row(
                "cost",
                f"elastic beyond plain, {group.name}",
                pairs,
                "%",
                plain=plain,
                elastic=elastic,
            )


def stops(options: argparse.Namespace) -> Iterator[Row]:
    """Stop a worker for longer than the heartbeat timeout, and let it go on."""
    for seconds in (5.0,) if options.quick else (5.0, 30.0):
        wrong, waits, ends = [], [], []
        for number in range(3):
            faults, waited, text = stopped(number, seconds)
            wrong += faults
            waits.append(1e3 * waited)
            ends.append(text)
        what = f"until the others go on, of a worker stopped for {seconds:g} s"
        yield _row("stops", what, waits, wrong=wrong, ends=ends)


def stopped(
    index: int, seconds: float, size: int = 3, heartbeat: float = 1.0
) -> tuple[list[str], float, str]:
    """Stop a worker for some seconds; return what is wrong, how long others waited, how it ends."""
    environ = {"NDISTRIBUTE_HEARTBEAT_SECONDS": str(heartbeat)}
    epochs = int(20 + 10 * seconds)
    with Crew(size, epochs=epochs, seconds=0.02, environ=environ) as crew:
        crew.start_all()
        crew.wait_for_steps(5)
        crew.send(index, signal.SIGSTOP)
        at, changes = time.time(), crew.changes
        others = [each for each in range(size) if each != index]
        crew.wait_for(
            lambda: all(crew.steps(each)[-1]["changes"] > changes for each in others), 30.0
        )
        waited = min(crew.steps(each)[-1]["at"] for each in others) - at
        crew.hear(max(0.0, at + seconds - time.time()))
        crew.send(index, signal.SIGCONT)
        codes = crew.wait_to_the_end(240.0)
        faults = crew.faults()
        last = crew.reports[index][-1]
        text = {"result": "joined anew"}.get(last["what"], f"{codes[index]}: {last.get('text')}")
        if faults:
            _log.warning("%s\n%s", faults, crew.said())
        return faults, waited, text


class LaunchedRun(Audience):
    """An elastic job that the launcher has started on this host."""

    def __init__(self, size: int, spares: int, **options: Any) -> None:
        super().__init__(**options)
        self.size = size
        environ = {
            "ELASTIC_DOOR": self.door,
            "ELASTIC_OPTIONS": json.dumps(vars(self.options)),
            "PYTHONPATH": str(ROOT),
        }
        words = [sys.executable, "-m", "ndistribute", "run", "--elastic", "-n", str(size)]
        words += ["--spares", str(spares), PROGRAM]
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(words, env=environment(environ), cwd=ROOT, **pipes)

    def __exit__(self, *error: Any) -> None:
        self._process.terminate()
        self._process.wait(60.0)
        super().__exit__(*error)

    def kill(self, index: int) -> float:
        """Kill a worker, which the launcher starts again; return when."""
        starts = [each["pid"] for each in self.reports[index] if each["what"] == "start"]
        now = time.time()
        os.kill(starts[-1], signal.SIGKILL)
        self.killed.append((index, now, self.changes))
        return now


def launcher(options: argparse.Namespace) -> Iterator[Row]:
    """Kill a worker that the launcher starts again, without a spare and with one."""
    for spares in (0, 1):
        pauses, wholes, wrong = [], [], []
        for number in range(options.repetitions):
            with LaunchedRun(3, spares, epochs=10**6, counts=False) as job:
                job.wait_for(lambda job=job: min([len(job.steps(k)) for k in range(3)]) >= 20)
                job.hear(11.0)  # Whoever has run for ten seconds is started again at once.
                at = job.kill(number % 3)
                job.wait_for(lambda job=job, at=at: bool(_full(job, at)))
                whole = _full(job, at)[0]
                job.hear(0.5)
                others = [index for index in range(3) if index != number % 3]
                wholes.append(1e3 * (whole - at))
                pauses.append(1e3 * max(_pause(job, index, at) for index in others))
                wrong += _counted(job)
        name = f"{spares} spare{'s' * (spares != 1)} of the launcher"
        yield _row("launcher", f"pause of the others, {name}", pauses, wrong=wrong)
        yield _row("launcher", f"kill to the full number, {name}", wholes)


class TorchRun(Audience):
    """A job of torchrun on this host."""

    def __init__(self, python: str, size: int, every: int, seconds: float) -> None:
        super().__init__()
        job = {"rows": 240, "batch": 24, "seconds": seconds, "every": every}
        job["checkpoint"] = f"{self.folder}/checkpoint.pt"
        environ = {**os.environ, "ELASTIC_DOOR": self.door, "ELASTIC_OPTIONS": json.dumps(job)}
        environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
        # Else restarted workers of torch 2.14 look for addresses of lost ones: gloo gives up.
        environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        words = [python, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3"]
        words += ["--nnodes", "1", "--nproc-per-node", str(size), _TORCH]
        self._process = subprocess.Popen(
            words, env=environ, cwd=ROOT, start_new_session=True, stderr=subprocess.DEVNULL
        )

    def __exit__(self, *error: Any) -> None:
        os.killpg(self._process.pid, signal.SIGTERM)
        self._process.wait(60.0)
        super().__exit__(*error)


def torchrun(options: argparse.Namespace) -> Iterator[Row]:
    """Kill a worker of torchrun, and one of ours, in turns, and count what has to be done again."""
    theirs: dict[int, tuple[list[float], list[float]]] = {1: ([], []), 10: ([], [])}
    ours, restarts = list[float](), list[float]()
    for number in range(options.repetitions):
        for every, (seconds, lost) in theirs.items():
            with TorchRun(options.torch_python, 3, every, 0.005) as job:
                job.wait_for(lambda: min([len(job.steps(k)) for k in range(3)]) >= 25, 120.0)
                victim = job.reports[number % 3][0]["pid"]
                before = max(each["step"] for k in range(3) for each in job.steps(k))
                at = time.time()
                os.kill(victim, signal.SIGKILL)
                job.killed.append((number % 3, at, 0))
                job.wait_for(lambda: job.changes > 0, 120.0)
                seconds.append(1e3 * job.recoveries()[0])
                again = [e["step"] for k in range(3) for e in job.steps(k) if e["changes"] > 0]
                lost.append(24.0 * max(0, before - min(again) + 1))
                restarts.append(job.changes)
        with Crew(3, epochs=3000, counts=False, seconds=0.005) as crew:
            crew.start_all()
            crew.wait_for_steps(25)
            crew.kill(number % 3)
            crew.wait_for(lambda: bool(crew.recoveries()))
            ours.append(1e3 * crew.recoveries()[0])
            _kill_all(crew)
    yield _row("torchrun", "ours: kill to next committed step", ours)
    for every, (seconds, lost) in theirs.items():
        name = f"torchrun with gloo, a checkpoint every {every} step{'s' * (every > 1)}"
        yield _row("torchrun", f"{name}: kill to next step", seconds)
        yield _row("torchrun", f"{name}: samples that are computed again", lost, "")
    yield _row(
        "torchrun", "restarts of all its workers that torchrun needed for a kill", restarts, ""
    )


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "kills": kills,
    "control": control,
    "joins": joins,
    "launcher": launcher,
    "rate": rate,
    "cost": cost,
    "stops": stops,
    "torchrun": torchrun,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure from the command line, print tables and write what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_options(parser)
    parser.add_argument("--out", type=Path, help="write the figures there, as JSON")
    parser.add_argument("--only", default="", metavar="TEXT", help="parts whose name has this")
    parser.add_argument("--case", default="", metavar="TEXT", help="of `cost`: groups with this")
    parser.add_argument("--seed", type=int, default=1, help="of the kills")
    parser.add_argument("--kills", type=int, help="how many; 200, quick 10")
    parser.add_argument("--minutes", type=float, help="of `rate`; 60, quick 0.5")
    parser.add_argument("--disturbances", type=int, help="kills of `rate`; 62, quick 1")
    parser.add_argument("--turn", type=float, help="seconds of a turn of `rate`; 60, quick 10")
    parser.add_argument("--step-seconds", type=float, default=0.02, help="a step of `rate` waits")
    options = options_of(parser, arguments)
    quick = options.quick
    options.kills = options.kills or (10 if quick else 200)
    options.minutes = options.minutes or (0.5 if quick else 60)
    options.disturbances = options.disturbances or (1 if quick else 62)
    options.turn = options.turn or (10.0 if quick else 60.0)
    written: dict[str, Any] = {"machine": machine(), "quick": quick, "rows": []}
    try:
        for name, part in PARTS.items():
            if options.only not in name or (name == "torchrun" and not options.peers):
                continue
            for row in part(options):
                written["rows"].append(row | {"load": os.getloadavg()[0]})
                if options.out:
                    report.write_json(written, options.out)
    finally:
        close_zygote()
    head = ["part", "what", "median", "min", "max", "number"]
    print(report.markdown(head, [_cells(row) for row in written["rows"]]))
    wrong = [each for row in written["rows"] for each in row.get("wrong", ())]
    if wrong:
        sys.exit("\n".join(wrong))


def _cells(row: Row) -> list[str]:
    figures = [
        f"{report.shown(row[which])} {row['unit']}".strip() if which in row else "-"
        for which in ("median", "min", "max")
    ]
    return [row["part"], row["what"], *figures, str(len(row["all"]))]


if __name__ == "__main__":
    # Under this name processes find what they are to run.
    importlib.import_module("benchmarks.elastic").main()
