"""`WaitingRoom`: requests that are answered later: at a barrier, for a gradient, for a token.

Each place (a barrier, an accumulator, a queue, a step, a clock) has its own line. Who takes what
others want is served first come, first served; who only waits for something to be so, as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ndistribute.cluster.protocol.replies import Failure, Released, Reply, Step, Token
from ndistribute.cluster.protocol.requests import (
    AwaitClock,
    AwaitStep,
    Barrier,
    Dequeue,
    TakeGradient,
    Waiting,
)
from ndistribute.cluster.store.clocks import Clocks
from ndistribute.cluster.store.groups import Groups
from ndistribute.cluster.store.refusal import Refused
from ndistribute.cluster.store.state import State

__all__ = ["Place", "Wait", "WaitingRoom"]

Place = tuple[str, str]  # The kind of what is waited for, and its name.
_SUPERSEDED = Failure("superseded", "the same client asked again; that call gets the answer.")


@dataclass(frozen=True, slots=True)
class Wait:
    """A call that waits, and what it asked."""

    client: str
    ticket: int
    request: Waiting


Served = tuple[Wait, Reply]
_Line = dict[tuple[str, int], Wait]


class WaitingRoom:
    """Hold what waits, by place."""

    def __init__(self, state: State, groups: Groups, clocks: Clocks) -> None:
        self._state = state
        self._groups = groups
        self._clocks = clocks
        self._lines: dict[Place, _Line] = {}
        self._counts: dict[str, int] = {}

    def count(self, series: str) -> int:
        """Return how many requests of a series wait."""
        return self._counts.get(series, 0)

    def ask_again(self, client: str, ticket: int, request: Waiting) -> list[Served] | None:
        """Let a repeated call wait in its first one's place; None if that does not wait."""
        line = self._lines.get(place_of(request), {})
        key = _key(request)
        if key not in line:
            return None
        first, line[key] = line[key], Wait(client, ticket, line[key].request)
        if (first.client, first.ticket) == (client, ticket):
            return []
        return [(first, _SUPERSEDED)]

    def arrive(self, client: str, ticket: int, request: Waiting) -> list[Served]:
        """Let a new request wait, and return what can be answered now: it or others.

        Raises:
            Refused: the request makes no sense.
        """
        place = place_of(request)
        line = self._lines.get(place, {})
        self._check(place, request)
        served: list[Served] = []
        if isinstance(request, Barrier | AwaitClock):
            served = self._meet(line, request, client, ticket)
            if served and served[0][0].ticket == ticket and served[0][0].client == client:
                return served
        if isinstance(request, AwaitClock):
            self._clocks.arrive(client, request)
        self._lines.setdefault(place, line)[_key(request)] = Wait(client, ticket, request)
        self._tally(request, 1)
        return served + self.serve(place)

    def serve(self, place: Place) -> list[Served]:
        """Return the requests of a place that can be answered now, which wait no longer."""
        line = self._lines.get(place)
        if line is None:
            return []
        answers = [(line.pop(key), reply) for key, reply in self._ready(line).items()]
        if not line:
            del self._lines[place]
        for wait, _ in answers:
            self._tally(wait.request, -1)
        return answers

    def serve_all(self) -> list[Served]:
        """Return all requests that can be answered now."""
        return [served for place in list(self._lines) for served in self.serve(place)]

    def dismiss(self, client: str) -> list[Served]:
        """Answer what a client that left waits for, and a series of its name."""
        why = Failure("left", f"{client!r} left, or was given up.")
        return self._dismiss(lambda wait: client in (wait.client, wait.request.origin.series), why)

    def dismiss_up_to(self, series: str, number: int) -> list[Served]:
        """Answer what a series waits for up to a number: nobody wants it any more."""
        why = Failure("acknowledged", "this number was acknowledged while it was waited for.")

        def is_old(wait: Wait) -> bool:
            origin = wait.request.origin
            return origin.series == series and origin.number <= number

        return self._dismiss(is_old, why) if self.count(series) else []

    def _dismiss(self, chosen: Callable[[Wait], bool], why: Failure) -> list[Served]:
        served: list[Served] = []
        for place, line in list(self._lines.items()):
            for key, wait in list(line.items()):
                if chosen(wait):
                    del line[key]
                    self._tally(wait.request, -1)
                    served.append((wait, why))
            if not line:
                del self._lines[place]
        return served

    def _check(self, place: Place, request: Waiting) -> None:
        """Check that what a request waits for can come."""
        if isinstance(request, AwaitStep):
            if request.name not in self._state.aggregates and not self._state.restored:
                raise Refused("unknown", f"nobody gave anything to aggregate {request.name!r} yet.")
        elif not isinstance(request, Dequeue) and request.count < 1:
            raise Refused("mismatch", f"{place[0]} {place[1]!r} can not wait for {request.count}.")

    def _meet(
        self, line: _Line, request: Barrier | AwaitClock, client: str, ticket: int
    ) -> list[Served]:
        """Let a series stand at a barrier or clock once, with its highest number."""
        for wait in line.values():
            if not isinstance(wait.request, type(request)) or wait.request.count != request.count:
                raise Refused(
                    "mismatch",
                    f"{client!r} waits at {request.name!r} for {request.count}, {wait.client!r} "
                    "for another number; all must say the same.",
                )
        series, number = _key(request)
        for key, wait in list(line.items()):
            if key[0] == series and key[1] > number:
                return [(Wait(client, ticket, request), _SUPERSEDED)]
            if key[0] == series:
                del line[key]
                self._tally(wait.request, -1)
                return [(wait, _SUPERSEDED)]
        return []

    def _ready(self, line: _Line) -> dict[tuple[str, int], Reply]:
        """Return what those of a line get who wait no longer."""
        ready: dict[tuple[str, int], Reply] = {}
        blocked = False
        for key, wait in line.items():
            reply = None if blocked else self._next(wait, len(line))
            missing = self._missing(wait.request) if reply is None else None
            if missing is not None:
                reply = Failure("left", missing)
            if reply is not None:
                ready[key] = reply
            elif isinstance(wait.request, TakeGradient | Dequeue):
                blocked = True  # Nobody takes what an earlier one waits for.
        return ready

    def _next(self, wait: Wait, waiting: int) -> Reply | None:
        """Return what a request gets, None if it is not there yet."""
        request = wait.request
        match request:
            case Barrier():
                return Released(waiting) if waiting >= request.count else None
            case Dequeue():
                queue = self._state.queues.get(request.name)
                return Token(queue.popleft()) if queue else None
            case TakeGradient():
                held = self._state.accumulators.get(request.name)
                return held.take() if held is not None and held.count >= request.count else None
            case AwaitStep():
                return self._step(request)
            case AwaitClock():
                count = self._clocks.reached(wait.client, request)
                return Released(count) if count is not None else None

    def _step(self, request: AwaitStep) -> Step | None:
        held = self._state.aggregates.get(request.name)
        step = held.step if held is not None else 0
        if step >= request.step:
            return Step(step)
        gave = held is not None and request.origin.series in held.givers
        if self._state.restored and not (gave and request.step == step + 1):
            return Step(step)  # What it gave for that step went with an earlier life: see there.
        return None

    def _missing(self, request: Waiting) -> str | None:
        if isinstance(request, AwaitClock):
            return None
        return self._groups.what_is_missing(request.quorum)

    def _tally(self, request: Waiting, by: int) -> None:
        series = request.origin.series
        self._counts[series] = self._counts.get(series, 0) + by
        if not self._counts[series]:
            del self._counts[series]


def place_of(request: Waiting) -> Place:
    """Return what a request waits for."""
    match request:
        case Barrier():
            return "barrier", request.name
        case TakeGradient():
            return "accumulator", request.name
        case Dequeue():
            return "queue", request.name
        case AwaitStep():
            return "step", request.name
        case AwaitClock():
            return "clock", request.name


def _key(request: Waiting) -> tuple[str, int]:
    return request.origin.series, request.origin.number
