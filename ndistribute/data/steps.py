"""Steps: the parts of a batch for all replicas of a worker.

Either a worker takes its slices of every global batch, or it reads its own shards and assigns
pieces of their batches to its replicas. Numbers alone (lengths, counts and indices) determine the
rows of each replica. Each step contains the positions after it, so prefetched steps do not affect
the state of the consumer.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, islice, pairwise
from numbers import Number
from typing import Any, NamedTuple

import numpy as np

from ndistribute import tree
from ndistribute.data.elements import Element, checksum, leading_length
from ndistribute.data.options import Sharding, Topology
from ndistribute.data.pipeline import Epoch, Node, ShuffleSeed, number_of_files, seeds_of, upstream
from ndistribute.devices import Device, copy_to, to_host
from ndistribute.mistakes import count_of
from ndistribute.values import PerReplica

BATCH_IT = (
    "Elements must be batches of the global batch size, which are divided among the replicas: call "
    "dataset.batch(global_batch_size) before distribute_dataset."
)

COMPLETE_IT = (
    "Empty batches complete the last step, so elements must be batches: call "
    "dataset.batch(per_replica_batch_size)."
)


class Position(NamedTuple):
    """The consumed part of a shard."""

    batches: int = 0
    rows: int = 0  # The number of consumed rows of the next batch.
    left: int = 0  # The number of pieces into which the other rows of that batch are cut.
    of: int = 0  # The number of pieces into which that whole batch was to be cut.


class Reading(NamedTuple):
    """The part of a shard that a worker reads: a pipeline, from a position in an epoch on."""

    node: Node
    epoch: Epoch
    position: Position
    until: Position | None = None  # The position after the first step, if that step is made again.
    # The batches from the position on, if the shard is open.
    source: Iterator[Element] | None = None

    def batches(self) -> Iterator[Element]:
        """Return the batches, starting with that at the position."""
        if self.source is None:
            return self.node.iterate(self.epoch, self.position.batches)
        return self.source


Readings = Mapping[int, Reading]
"""What a worker reads, by the number of the shard."""


class PipelineStep(NamedTuple):
    """The parts of the replicas, and the position of each used shard after this step."""

    value: Any
    reached: Mapping[int, Position]
    rows: int = 0  # The number of rows of the global batch, with DATA.
    first: dict[str, Any] | None = None  # What the workers compare of the first global batch.
    loader_state: Any = None  # The loader's state after this step, if a thread reads ahead.


# Each worker has its own stream, which another worker may finish.
_APART = {Sharding.OFF, Sharding.FUNCTION}


@dataclass
class Progress:
    """The shards of an epoch: the seeds of the shuffles and the position of each."""

    sharding: Sharding
    files: int  # The number of files that the pipeline reads.
    # The replica counts of the workers among which the epoch was divided.
    replica_counts: tuple[int, ...]
    seeds: list[list[ShuffleSeed]]
    positions: list[Position]
    # The positions after the next step, if that step is made again.
    until: list[Position] | None = None

    def shards_of(self, topology: Topology) -> Sequence[int]:
        """Return the shards that this worker reads, in order."""
        if self.sharding is Sharding.DATA:
            return (0,)
        return range(topology.worker_index, len(self.positions), topology.num_workers)

    @property
    def following(self) -> int:
        """The number of the next epoch of the shuffles."""
        return 1 + max((seed.iteration for seeds in self.seeds for seed in seeds), default=-1)

    def state_dict(self) -> dict[str, Any]:
        pairs = zip(self.positions, self.seeds, strict=True)
        shards = [{**at._asdict(), "shuffles": [*map(list, seeds)]} for at, seeds in pairs]
        return {
            "sharding": self.sharding.value,
            "files": self.files,
            "replica_counts": list(self.replica_counts),
            "shards": shards,
            "until": None if self.until is None else [*map(list, self.until)],
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Progress:
        """Return the progress in a state that `state_dict` returned."""
        needed = {"sharding", "files", "shards"}
        # States of earlier versions have no counts.
        if state.get("sharding") == Sharding.FUNCTION.value:
            needed.add("replica_counts")
        if not needed <= state.keys():
            raise ValueError(
                f"load_state_dict needs what state_dict returned, with {sorted(needed)}; got "
                f"{sorted(state)}."
            )
        shards = state["shards"]
        seeds = [[ShuffleSeed(int(e), int(i)) for e, i in shard["shuffles"]] for shard in shards]
        positions = [Position(*(int(shard[name]) for name in Position._fields)) for shard in shards]
        counts = tuple(map(int, state.get("replica_counts", ())))
        until = [Position(*map(int, at)) for at in state.get("until") or ()] or None
        kind, files = Sharding(state["sharding"]), int(state["files"])
        return cls(kind, files, counts, seeds, positions, until)

    def check_fits(self, sharding: Sharding, nodes: Mapping[int, Node]) -> None:
        """Raise a ValueError if this progress belongs to another input.

        Args:
            sharding: how workers share the input.
            nodes: the pipelines of some of its shards.
        """
        refused = ""
        if self.sharding is not sharding and _APART & {self.sharding, sharding}:
            refused = (
                f"input that workers share by {self.sharding.name}, but they share this one by "
                f"{sharding.name}. Distribute the dataset as it was when the state was saved."
            )
        for shard, node in () if refused else nodes.items():
            have, want = len(self.seeds[shard]), len(seeds_of(node))
            files = number_of_files(node)
            if self.files != files and sharding is not Sharding.FUNCTION:
                refused = (
                    f"a pipeline that reads {count_of(self.files, 'file')}, but this one reads "
                    f"{files}. Pass the same files in the same order."
                )
            elif have != want:
                refused = (
                    f"a pipeline with {count_of(have, 'shuffle')}, but this one has {want}. Build "
                    "the pipeline as it was when the state was saved."
                )
        if refused:
            raise ValueError(f"load_state_dict: the state is of {refused}")


def steps_of(
    topology: Topology, sharding: Sharding, readings: Readings, scale: Fraction
) -> Iterator[PipelineStep]:
    """Yield the steps of this worker from the start positions of its shards.

    Args:
        topology: the replicas of all workers.
        sharding: how the workers share the input.
        readings: the parts of shards that this worker reads.
        scale: the part of a global batch that all workers together take at a step.
    """
    if sharding is Sharding.DATA:
        return _cut(topology, readings, scale)
    pieces = 1 if sharding is Sharding.FUNCTION else max(1, round(topology.num_replicas / scale))
    return _deal(topology.devices, readings, pieces, sharding is Sharding.FILE)


def _again(reading: Reading) -> tuple[list[Element], Reading]:
    """Return the rows of a step that is made again, in parts, and the remaining input."""
    (done, used), until = reading.position[:2], reading.until or reading.position
    parts: list[Element] = []
    if until == reading.position:
        return parts, reading._replace(until=None)
    source = reading.batches()
    for number in range(done, until.batches + (until.rows > 0)):
        batch, start = next(source), used if number == done else 0
        stop = until.rows if number == until.batches else None
        parts.append(batch if stop is None and not start else _rows(batch, start, stop))
        if stop is not None:
            source = chain((batch,), source)
    return parts, reading._replace(position=until, until=None, source=source)


def _cut(topology: Topology, readings: Readings, scale: Fraction) -> Iterator[PipelineStep]:
    """Yield steps of this worker's slices of every global batch."""
    compares = topology.num_workers > 1
    for shard, reading in readings.items():
        loads = any(step.loader is not None for step in upstream(reading.node))
        for number, (after, batch) in enumerate(_taken_from(reading, scale)):
            leaves = tree.flatten(batch)
            length = leading_length(leaves, "distribute_dataset", BATCH_IT)
            pieces = replica_slices(length, topology.replica_counts, topology.worker_index)
            pairs = list(zip(pieces, topology.devices, strict=True))
            # On the CPU these are views.
            parts = [PerReplica([copy_to(leaf[rows], at) for rows, at in pairs]) for leaf in leaves]
            value = tree.unflatten(batch, parts)
            first = _note_of(leaves, digest=loads) if compares and not number else None
            yield PipelineStep(value, {shard: after}, length, first)


