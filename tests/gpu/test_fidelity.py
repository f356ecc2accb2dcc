"""The imitation takes what CuPy takes; where CuPy is installed this is looked up, without a GPU."""

from __future__ import annotations

import inspect
import operator
import re
from typing import Any

import numpy as np
import pytest

from tests.gpu.imitation.signatures import FUNCTIONS, METHODS, UFUNCS


@pytest.fixture(scope="module")
def installed() -> Any:
    """CuPy as it is installed; only looked at, so no GPU is needed."""
    return pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)


def names(signature: str) -> list[str]:
    """Return the names of the arguments that a signature, or a docstring's first line, shows."""
    inside = re.sub(r"\([^()]*\)", "", signature.partition("(")[2].rpartition(")")[0])
    arguments = [part.partition("=")[0].strip() for part in inside.split(",")]
    named = [part for part in arguments if part not in ("", "self", "*", "/")]
    return [part.split()[-1].lstrip("*") for part in named]


def test_functions_take_the_same_arguments(installed: Any) -> None:
    for name, signature in FUNCTIONS.items():
        function = operator.attrgetter(name)(installed)
        try:
            taken = list(inspect.signature(function).parameters)
        except (TypeError, ValueError):
            taken = names(function.__doc__.partition("\n")[0])
        ours = names(f"({signature})")
        assert taken[0] == "args" or ours == taken[: len(ours)], name


def test_methods_take_the_same_arguments(installed: Any) -> None:
    for name, signature in METHODS.items():
        taken = names(getattr(installed.ndarray, name).__doc__.partition("\n")[0])
        ours = names(f"({signature})")
        assert ours == taken[: len(ours)], name


def test_ufuncs_exist(installed: Any) -> None:
    for name in UFUNCS:
        assert callable(getattr(installed, name))
        assert callable(getattr(np, name))
