"""The data of scikit-learn, read from its files."""

import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace

import numpy as np

QUICK = Path(__file__).parents[1]


def load_digits() -> SimpleNamespace:
    """Return 1,797 images of 8 x 8 pixels, also as rows, and the digits they show."""
    elsewhere = [entry for entry in sys.path if Path(entry) != QUICK]
    package = PathFinder.find_spec("sklearn", elsewhere)
    if package is None or package.origin is None:
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
    table = np.loadtxt(Path(package.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
    data, target = table[:, :-1], table[:, -1].astype(np.int64)
    return SimpleNamespace(data=data, target=target, images=data.reshape(-1, 8, 8))