def _taken_from(reading: Reading, scale: Fraction) -> Iterator[tuple[Position, Element]]:
    """Yield, for each step, the position after it and the rows that it takes of global batches.

    A step takes a whole batch, but the first step takes the rest of a batch that was begun. If
    `scale` is not 1, a step takes that part of a batch's rows. These rows may come from two
    batches, if the two can be joined.
    """
    if reading.until is not None:
        parts, reading = _again(reading)
        if parts:
            yield reading.position, _joined(parts)
    done, used = reading.position[:2]
    held: list[Element] = []
    size = missing = 0
    for number, batch in enumerate(reading.batches(), done):
        after, length = Position(number + 1), 0
        if scale != 1 or used:
            length = leading_length(tree.flatten(batch), "distribute_dataset", BATCH_IT)
        if scale == 1:
            yield after, _rows(batch, used, length) if used else batch
            used = 0
            continue
        if held and not _joinable(held[-1], batch):
            yield Position(number), _joined(held)
            held, missing = [], size
        size = size or math.ceil(scale * (reading.node.spec.batch_size or length))
        missing = missing or size
        while used < length:
            stop = min(length, used + missing)
            held.append(_rows(batch, used, stop))
            used, missing = stop, missing - (stop - used)
            if not missing:
                yield Position(number, used) if used < length else after, _joined(held)
                held, missing = [], size
        used = 0
    if held:
        yield after, _joined(held)


