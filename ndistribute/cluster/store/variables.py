"""Requests about single variables: what they are, their values, rows of them, their places."""

from __future__ import annotations

from ndistribute.cluster.protocol.replies import Created, Located, Value
from ndistribute.cluster.protocol.requests import Create, Read, ReadRows
from ndistribute.cluster.shelf.shelved import Shelved
from ndistribute.cluster.store.refusal import Refused
from ndistribute.cluster.store.rows import check_indices
from ndistribute.cluster.store.state import State
from ndistribute.cluster.wire.tensors import DTYPES

__all__ = ["create", "locate", "read", "read_rows"]


def create(state: State, request: Create) -> Created:
    """Make a variable unless it is there, and tell what is there then.

    Raises:
        Refused: it is there with another shape or dtype, or there are none of that dtype.
    """
    initial, held = request.initial, state.variables.get(request.name)
    if initial.dtype.name not in DTYPES:
        raise Refused("mismatch", f"a variable can not have dtype {initial.dtype}.")
    new = held is None
    if held is None:
        held = state.create(request.name, initial)
    array = held.array
    if (array.shape, array.dtype) != (initial.shape, initial.dtype):
        raise Refused(
            "mismatch",
            f"variable {request.name!r} is here with shape {array.shape} and dtype {array.dtype}; "
            f"it can not be made with {initial.shape} and {initial.dtype}.",
        )
    return Created(new, held.version, array.shape, array.dtype.name)


def read(state: State, request: Read) -> Value:
    """Return a variable's version, and its value if that is newer than asked for.

    Raises:
        Refused: there is no such variable.
    """
    cell = state.variable(request.name)
    newer = request.newer_than is None or cell.version > request.newer_than
    return Value(cell.version, cell.lend() if newer else None)


def read_rows(state: State, request: ReadRows) -> Value:
    """Return rows of a variable.

    Raises:
        Refused: there is no such variable, or it has no such rows.
    """
    cell, indices = state.variable(request.name), request.indices
    check_indices(indices, cell.array.shape, request.name)
    return Value(cell.version, cell.array[indices])


def locate(state: State, names: tuple[str, ...]) -> Located:
    """Return where variables lie in memory that other processes read.

    Raises:
        Refused: there is no such variable, or it does not lie there.
    """
    places = []
    for name in names:
        cell = state.variable(name)
        if not isinstance(cell, Shelved):
            raise Refused("unknown", f"variable {name!r} lies in no memory that is shared.")
        places.append(cell.place)
    return Located(
        tuple(place.slot for place in places),
        tuple(place.offset for place in places),
        tuple(place.nbytes for place in places),
    )
