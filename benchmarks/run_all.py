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

from benchmarks.goals import comparison
from benchmarks.harness import add_options, parse
from benchmarks.machine import machine
from benchmarks.report import write_json
from benchmarks.workers import ROOT

__all__ = ["NAMES", "main"]

NAMES = ("overhead", "input_pipeline", "mlp", "all_reduce")

# A full run with peers takes a few minutes a benchmark.
BENCHMARK_SECONDS = 1800.0

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
    sides = {key: written[NAMES[0]].get(key) for key in ("ours", "TF")}
    entries = [entry for one in written.values() for entry in one["results"]]
    others = [cores for entry in entries for cores in entry["others_cores"]["all"]]
    described["others_cores"] = statistics.mean(others)
    write_json({**described, **sides}, out / "machine.json")
    table = _summary(described, sides, comparison(written), quick=options.quick)
    (out / "comparison.md").write_text(table)
    print(table)


def _run(name: str, out: Path, options: argparse.Namespace) -> dict[str, Any]:
    path = out / f"{name}.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--out", str(path)]
    command += ["--tf-python", options.tf_python]
    command += ["--cores", str(options.cores)] if options.cores else []
    command += [f"--{flag}" for flag in ("plot", "quick", "peers") if getattr(options, flag)]
    _log.info("%s", " ".join(command))
    subprocess.run(
        command, cwd=ROOT, check=True, timeout=BENCHMARK_SECONDS, stdout=subprocess.DEVNULL
    )
    return json.loads(path.read_text())


def _summary(described: dict[str, Any], sides: dict[str, Any], table: str, *, quick: bool) -> str:
    """Return the table under the machine that it was measured on."""
    ours = sides["ours"]
    kernels = sorted({f"{blas['internal_api']} {blas['architecture']}" for blas in ours["blas"]})
    versions = {
        name: version
        for side in sides.values()
        for name, version in (side or {"packages": {}})["packages"].items()
        if version is not None
    }
    lines = [
        "# ndistribute beside TensorFlow",
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
