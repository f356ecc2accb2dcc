"""The imitation takes what CuPy takes; where CuPy is installed this is looked up, without a GPU."""

from __future__ import annotations

import inspect
import itertools
import operator
import re
from typing import Any

import numpy as np
import pytest

from ndistribute import device
from ndistribute.collective import nccl
from ndistribute.collective.reduce_op import ReduceOp
from tests.gpu.imitation.signatures import FUNCTIONS, METHODS, NCCL, UFUNCS


@pytest.fixture(scope="module")
def installed() -> Any:
    """CuPy as it is installed; only looked at, so no GPU is needed."""
    return pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)


@pytest.fixture(scope="module")
def library(installed: Any) -> Any:
    """CuPy's NCCL as it is installed; connecting fails where there is no GPU."""
    if not device.nccl_available():
        pytest.skip("NCCL is not installed")
    return device.nccl_module()


@pytest.fixture(scope="module")
def unique_id(library: Any) -> bytes:
    """What NCCL gives; it listens there until somebody has connected, so it is no test's leak."""
    return nccl._make_unique_id()


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


def test_nccl_takes_the_same_arguments(library: Any) -> None:
    for name, signature in NCCL.items():
        first_line = operator.attrgetter(name)(library).__doc__.partition("\n")[0]
        assert names(first_line) == names(f"({signature})"), name


def test_nccl_has_the_constants_of_all_reductions(library: Any) -> None:
    dtypes = "?bhilqBHILQefdFD"
    wires = [nccl.reduction_wire(*pair) for pair in itertools.product(ReduceOp, dtypes)]
    names = {name for wire in wires if wire is not None for name in (wire.elements, wire.op)}
    assert all(isinstance(getattr(library, name), int) for name in {*names, "NCCL_UINT8"})


def test_nccl_takes_the_unique_id_that_it_gives(library: Any, unique_id: bytes) -> None:
    assert len(unique_id) == 128
    if device.list_devices("gpu"):
        return
    with pytest.raises(library.NcclError):  # It has been understood, and now a GPU is missing.
        nccl._make_communicator(1, unique_id, 0)


def test_a_stream_is_asked_as_cuda_wants_it(installed: Any) -> None:
    runtime = installed.cuda.runtime
    status = runtime.streamQuery(0)
    assert status == 0 if device.list_devices("gpu") else status not in (0, 600)
    assert isinstance(runtime.CUDARuntimeError(700), RuntimeError)
