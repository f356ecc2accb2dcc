"""Run every benchmark, each in a process of its own, and compare the figures with what to reach.

Writes one JSON file for each benchmark, one that describes the machine, and the comparison as a
markdown table, which is printed as well.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.case import OURS, PACKAGES
from benchmarks.machine import machine
from benchmarks.options import PYTHONS, add_options, parse
from benchmarks.report import conclusions, write_json
from benchmarks.workers import ROOT

__all__ = ["NAMES", "main"]

NAMES = ("overhead", "input_pipeline", "mlp", "all_reduce", "scaling", "parameter_server")

# A full run with peers takes a few minutes a benchmark, that of all_reduce a quarter of an hour.
BENCHMARK_SECONDS = 3600.0

_log = logging.getLogger("benchmarks")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run everything from the command line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    parser = argparse.ArgumentParser(description="Run every benchmark.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    add_options(parser)
    options = parse(parser, arguments)
    out = options.out.resolve()
    described = machine()  # Before anything runs: the load average is that of the others.
    written = {name: _run(name, out, options) for name in NAMES}
    sides = {side: one[side] for one in written.values() for side in PACKAGES if side in one}
    entries = [entry for one in written.values() for entry in one["results"]]
    others = [cores for entry in entries for cores in entry["others_cores"]["all"]]
    described["others_cores"] = statistics.mean(others)
    write_json({**described, **sides}, out / "machine.json")
    tables = [conclusions(one) for one in written.values()]
    tables.append(_cost_model(out))
    shown = _summary(described, sides, "\n\n".join(filter(None, tables)), quick=options.quick)
    (out / "comparison.md").write_text(shown)
    print(shown)
    if any(failure["side"] == OURS for one in written.values() for failure in one["failures"]):
        sys.exit(1)


def _run(name: str, out: Path, options: argparse.Namespace) -> dict[str, Any]:
    path = out / f"{name}.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--out", str(path)]
    for option in PYTHONS:
        if getattr(options, option):
            command += [f"--{option.replace('_', '-')}", getattr(options, option)]
    command += ["--cores", str(options.cores)] if options.cores else []
    command += [f"--{flag}" for flag in ("plot", "quick", "peers") if getattr(options, flag)]
    _log.info("%s", " ".join(command))
    path.unlink(missing_ok=True)
    status = subprocess.run(
        command, cwd=ROOT, check=False, timeout=BENCHMARK_SECONDS, stdout=subprocess.DEVNULL
    ).returncode
    # Status 1 also says that a contender failed: the others are written, and the failure too.
    if not path.exists():
        raise RuntimeError(f"benchmarks.{name} ended with status {status} and wrote nothing")
    return json.loads(path.read_text())


def _cost_model(out: Path) -> str:
    """Fit the cost model to what was measured, and return its tables."""
    command = [sys.executable, "-m", "benchmarks.cost_model", "--fit", str(out / "all_reduce.json")]
    command += ["--scaling", str(out / "scaling.json"), "--out", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, check=False, timeout=120, capture_output=True, text=True
    )
    if done.returncode:
        _log.warning("%s", done.stderr)
    return done.stdout


def _summary(described: dict[str, Any], sides: dict[str, Any], table: str, *, quick: bool) -> str:
    """Return the table under the machine that it was measured on."""
    ours = sides["ours"]
    kernels = sorted({f"{blas['internal_api']} {blas['architecture']}" for blas in ours["blas"]})
    versions = {
        name: version
        for side in sides.values()
        for name, version in side["packages"].items()
        if version is not None
    }
    lines = [
        "# ndistribute beside others",
        "",
        f"- {described['time']}, commit {described['commit']}",
        f"- {described['cpu']}, {described['cores']} cores, BLAS {', '.join(kernels)}",
        f"- load average {described['load_average'][0]} at the start, "
        f"{described['others_cores']:.1f} cores busy with something else meanwhile",
        f"- Python {ours['python']}, "
        + ", ".join(f"{name} {version}" for name, version in versions.items()),
        "",
        *(["A quick run: the figures mean nothing.", ""] if quick else []),
        table,
        "",
        "Medians; the spread of the ratio is over repetitions that followed each other. A ratio "
        "above 1 says that ours is better.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
