"""`WaitingRoom`: requests that are answered later: at a barrier, for a gradient, for a token.

Each place (a barrier, an accumulator, a queue) has its own line, served first come, first served.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ndistribute.cluster.replies import Failure, Released, Reply, Token
from ndistribute.cluster.requests import Barrier, Dequeue, TakeGradient, Waiting
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


class WaitingRoom:
    """Hold what waits, by place."""

    def __init__(self, state: State, groups: Groups) -> None:
        self._state = state
        self._groups = groups
        self._lines: dict[Place, dict[tuple[str, int], Wait]] = {}
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
        needed = 1 if isinstance(request, Dequeue) else request.count
        if needed < 1:
            raise Refused("mismatch", f"{place[0]} {place[1]!r} can not wait for {needed}.")
        served: list[Served] = []
        if isinstance(request, Barrier):
            served = self._meet(line, request, client, ticket)
            if served and served[0][0].ticket == ticket and served[0][0].client == client:
                return served
        self._lines.setdefault(place, line)[_key(request)] = Wait(client, ticket, request)
        self._tally(request, 1)
        return served + self.serve(place)

    def serve(self, place: Place) -> list[Served]:
        """Return the requests of a place that can be answered now, which wait no longer."""
        line = self._lines.get(place)
        if line is None:
            return []
        served: list[Served] = []
        if place[0] == "barrier":
            served = self._release(line)
        while line and place[0] != "barrier":
            first = next(iter(line.values()))
            reply = self._next(first.request)
            if reply is None:
                break
            served.append((first, reply))
            del line[_key(first.request)]
        for key, wait in list(line.items()):
            missing = self._groups.what_is_missing(wait.request.quorum)
            if missing is not None:
                served.append((wait, Failure("left", missing)))
                del line[key]
        if not line:
            del self._lines[place]
        for wait, _ in served:
            self._tally(wait.request, -1)
        return served

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

    def _meet(
        self, line: dict[tuple[str, int], Wait], request: Barrier, client: str, ticket: int
    ) -> list[Served]:
        """Let a series stand at a barrier once, with its highest number."""
        for wait in line.values():
            if isinstance(wait.request, Barrier) and wait.request.count != request.count:
                raise Refused(
                    "mismatch",
                    f"{wait.client!r} waits at barrier {request.name!r} for {wait.request.count}, "
                    f"{client!r} for {request.count}; all must say the same.",
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

    def _release(self, line: dict[tuple[str, int], Wait]) -> list[Served]:
        waits = list(line.values())
        request = waits[0].request if waits else None
        if not isinstance(request, Barrier) or len(waits) < request.count:
            return []
        line.clear()
        return [(wait, Released(len(waits))) for wait in waits]

    def _next(self, request: Waiting) -> Reply | None:
        """Return what the first of a line gets, None if it is not there yet."""
        if isinstance(request, Dequeue):
            queue = self._state.queues.get(request.name)
            return Token(queue.popleft()) if queue else None
        accumulator = self._state.accumulators.get(request.name)
        if accumulator is None or isinstance(request, Barrier) or accumulator.count < request.count:
            return None
        return accumulator.take()

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


def _key(request: Waiting) -> tuple[str, int]:
    return request.origin.series, request.origin.number
