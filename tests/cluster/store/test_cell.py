"""Cells, on a shelf and off it: what was lent never changes."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from ndistribute.cluster.shelf.shelf import make_shelf
from ndistribute.cluster.store.cell import OwnCell, make_cell


@pytest.fixture(params=["shelf", "own memory"])
def shelf(request):
    if request.param == "own memory":
        yield None
        return
    made = make_shelf()
    if made is None:
        pytest.skip("this system has no memory files")
    with contextlib.closing(made):
        yield made


def test_a_cell_holds_a_copy_and_its_version(shelf):
    initial = np.arange(6.0).reshape(2, 3)
    cell = make_cell(initial.T, version=7, shelf=shelf)
    initial[:] = 0
    assert cell.array.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert cell.version == 7
    cell.version += 1
    assert cell.version == 8


@pytest.mark.parametrize("shape", [(), (0,), (3,)])
def test_what_was_lent_never_changes(shelf, shape):
    cell = make_cell(np.full(shape, 1.0), shelf=shelf)
    lent = [cell.lend()]
    cell.open()[...] = 2
    lent.append(cell.lend())
    cell.replace(np.full(shape, 3.0))
    assert [(array == n).all() for n, array in enumerate([*lent, cell.array], 1)] == [True] * 3
    assert not any(array.flags.writeable for array in lent)


def test_foreign_byte_order_becomes_this_machines(shelf):
    cell = make_cell(np.array([1, 2], ">i4"), shelf=shelf)
    assert cell.array.dtype == np.dtype("i4")
    assert cell.array.dtype.isnative
    assert cell.array.tolist() == [1, 2]


def test_a_variable_for_which_a_shelf_has_no_room_lies_elsewhere():
    class Full:
        def put(self, array, version):
            raise OSError("no memory")

    cell = make_cell(np.ones(2), shelf=Full())
    assert isinstance(cell, OwnCell)
    assert cell.array.tolist() == [1.0, 1.0]