def _rows(batch: Element, start: int, stop: int | None) -> Element:
    return tree.map_leaves(lambda leaf: leaf[start:stop], batch)


def _joinable(first: Element, other: Element) -> bool:
    """Return True if the rows of two batches have the same structure, kinds and shapes."""
    kinds = ([(x.dtype.kind, x.shape[1:]) for x in tree.flatten(each)] for each in (first, other))
    return tree.same_structure(first, other) and next(kinds) == next(kinds)


def _joined(parts: Sequence[Element]) -> Element:
    """Return the rows of batches as one batch."""
    if len(parts) == 1:
        return parts[0]
    if not all(_joinable(parts[0], part) for part in parts):
        what = "other workers must repeat a step whose batches have different shapes or dtypes"
        raise ValueError(f"{what}: pad all batches to one shape.")
    leading_length(tree.flatten(parts[0]), "distribute_datasets_from_function", COMPLETE_IT)
    columns = zip(*map(tree.flatten, parts), strict=True)
    leaves = [np.concatenate([*map(to_host, column)]) for column in columns]
    return tree.unflatten(parts[0], leaves)


def _note_of(leaves: Sequence[Any], *, digest: bool) -> dict[str, Any]:
    """Return a note that identifies a batch: its dtypes and shapes, and a digest of its values."""
    shapes = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves)
    telling = _telling_order([to_host(leaf) for leaf in leaves]) if digest else ()
    return {"first batch": shapes, "digest of the first batch": list(map(checksum, telling))}


def _telling_order(arrays: Sequence[Any]) -> Sequence[Any]:
    """Return the arrays of a batch whose values identify its rows and their order.

    If there are labels, only these count, because the other arrays may be augmented at random.
    Objects other than text and numbers are left out, because their ``repr`` may contain an address.
    """
    plain = [
        array
        for array in arrays
        if not array.dtype.hasobject
        or all(isinstance(item, str | bytes | Number) for item in array.flat)
    ]
    labels = [array for array in plain if array.ndim == 1 and array.dtype.kind in "biuSUO"]
    return labels or plain


