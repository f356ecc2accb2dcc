"""The whole state of a store as records, and back.

Sorted by name wherever order says nothing, so two stores that hold the same give the same bytes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from ndistribute.cluster.protocol.replies import Reply
from ndistribute.cluster.protocol.requests import Rows
from ndistribute.cluster.protocol.spans import Span
from ndistribute.cluster.store.accumulator import Accumulator
from ndistribute.cluster.store.aggregation import Aggregation
from ndistribute.cluster.store.cell import owned
from ndistribute.cluster.store.clocks import Clock, Clocks
from ndistribute.cluster.store.groups import Group, Groups
from ndistribute.cluster.store.origins import Windows
from ndistribute.cluster.store.state import State
from ndistribute.cluster.wire import records
from ndistribute.cluster.wire.tensors import Array, MalformedError

__all__ = ["Parts", "restored", "taken"]

_EPOCH_BITS = 30


@dataclass(frozen=True, slots=True)
class Parts:
    """What a store consists of."""

    state: State
    windows: Windows
    groups: Groups
    clocks: Clocks
    gone: dict[str, None]


@dataclass(frozen=True, slots=True, eq=False)
class VariableRecord:
    """A variable."""

    name: str
    version: int
    array: Array


@dataclass(frozen=True, slots=True, eq=False)
class AccumulatorRecord:
    """An accumulator."""

    name: str
    step: int
    count: int
    dtype: str
    row_shape: tuple[int, ...]
    sparse: bool
    total: Array | None
    rows: tuple[Rows, ...]


@dataclass(frozen=True, slots=True, eq=False)
class AggregateRecord:
    """An aggregate; its sums are named as their variables, in their order."""

    name: str
    step: int
    givers: tuple[str, ...]
    sums: tuple[AccumulatorRecord, ...]


@dataclass(frozen=True, slots=True, eq=False)
class QueueRecord:
    """A queue of tokens."""

    name: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class AnswerRecord:
    """An answer that is remembered."""

    number: int
    reply: Reply


@dataclass(frozen=True, slots=True, eq=False)
class WindowRecord:
    """A series of origins."""

    series: str
    acknowledged: tuple[Span, ...]
    answers: tuple[AnswerRecord, ...]


@dataclass(frozen=True, slots=True, eq=False)
class GroupRecord:
    """A group of clients."""

    name: str
    members: tuple[str, ...]
    peak: int
    last_to_leave: str


@dataclass(frozen=True, slots=True, eq=False)
class ClockRecord:
    """A member of a group of clocks."""

    client: str
    said: int
    ahead: int


@dataclass(frozen=True, slots=True, eq=False)
class ClocksRecord:
    """A group of clocks."""

    name: str
    came: tuple[str, ...]
    present: tuple[ClockRecord, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StoreRecord:
    """A whole store."""

    total: int
    step: int
    variables: tuple[VariableRecord, ...]
    accumulators: tuple[AccumulatorRecord, ...]
    aggregates: tuple[AggregateRecord, ...]
    queues: tuple[QueueRecord, ...]
    windows: tuple[WindowRecord, ...]
    groups: tuple[GroupRecord, ...]
    clocks: tuple[ClocksRecord, ...]
    gone: tuple[str, ...]


def taken(parts: Parts) -> tuple[Any, list[Array]]:
    """Return the state as what JSON can hold and arrays that never change."""
    state = parts.state
    record = StoreRecord(
        state.total,
        state.step,
        tuple(
            VariableRecord(name, cell.version, cell.lend())
            for name, cell in sorted(state.variables.items())
        ),
        tuple(_accumulator_record(name, held) for name, held in sorted(state.accumulators.items())),
        tuple(_aggregate_record(name, held) for name, held in sorted(state.aggregates.items())),
        tuple(QueueRecord(name, tuple(tokens)) for name, tokens in sorted(state.queues.items())),
        _window_records(parts.windows),
        tuple(
            GroupRecord(name, tuple(sorted(group.members)), group.peak, group.last_to_leave)
            for name, group in sorted(parts.groups.by_name.items())
        ),
        _clocks_records(parts.clocks),
        tuple(sorted(parts.gone)),
    )
    return records.to_message(record)


def restored(parts: Parts, head: Any, tensors: list[Array], epoch: int) -> None:
    """Fill an empty store with what a snapshot holds.

    Raises:
        MalformedError: it is no snapshot.
    """
    record: StoreRecord = records.from_message(head, tensors, StoreRecord)
    state = parts.state
    state.total, state.step, state.restored = record.total, record.step, True
    state.began = record.total
    for variable in record.variables:
        version = max(variable.version, epoch << _EPOCH_BITS)
        state.create(variable.name, variable.array, version)
    for accumulator in record.accumulators:
        state.accumulators[accumulator.name] = _accumulator(accumulator)
    for aggregate in record.aggregates:
        givers = dict.fromkeys(aggregate.givers)
        sums = {each.name: _accumulator(each) for each in aggregate.sums}
        state.aggregates[aggregate.name] = Aggregation(aggregate.step, givers, sums)
    state.queues.update({queue.name: deque(queue.tokens) for queue in record.queues})
    for window in record.windows:
        parts.windows.restore(
            window.series,
            window.acknowledged,
            {answer.number: answer.reply for answer in window.answers},
        )
    for group in record.groups:
        members = dict.fromkeys(group.members)
        parts.groups.by_name[group.name] = Group(members, group.peak, group.last_to_leave)
    for clocks in record.clocks:
        present = [Clock(clock.client, clock.said, clock.ahead) for clock in clocks.present]
        parts.clocks.restore(clocks.name, clocks.came, present)
    parts.gone.update(dict.fromkeys(record.gone))


def _accumulator_record(name: str, held: Accumulator) -> AccumulatorRecord:
    return AccumulatorRecord(
        name,
        held.step,
        held.count,
        "" if held.dtype is None else held.dtype.name,
        held.row_shape,
        held.sparse,
        None if held.total is None or not held.count else held.total.copy(),
        tuple(held.rows),  # Never changed in place.
    )


def _aggregate_record(name: str, held: Aggregation) -> AggregateRecord:
    sums = tuple(_accumulator_record(variable, each) for variable, each in held.sums.items())
    return AggregateRecord(name, held.step, tuple(sorted(held.givers)), sums)


def _accumulator(record: AccumulatorRecord) -> Accumulator:
    try:
        dtype = np.dtype(record.dtype) if record.dtype else None
    except TypeError as error:
        raise MalformedError(f"there is no dtype {record.dtype!r}.") from error
    return Accumulator(
        record.step,
        record.count,
        dtype,
        record.row_shape,
        record.sparse,
        None if record.total is None else owned(record.total),
        list(record.rows),
    )


def _window_records(windows: Windows) -> tuple[WindowRecord, ...]:
    return tuple(
        WindowRecord(
            series,
            tuple(window.acknowledged),
            tuple(AnswerRecord(number, reply) for number, reply in sorted(window.replies.items())),
        )
        for series, window in sorted(windows.by_series.items())
    )


def _clocks_records(clocks: Clocks) -> tuple[ClocksRecord, ...]:
    return tuple(
        ClocksRecord(
            name,
            tuple(sorted(group.came)),
            tuple(
                ClockRecord(clock.client, clock.said, clock.ahead)
                for _, clock in sorted(group.present.items())
            ),
        )
        for name, group in sorted(clocks.by_name.items())
    )
