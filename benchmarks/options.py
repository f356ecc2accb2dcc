"""The options that every script and run_all share: how long, beside whom, on how many cores."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence

from benchmarks.case import MPICH, OPEN_MPI, OURS, PEER, TORCH

__all__ = ["PYTHONS", "add_options", "parse", "pythons"]

PYTHONS = ("tf_python", "torch_python", "mpi_python", "ompi_python")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that every script and run_all share."""
    parser.add_argument("--plot", action="store_true", help="draw a PNG as well (matplotlib)")
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes")
    parser.add_argument("--peers", action="store_true", help="alternate with what is installed")
    parser.add_argument("--tf-python", default=sys.executable, help="interpreter with TensorFlow")
    parser.add_argument("--torch-python", default=sys.executable, help="one with PyTorch")
    parser.add_argument("--mpi-python", default=sys.executable, help="one with mpi4py and MPICH")
    parser.add_argument("--ompi-python", help="one with mpi4py and Open MPI")
    parser.add_argument("--cores", type=int, help="cores for all workers; 2, or 4 for all_reduce")


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line, and refuse now what would fail after minutes."""
    options = parser.parse_args(arguments)
    for name in PYTHONS:
        python = getattr(options, name)
        if python and os.sep in python:
            # Given relative to where we are; workers run in the repository.
            setattr(options, name, os.path.abspath(python))
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install '.[bench]'")
    return options


def pythons(options: argparse.Namespace) -> dict[str, str]:
    """Return the interpreter of each side that is asked for."""
    peers = {
        PEER: options.tf_python,
        TORCH: options.torch_python,
        MPICH: options.mpi_python,
        OPEN_MPI: options.ompi_python,
    }
    chosen = {side: python for side, python in peers.items() if options.peers and python}
    return {OURS: sys.executable, **chosen}
