"""Where an epoch is: what each shard's shuffles drew, and how far each shard has been consumed.

It is what an iterator's state holds, in full on every worker, so the state of one worker serves
any number of them: shards begun by workers that are gone are finished by those that are there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ndistribute.data.pipeline import Draw
from ndistribute.data.policies import Sharding
from ndistribute.data.steps import Position

__all__ = ["Progress"]


@dataclass
class Progress:
    """Hold the shards of an epoch.

    Args:
        sharding: what the shards are.
        files: how many files the pipeline reads.
        draws: of each shard, what its shuffles drew.
        positions: of each shard, how far it has been consumed.
    """

    sharding: Sharding
    files: int
    draws: list[list[Draw]]
    positions: list[Position]

    def shards_of(self, worker_index: int, num_workers: int) -> Sequence[int]:
        """Return the shards that a worker goes through, in order."""
        if self.sharding is Sharding.DATA:
            return (0,)
        return range(worker_index, len(self.positions), num_workers)

    def advance(self, reached: Mapping[int, Position]) -> None:
        """Move shards to the positions that a step reaches."""
        for shard, position in reached.items():
            self.positions[shard] = position

    def state_dict(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        return {
            "sharding": self.sharding.value,
            "files": self.files,
            "shards": [
                {**position._asdict(), "shuffles": [list(draw) for draw in draws]}
                for position, draws in zip(self.positions, self.draws, strict=True)
            ],
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Progress:
        """Return what a state holds.

        Raises:
            ValueError: it is no state.
        """
        if not {"sharding", "files", "shards"} <= state.keys():
            raise ValueError(
                "load_state_dict needs what state_dict returned, with 'sharding', 'files' and "
                f"'shards'; got {sorted(state)}."
            )
        shards = state["shards"]
        return cls(
            Sharding(state["sharding"]),
            int(state["files"]),
            [[Draw(int(e), int(i)) for e, i in shard["shuffles"]] for shard in shards],
            [Position(*(int(shard[name]) for name in Position._fields)) for shard in shards],
        )

    def fit(self, own: Progress) -> Progress:
        """Return this progress as an iterator takes it over.

        Args:
            own: the iterator's, at the begin of an epoch.

        Raises:
            ValueError: it is of another pipeline, or divided in a way that can not be gone on with.
        """
        if self.files != own.files:
            raise ValueError(
                f"load_state_dict: the state is of a pipeline of {self.files} file(s), this one "
                f"reads {own.files}. Give it the same files in the same order."
            )
        by_worker = {Sharding.OFF, Sharding.FUNCTION}
        if self.sharding is not own.sharding and by_worker & {self.sharding, own.sharding}:
            raise ValueError(
                f"load_state_dict: the state is of input that workers share by "
                f"{self.sharding.name}, this one by {own.sharding.name}. Distribute the dataset as "
                "it was when the state was saved."
            )
        saved, now = len(self.positions), len(own.positions)
        if self.sharding is Sharding.FUNCTION and saved != now:
            raise ValueError(
                f"load_state_dict: the state is of {saved} worker(s), each with the dataset that "
                f"its function made, and there are {now} now. What they have left can not be dealt "
                f"anew: go on with {saved}, or use distribute_dataset."
            )
        fitted = self._for_workers(now) if self.sharding is Sharding.OFF else self
        have, want = ([len(draws) for draws in each.draws] for each in (fitted, own))
        if have != want[:1] * len(have) and have != want:
            raise ValueError(
                f"load_state_dict: the state is of a pipeline with {have[0]} shuffle(s), this one "
                f"has {want[0]}. Build the pipeline as it was when the state was saved."
            )
        return fitted

    def _for_workers(self, count: int) -> Progress:
        """Return the progress of workers of which each goes through everything."""
        chosen = [worker % len(self.positions) for worker in range(count)]
        return Progress(
            self.sharding,
            self.files,
            [self.draws[number] for number in chosen],
            [self.positions[number] for number in chosen],
        )
