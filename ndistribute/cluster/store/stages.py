"""`Stages`: changes of closures that are not committed yet, kept aside.

Each attempt at a closure has its own, for a worker that was given up may still be at it while
another runs the closure again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ndistribute.cluster.requests import Change, Origin
from ndistribute.cluster.store.limits import Limits
from ndistribute.cluster.store.origins import bytes_in
from ndistribute.cluster.store.refusal import Refused

__all__ = ["Stage", "Stages"]

# About what a change takes beside its arrays, so that many small ones are bounded as well.
_PART_BYTES = 512


@dataclass
class Stage:
    """Hold the changes of an attempt by their part; None in their place once it was given up."""

    client: str
    parts: dict[int, Change] | None = field(default_factory=dict)


class Stages:
    """Hold stages by series, number and attempt."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.by_closure: dict[tuple[str, int], dict[int, Stage]] = {}
        self._nbytes = 0

    def add(self, client: str, origin: Origin, part: int, change: Change) -> None:
        """Keep a part of a closure, unless it is here already.

        Raises:
            Refused: the attempt was given up, is another client's, or there is no room.
        """
        stage = self._stage(origin, client)
        if stage.parts is None:
            raise Refused("incomplete", f"{_name(origin)} was abandoned.")
        if stage.client != client or part < 0:
            raise Refused(
                "mismatch", f"{_name(origin)} is run by {stage.client!r}, {client!r} sent a part."
            )
        if part in stage.parts:
            return
        self._charge(_PART_BYTES + bytes_in(change))
        stage.parts[part] = change

    def complete(self, origin: Origin, parts: int) -> list[Change]:
        """Return the changes of an attempt in their order.

        Raises:
            Refused: some are missing.
        """
        stage = self.by_closure.get((origin.series, origin.number), {}).get(origin.attempt)
        held = (stage.parts if stage is not None else None) or {}
        if held.keys() != set(range(parts)):
            raise Refused(
                "incomplete",
                f"{_name(origin)} has {len(held)} of {parts} part(s) here, so nothing of it was "
                "made; run it again as a new attempt.",
            )
        return [held[part] for part in range(parts)]

    def abandon(self, origin: Origin) -> None:
        """Drop an attempt, and what may still come of it."""
        stage = self._stage(origin, "")
        self._nbytes -= _bytes_in_parts(stage)
        stage.parts = None

    def forget(self, series: str, number: int) -> None:
        """Drop all attempts at a closure, which is settled."""
        for stage in self.by_closure.pop((series, number), {}).values():
            self._release(stage)

    def forget_up_to(self, series: str, number: int) -> None:
        """Drop all attempts at the closures of a series up to a number."""
        for held, at in list(self.by_closure):
            if held == series and at <= number:
                self.forget(held, at)

    def leave(self, client: str) -> None:
        """Drop what a client keeps here, and the closures of a series of its name."""
        for (series, number), attempts in list(self.by_closure.items()):
            if series == client:
                self.forget(series, number)
                continue
            for attempt in [key for key, stage in attempts.items() if stage.client == client]:
                self._release(attempts.pop(attempt))
            if not attempts:
                del self.by_closure[series, number]

    def restore(
        self, closure: tuple[str, int], attempt: int, client: str, parts: dict[int, Change] | None
    ) -> None:
        """Hold what a snapshot holds of an attempt."""
        stage = Stage(client, parts)
        self.by_closure.setdefault(closure, {})[attempt] = stage
        self._nbytes += _PART_BYTES + _bytes_in_parts(stage)

    def _stage(self, origin: Origin, client: str) -> Stage:
        attempts = self.by_closure.get((origin.series, origin.number), {})
        stage = attempts.get(origin.attempt)
        if stage is None:
            self._charge(_PART_BYTES)
            self.by_closure[origin.series, origin.number] = attempts
            stage = attempts[origin.attempt] = Stage(client)
        return stage

    def _charge(self, nbytes: int) -> None:
        if self._nbytes + nbytes > self._limits.staged_bytes:
            raise Refused(
                "full", f"closures under way hold {self._nbytes} bytes; wait until some end."
            )
        self._nbytes += nbytes

    def _release(self, stage: Stage) -> None:
        self._nbytes -= _PART_BYTES + _bytes_in_parts(stage)


def _bytes_in_parts(stage: Stage) -> int:
    parts = stage.parts or {}
    return sum(_PART_BYTES + bytes_in(change) for change in parts.values())


def _name(origin: Origin) -> str:
    return f"attempt {origin.attempt} at closure {origin.number} of {origin.series!r}"
