"""Runs every benchmark in its own process, and writes all tables into one page.

Faults have their own command, `benchmarks.faults`, because they take longer than all others.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import add_options, options_of
from benchmarks.machine import machine
from tests.processes import ROOT

NAMES = ("overhead", "input", "training", "models", "compiled", "all_reduce", "servers", "graph")
# A full run with peers takes a few minutes a benchmark.
_SECONDS = 3600.0
_log = logging.getLogger("benchmarks")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run everything from the command line."""
    parser = argparse.ArgumentParser(description="Run every benchmark.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    add_options(parser)
    options = options_of(parser, arguments)
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    page, failed = [f"```json\n{json.dumps(machine(), indent=1)}\n```"], []
    passed = []
    for name, value in vars(options).items():
        if value and name != "out":
            passed += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    commands = {name: [*passed, "--out", str(out / f"{name}.json")] for name in NAMES}
    commands["cost_model"] = ["--results", str(out)]
    for name, own in commands.items():
        _log.info("%s", name)
        command = [sys.executable, "-m", f"benchmarks.{name}", *own]
        try:
            done = subprocess.run(
                command, cwd=ROOT, timeout=_SECONDS, stdout=subprocess.PIPE, text=True, check=False
            )
            tables, code = done.stdout, done.returncode
        except subprocess.TimeoutExpired as error:
            tables, code = f"{error}", 1
        page.append(f"## {name}\n\n{tables}")
        failed += [name] if code else []
        (out / "comparison.md").write_text("\n\n".join(page))
    if failed:
        sys.exit(f"{', '.join(failed)} failed")


if __name__ == "__main__":
    main()
