"""One pass of a worker over a distributed dataset, which can be left and taken up at any step.

It counts what the consumer got, never what a background thread has made ahead. Where only each
worker knows when its data ends, it agrees with the others at every step, and a worker that has run
out takes part with empty pieces until all have.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ndistribute.collective.objects import ProcessGroup
from ndistribute.context import current_frame
from ndistribute.data.agreement import Report, agree, share_template
from ndistribute.data.beginning import begin
from ndistribute.data.elements import Element
from ndistribute.data.pipeline import Node, Pass
from ndistribute.data.places import Place
from ndistribute.data.policies import Sharding
from ndistribute.data.prefetch import Prefetched
from ndistribute.data.progress import Progress
from ndistribute.data.steps import (
    CutBatches,
    DealPieces,
    Step,
    empty_step,
    template_of,
)
from ndistribute.timeline import recorded

__all__ = ["DistributedIterator", "steps_of"]


def steps_of(place: Place, sharding: Sharding) -> CutBatches | DealPieces:
    """Return how a worker makes steps of its shards."""
    if sharding is Sharding.DATA:
        return CutBatches(place.devices, place.replica_counts, place.worker_index)
    if sharding is Sharding.FUNCTION:
        return DealPieces(place.devices)
    return DealPieces(place.devices, place.num_replicas, fills=sharding is Sharding.FILE)


class DistributedIterator(Iterator[Any]):
    """Iterate over a `DistributedDataset` once, from any step on.

    >>> import numpy as np
    >>> import ndistribute as nd
    >>> dataset = nd.Dataset.range(6).shuffle(6, seed=1).batch(2)
    >>> dataset = nd.get_strategy().distribute_dataset(dataset)
    >>> iterator = iter(dataset)
    >>> _ = next(iterator)
    >>> state = iterator.state_dict()
    >>> resumed = iter(dataset)
    >>> resumed.load_state_dict(state)
    >>> all(np.array_equal(a, b) for a, b in zip(iterator, resumed, strict=True))
    True
    """

    def __init__(self, node: Node, place: Place, sharding: Sharding, depth: int) -> None:
        self._node = node
        self._place = place
        self._depth = depth
        self._pass, self._progress = begin(node, place, sharding)
        self._own = self._progress
        self._template: Element | None = None
        self._over = False
        # Made when the first step is asked for, so that a state can be loaded at no cost.
        self._source: Iterator[Step] | None = None

    @recorded(lambda *_: ("input", ""))
    def __next__(self) -> Any:
        if current_frame().replica is not None:
            raise RuntimeError(
                "next was called on a distributed dataset inside a replica, where each replica "
                "would take another batch. Take it outside, batch = next(iterator), and pass it: "
                "strategy.run(step, args=(batch,))."
            )
        if self._over:
            raise StopIteration
        try:
            if self._source is None:
                self._source = self._open()
            workers = self._meeting()
            if workers is None:
                return self._step(self._source)
            return self._joint_step(self._source, workers)
        except BaseException:
            self.close()
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return where the consumer is, as plain values.

        Returns:
            How the input is shared, and for each shard how far it has been consumed and what its
            shuffles drew. It is the same on every worker, where the workers can meet.
        """
        return self._progress.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where an iterator over an equal pipeline was, with exactly the batches it had left.

        The number of workers and of replicas may be another. Every worker loads the same state; the
        rest of the epoch is shared as it was begun. Later iterations follow on the resumed one.

        Args:
            state: what `state_dict` returned, in this process or another.

        Raises:
            ValueError: the state is of another pipeline, or of input that can not be dealt anew.
        """
        progress = Progress.of_state(state).fit(self._own)
        if progress.sharding is Sharding.FILE and self._place.num_workers > 1:
            self._check_meeting()
        self.close()
        shards = progress.shards_of(self._place.worker_index, self._place.num_workers)
        self._pass = Pass.resume(self._node, progress.draws[shards[0] if shards else 0])
        self._progress = progress
        self._source = None
        self._over = False

    def close(self) -> None:
        """End the iteration and its threads."""
        self._pass.threads.close()
        self._over = True

    def _meeting(self) -> ProcessGroup | None:
        """Return how workers agree on each step; None where they need not, or can not."""
        return None if self._progress.sharding is Sharding.DATA else self._place.workers

    def _step(self, source: Iterator[Step]) -> Any:
        step = next(source)
        self._progress.advance(step.reached)
        if self._progress.sharding in (Sharding.OFF, Sharding.FUNCTION):
            # Nobody says how far the others are: they are taken to go at the same pace.
            position = step.reached[self._place.worker_index]
            self._progress.positions[:] = [position] * self._place.num_workers
        return step.value

    def _joint_step(self, source: Iterator[Step], workers: ProcessGroup) -> Any:
        """Take the next step of this worker's, and agree with the others on whether there is one.

        An error takes part too, so that the others do not wait for a worker that has raised.
        """
        step, failure = None, None
        try:
            step = next(source, None)
        except Exception as error:
            failure = error
        if step is not None and self._template is None:
            self._template = template_of(step.value)
        reached = None if step is None else step.reached
        lost = step is None and self._template is None
        outcome = agree(workers, Report(reached, lost, failed=failure is not None))
        if failure is not None:
            raise failure
        if outcome.over:
            raise StopIteration
        if outcome.needs_template:
            self._template = share_template(workers, self._template)
        self._progress.advance(outcome.reached)
        return empty_step(self._template, self._place.devices) if step is None else step.value

    def _open(self) -> Iterator[Step]:
        progress, place = self._progress, self._place
        passes = {
            shard: (self._part(shard), progress.positions[shard])
            for shard in progress.shards_of(place.worker_index, place.num_workers)
        }
        source = steps_of(place, progress.sharding).iterate(self._node, passes)
        if self._depth == 0:
            return source
        ahead = Prefetched(source, self._depth)
        self._pass.threads.add(ahead.queue)
        return ahead

    def _part(self, shard: int) -> Pass:
        if self._progress.sharding is not Sharding.FILE:
            return self._pass
        return self._pass.part(shard, len(self._progress.positions))

    def _check_meeting(self) -> None:
        if self._place.workers is None:
            raise ValueError(
                "load_state_dict: the state is of files that workers shared, so the workers must "
                "tell each other when they end: pass their communicator as workers."
            )
