"""How soon all workers know of a fault in one of them, and what the checks cost without any.

Every figure is of real processes of this machine, over shared memory, the TCP ring and the MPI ring
(MPICH). A detection time runs from the fault to the exception in a step of the last of the others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.faulty import DEADLY, FAULTS
from benchmarks.machine import machine
from benchmarks.report import markdown, shown, write_json
from benchmarks.workers import ROOT, WorkerError, read_line
from ndistribute.launcher.mpiexec import find_mpiexec

__all__ = ["main"]

SIZES = {"shared": 2, "ring": 3, "mpi": 3}
_ANSWER_SECONDS = 120.0
_log = logging.getLogger("benchmarks")


class Job:
    """The workers of one job.

    Args:
        wire: ``"shared"``, ``"ring"`` or ``"mpi"``.
        size: how many workers.
        heartbeat: after how many seconds of silence one counts as lost.
    """

    def __init__(self, wire: str, size: int, heartbeat: float) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            settings = {
                "OPENBLAS_NUM_THREADS": "1",
                "FAULTS_WIRE": "auto" if wire == "shared" else "ring",
                "FAULTS_ADDRESS": f"127.0.0.1:{listener.getsockname()[1]}",
                "NDISTRIBUTE_HEARTBEAT_SECONDS": str(heartbeat),
            }
            start = _start_over_mpi if wire == "mpi" else _start_over_tcp
            self._processes = start(size, {**os.environ, **settings})
            self._links: dict[int, socket.socket] = {}
            self._pids: list[int] = []
            listener.settimeout(_ANSWER_SECONDS)
            for _ in range(size):
                link, _ = listener.accept()
                first = self._read(link, bytearray())
                self._links[first["rank"]] = link
                self._pids.append(first["pid"])
        self.size = size
        self._buffers = [bytearray() for _ in range(size)]
        for rank in range(size):
            self.answer(rank)

    def ask(self, **request: Any) -> None:
        """Send a request to all workers."""
        for link in self._links.values():
            link.sendall(json.dumps(request).encode() + b"\n")

    def answer(self, rank: int) -> dict[str, Any]:
        """Return the next answer of a worker."""
        try:
            return self._read(self._links[rank], self._buffers[rank])
        except (OSError, EOFError) as error:
            raise WorkerError(f"worker {rank}: {error}") from None

    def close(self) -> None:
        """End the workers."""
        for link in self._links.values():
            link.close()
        for pid in self._pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGCONT)
        for process in self._processes:
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10.0)

    def _read(self, link: socket.socket, buffer: bytearray) -> dict[str, Any]:
        deadline = time.monotonic() + _ANSWER_SECONDS
        return dict(json.loads(read_line(link.fileno(), buffer, deadline)))


def _start_over_tcp(size: int, environ: dict[str, str]) -> list[subprocess.Popen[bytes]]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(size)]
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in listeners]
    environ["NDISTRIBUTE_SECRET"] = secrets.token_hex(16)
    started = []
    for rank, listener in enumerate(listeners):
        config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
        place = {"NDISTRIBUTE_LISTEN_FD": str(listener.fileno()), "TF_CONFIG": json.dumps(config)}
        started.append(_popen([], environ | place, [listener.fileno()]))
        listener.close()
    return started


def _start_over_mpi(size: int, environ: dict[str, str]) -> list[subprocess.Popen[bytes]]:
    # Else mpiexec ends all ranks when one dies, before they can say when they knew.
    return [_popen([find_mpiexec().path, "-n", str(size), "-disable-auto-cleanup"], environ, [])]


def _popen(
    prefix: list[str], environ: dict[str, str], files: Sequence[int]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", "benchmarks.faulty"],
        env=environ,
        cwd=ROOT,
        pass_fds=files,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # What a process says when it fails is shown; a lost one's peers fail as well.
        stderr=None if _log.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
    )


@contextlib.contextmanager
def _job(wire: str, heartbeat: float, size: int | None = None) -> Iterator[Job]:
    made = Job(wire, size or SIZES[wire], heartbeat)
    try:
        yield made
    finally:
        made.close()


def detections(wire: str, repetitions: int, heartbeat: float) -> Iterator[dict[str, Any]]:
    """Yield for each fault after how many seconds the last of the others knew of it, each time."""
    with _job(wire, heartbeat) as job:
        for fault in FAULTS:
            if fault not in DEADLY:
                struck = [_strike(job, fault, number) for number in range(repetitions)]
                yield _detection(wire, fault, struck)
    for fault in DEADLY:
        struck = []
        for number in range(repetitions):
            with _job(wire, heartbeat) as job:
                try:
                    struck.append(_strike(job, fault, number))
                except WorkerError:
                    if wire != "mpi":  # There mpiexec may have ended the others before they knew.
                        raise
        yield _detection(wire, fault, struck)


def _detection(wire: str, fault: str, struck: list[tuple[float, set[str]]]) -> dict[str, Any]:
    _log.info("faults, %s: %s", wire, fault)
    seconds = [took for took, _ in struck]
    return {
        "wire": wire,
        "fault": fault,
        "workers": SIZES[wire],
        "median": statistics.median(seconds),
        "max": max(seconds),
        "all": seconds,
        "errors": sorted(set().union(*(names for _, names in struck))),
    }


def _strike(job: Job, fault: str, number: int) -> tuple[float, set[str]]:
    """Let a fault hit another worker after more steps each time."""
    who = number % job.size
    job.ask(do="fault", fault=fault, who=who, steps=1 + number % 3)
    struck = job.answer(who)["struck"]
    others = [rank for rank in range(job.size) if rank != who]
    answers = [job.answer(rank) for rank in others]
    if fault not in DEADLY:
        for rank in range(job.size):
            job.answer(rank)  # That all are whole again.
    return max(a["when"] for a in answers) - struck, {a["error"] for a in answers}


def cost(wire: str, sizes: Sequence[int], repetitions: int) -> list[dict[str, Any]]:
    """Return what comparing the calls costs an all-reduce of each size, in percent."""
    rows = []
    with _job(wire, 10.0, size=2) as job:
        for size in sizes:
            # About a hundredth of a second, so that many turns fit in a mood of the machine.
            calls = max(1, min(200, (4 << 20) // size))
            job.ask(do="cost", bytes=size, repetitions=repetitions, calls=calls)
            answers = [job.answer(rank) for rank in range(2)]
            on, off = (
                [max(pair) for pair in zip(*(a[way] for a in answers), strict=True)]
                for way in ("on", "off")
            )
            extra = [100 * (a / b - 1) for a, b in zip(on, off, strict=True)]
            quartiles = statistics.quantiles(extra, n=4)
            rows.append(
                {
                    "wire": wire,
                    "bytes": size,
                    "on": statistics.median(on),
                    "off": statistics.median(off),
                    "percent": statistics.median(extra),
                    "percent_quartiles": [quartiles[0], quartiles[2]],
                    "seconds": {"on": on, "off": off},
                }
            )
    return rows


def tables(written: dict[str, Any]) -> str:
    """Return the figures as markdown."""
    note = " (quick: the figures mean nothing)" if written["quick"] else ""
    found = [
        [
            row["wire"],
            row["fault"],
            ", ".join(row["errors"]),
            str(len(row["all"])),
            shown(1e3 * row["median"]),
            shown(1e3 * row["max"]),
        ]
        for row in written["detection"]
    ]
    costs = [
        [
            row["wire"],
            f"{row['bytes'] // 1024:,}",
            shown(1e6 * row["on"]),
            shown(1e6 * row["off"]),
            f"{row['percent']:+.1f}",
            " to ".join(f"{quartile:+.1f}" for quartile in row["percent_quartiles"]),
        ]
        for row in written["cost"]
    ]
    return "\n".join(
        [
            f"How soon the others know; heartbeat timeout {written['heartbeat']:g} s{note}",
            "",
            markdown(
                ["wire", "a worker", "the others raise", "times", "median ms", "max ms"], found
            ),
            "",
            f"What comparing the calls costs an all-reduce of 2 workers{note}",
            "",
            markdown(["wire", "KiB", "us with", "us without", "% more", "quartiles"], costs),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure from the command line, print tables and write what was asked for."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="write the figures there, as JSON")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes")
    parser.add_argument("--repetitions", type=int, help="of each fault; 20, quick 1")
    parser.add_argument("--turns", type=int, help="of each all-reduce; 60, quick 2")
    parser.add_argument("--heartbeat", type=float, default=2.0, help="timeout in seconds")
    parser.add_argument("--only", choices=["detection", "cost"])
    parser.add_argument("--wires", nargs="+", choices=list(SIZES), default=list(SIZES))
    options = parser.parse_args(arguments)
    repetitions = options.repetitions or (1 if options.quick else 20)
    turns = options.turns or (2 if options.quick else 60)
    heartbeat = min(options.heartbeat, 1.5) if options.quick else options.heartbeat
    top = 14 if options.quick else 26
    sizes = [1 << power for power in range(12, top + 1, 2)]
    written: dict[str, Any] = {
        "benchmark": "faults",
        "quick": options.quick,
        "heartbeat": heartbeat,
        "machine": machine(),
        "detection": [],
        "cost": [],
    }
    for wire in options.wires:
        if options.only != "cost":
            written["detection"] += detections(wire, repetitions, heartbeat)
        if options.only != "detection":
            _log.info("faults, %s: cost", wire)
            written["cost"] += cost(wire, sizes, turns)
    print(tables(written))
    if options.out:
        write_json(written, options.out)


if __name__ == "__main__":
    main()
