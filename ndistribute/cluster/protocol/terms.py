"""What requests to a parameter server are made of: origins, quorums and gradients."""

from __future__ import annotations

from dataclasses import dataclass

from ndistribute.cluster.wire.tensors import Array

__all__ = ["Dense", "Gradient", "Origin", "Quorum", "Rows"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Name a transaction or a wait, so that it is made once.

    Args:
        series: who numbers: a client for its own changes, a coordinator for its closures. A
            series is never used again after a restart, so put something random in its name.
        number: in its series, from 1.
    """

    series: str
    number: int


@dataclass(frozen=True, slots=True)
class Quorum:
    """Say whom a request that waits depends on.

    A group that had that many members, and has fewer since some left, answers it with a failure;
    a group that did not grow so large yet may still do so.
    """

    group: str
    members: int


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """A gradient with a value for every element."""

    values: Array


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """A gradient that is zero but for some rows; a row that stands several times is summed."""

    indices: Array
    values: Array


Gradient = Dense | Rows
