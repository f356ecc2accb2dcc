"""The whole state of a store as records, and back.

Sorted by name wherever order says nothing, so two stores that hold the same give the same bytes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from ndistribute.cluster import records
from ndistribute.cluster.replies import Reply
from ndistribute.cluster.requests import Change, Rows
from ndistribute.cluster.store.accumulator import Accumulator
from ndistribute.cluster.store.cell import Cell, owned
from ndistribute.cluster.store.groups import Group, Groups
from ndistribute.cluster.store.origins import Windows
from ndistribute.cluster.store.stages import Stages
from ndistribute.cluster.store.state import OptimizerState, State
from ndistribute.cluster.tensors import Array, MalformedError

__all__ = ["Parts", "restored", "taken"]

_EPOCH_BITS = 30


@dataclass(frozen=True, slots=True)
class Parts:
    """What a store consists of."""

    state: State
    windows: Windows
    stages: Stages
    groups: Groups
    gone: dict[str, None]


@dataclass(frozen=True, slots=True, eq=False)
class VariableRecord:
    """A variable."""

    name: str
    version: int
    array: Array


@dataclass(frozen=True, slots=True, eq=False)
class SlotsRecord:
    """What an optimizer keeps beside a variable."""

    variable: str
    arrays: tuple[Array, ...]


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerRecord:
    """An optimizer."""

    name: str
    rule: str
    count: int
    slots: tuple[SlotsRecord, ...]


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
    acknowledged: int
    answers: tuple[AnswerRecord, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PartRecord:
    """A change that is kept for a closure."""

    part: int
    change: Change


@dataclass(frozen=True, slots=True, eq=False)
class StageRecord:
    """An attempt at a closure."""

    series: str
    number: int
    attempt: int
    client: str
    parts: tuple[PartRecord, ...] | None


@dataclass(frozen=True, slots=True, eq=False)
class GroupRecord:
    """A group of clients."""

    name: str
    members: tuple[str, ...]
    peak: int
    last_to_leave: str


@dataclass(frozen=True, slots=True, eq=False)
class StoreRecord:
    """A whole store."""

    step: int
    variables: tuple[VariableRecord, ...]
    optimizers: tuple[OptimizerRecord, ...]
    accumulators: tuple[AccumulatorRecord, ...]
    queues: tuple[QueueRecord, ...]
    windows: tuple[WindowRecord, ...]
    stages: tuple[StageRecord, ...]
    groups: tuple[GroupRecord, ...]
    gone: tuple[str, ...]


def taken(parts: Parts) -> tuple[Any, list[Array]]:
    """Return the state as what JSON can hold and arrays that never change."""
    state = parts.state
    record = StoreRecord(
        state.step,
        tuple(
            VariableRecord(name, cell.version, cell.lend())
            for name, cell in sorted(state.variables.items())
        ),
        tuple(_optimizer_record(name, held) for name, held in sorted(state.optimizers.items())),
        tuple(_accumulator_record(name, held) for name, held in sorted(state.accumulators.items())),
        tuple(QueueRecord(name, tuple(tokens)) for name, tokens in sorted(state.queues.items())),
        _window_records(parts.windows),
        _stage_records(parts.stages),
        tuple(
            GroupRecord(name, tuple(sorted(group.members)), group.peak, group.last_to_leave)
            for name, group in sorted(parts.groups.by_name.items())
        ),
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
    state.step = record.step
    for variable in record.variables:
        version = max(variable.version, epoch << _EPOCH_BITS)
        state.variables[variable.name] = Cell(owned(variable.array), version)
    for optimizer in record.optimizers:
        slots = {
            each.variable: tuple(Cell(owned(array)) for array in each.arrays)
            for each in optimizer.slots
        }
        state.optimizers[optimizer.name] = OptimizerState(optimizer.rule, optimizer.count, slots)
    for accumulator in record.accumulators:
        state.accumulators[accumulator.name] = _accumulator(accumulator)
    state.queues.update({queue.name: deque(queue.tokens) for queue in record.queues})
    for window in record.windows:
        parts.windows.restore(
            window.series,
            window.acknowledged,
            {answer.number: answer.reply for answer in window.answers},
        )
    for stage in record.stages:
        held = None if stage.parts is None else {each.part: each.change for each in stage.parts}
        parts.stages.restore((stage.series, stage.number), stage.attempt, stage.client, held)
    for group in record.groups:
        members = dict.fromkeys(group.members)
        parts.groups.by_name[group.name] = Group(members, group.peak, group.last_to_leave)
    parts.gone.update(dict.fromkeys(record.gone))


def _optimizer_record(name: str, held: OptimizerState) -> OptimizerRecord:
    slots = tuple(
        SlotsRecord(variable, tuple(cell.lend() for cell in cells))
        for variable, cells in sorted(held.slots.items())
    )
    return OptimizerRecord(name, held.rule, held.count, slots)


def _accumulator_record(name: str, held: Accumulator) -> AccumulatorRecord:
    return AccumulatorRecord(
        name,
        held.step,
        held.count,
        "" if held.dtype is None else held.dtype.name,
        held.row_shape,
        held.sparse,
        None if held.total is None else held.total.copy(),
        tuple(held.rows),  # Never changed in place.
    )


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
            window.acknowledged,
            tuple(AnswerRecord(number, reply) for number, reply in sorted(window.replies.items())),
        )
        for series, window in sorted(windows.by_series.items())
    )


def _stage_records(stages: Stages) -> tuple[StageRecord, ...]:
    return tuple(
        StageRecord(
            series,
            number,
            attempt,
            stage.client,
            None
            if stage.parts is None
            else tuple(PartRecord(part, change) for part, change in sorted(stage.parts.items())),
        )
        for (series, number), attempts in sorted(stages.by_closure.items())
        for attempt, stage in sorted(attempts.items())
    )