def _deal(
    devices: Sequence[Device], readings: Readings, count: int, of_usual_size: bool
) -> Iterator[PipelineStep]:
    """Yield steps in which each replica gets the next piece of this worker's shards.

    If the first step is made again, it has the same rows of these shards as before; without rows,
    it has no value.
    """
    if any(reading.until for reading in readings.values()):
        again = {shard: _again(reading) for shard, reading in readings.items()}
        readings = {shard: rest for shard, (_, rest) in again.items()}
        parts = [part for parts, _ in again.values() for part in parts]
        if len(parts) > len(devices):
            parts = [piece for _, piece in _pieces(_joined(parts), Position(), len(devices), None)]
        reached = {shard: rest.position for shard, rest in readings.items()}
        yield PipelineStep(_placed(parts, devices) if parts else None, reached)
    source = _dealt(readings, count, of_usual_size)
    while dealt := list(islice(source, len(devices))):
        reached = {shard: position for shard, position, _ in dealt}
        yield PipelineStep(_placed([piece for *_, piece in dealt], devices), reached)


def _placed(pieces: list[Element], devices: Sequence[Device]) -> Any:
    """Return a nest of `PerReplica` of pieces; devices without a piece get an empty one."""
    if missing := len(devices) - len(pieces):
        leaves = tree.flatten(pieces[0])
        leading_length(leaves, "distribute_datasets_from_function", COMPLETE_IT)
        pieces = pieces + [_rows(pieces[0], 0, 0)] * missing
    moves = [functools.partial(copy_to, device=device) for device in devices]
    return tree.regroup([*map(tree.map_leaves, moves, pieces)], PerReplica)


def _dealt(
    readings: Readings, count: int, of_usual_size: bool
) -> Iterator[tuple[int, Position, Element]]:
    """Yield the shard, the position after it and the rows of each piece of this worker's batches.

    A batch is cut into `count` pieces: one for each replica of all workers. With `of_usual_size`, a
    short batch is cut into fewer pieces of the usual size, so that it takes fewer steps.
    """
    for shard, reading in readings.items():
        done, full = reading.position, reading.node.spec.batch_size if of_usual_size else None
        for batch in reading.batches():
            for after, piece in _pieces(batch, done, count, full):
                yield shard, after, piece
                done = after


def _pieces(
    batch: Element, done: Position, count: int, full: int | None
) -> Iterator[tuple[Position, Element]]:
    """Yield, for each remaining piece of a batch, the position after it and its rows.

    If the number of replicas has changed since the first piece, the rest is cut into pieces of
    about the same size.
    """
    if count == 1 and not done.rows:
        yield Position(done.batches + 1), batch
        return
    length = leading_length(tree.flatten(batch), "distribute_dataset", BATCH_IT)
    left = -(-done.left * count // done.of) if done.left else count
    rest = balanced_slices(max(length, full or 0) - done.rows, left)
    used = [piece for piece in rest if full is None or piece.start < length - done.rows] or rest[:1]
    for number, piece in enumerate(used, 1):
        part = slice(piece.start + done.rows, min(piece.stop + done.rows, length))
        within = Position(done.batches, part.stop, left - number, count)
        after = within if number < len(used) else Position(done.batches + 1)
        yield after, tree.map_leaves(lambda leaf, part=part: leaf[part], batch)


@functools.lru_cache(maxsize=256)
def balanced_slices(length: int, parts: int) -> tuple[slice, ...]:
    """Return contiguous slices of ``length`` rows; the first ``length % parts`` have one row more.

    >>> [piece.stop - piece.start for piece in balanced_slices(4, 3)]
    [2, 1, 1]
    """
    size, longer = divmod(length, parts)
    bounds = [part * size + min(part, longer) for part in range(parts + 1)]
    return tuple(slice(start, stop) for start, stop in pairwise(bounds))


def replica_slices(
    length: int, replica_counts: Sequence[int], worker_index: int
) -> tuple[slice, ...]:
    """Return the slices of a global batch for the replicas of one worker.

    The slices depend only on the replicas of all workers together, so the result of a step does not
    depend on how the replicas are divided among processes.

    >>> replica_slices(5, replica_counts=(1, 3), worker_index=1)
    (slice(2, 3, None), slice(3, 4, None), slice(4, 5, None))
    """
    first = sum(replica_counts[:worker_index])
    pieces = balanced_slices(length, sum(replica_counts))
    return pieces[first : first + replica_counts[worker_index]]
