"""Memory is written in place only where a count of references shows that nobody else sees it."""

import numpy as np

import ndistribute as nd
from ndistribute import ownership
from ndistribute.collective.communicator import SMALL_BYTES, Outputs
from ndistribute.parameter_server.variables import Cell

LARGE = np.zeros(SMALL_BYTES)


def test_this_interpreter_counts_references():
    assert ownership._UNSHARED is not None


def test_where_references_are_not_counted_everything_is_copied(monkeypatch):
    monkeypatch.setattr(ownership, "_UNSHARED", None)
    mirrored, outputs, served = nd.Variable([1.0, 2.0]), Outputs(), Cell(np.zeros(2), 1)

    def arrays():
        return mirrored._cells[0].array, outputs.like([LARGE])[0], served.array

    before = arrays()
    mirrored.assign_add([1.0, 1.0])
    served.open()
    assert all(a is not b for a, b in zip(before, arrays(), strict=True))
    assert mirrored.numpy().tolist() == [2, 3]
