"""What a worker does with a coordinator's requests: it queues closures, and keeps their outcomes.

Each coordinator has its own conversation, with its functions, datasets and outcomes; all of them
share the one thread that runs closures. An outcome is kept until the next turn says that it came.
"""

from __future__ import annotations

import functools
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ndistribute.cluster.coordination.executor import Executor, Function, Resources, run
from ndistribute.cluster.coordination.worker_requests import (
    Collect,
    Exchange,
    Forgotten,
    Hello,
    Outcome,
    Outcomes,
    Run,
    Welcome,
    WorkerReply,
    WorkerRequest,
    decode_worker_request,
)
from ndistribute.cluster.wire import records
from ndistribute.cluster.wire.tensors import Buffer

__all__ = ["INLINE_BYTES", "MAXIMUM_FUNCTIONS", "WorkerDesk"]

MAXIMUM_FUNCTIONS = 256
"""So many functions a worker keeps for a coordinator; both sides know which one makes way."""
INLINE_BYTES = 1 << 20
"""What is longer is answered, or sent, by a request that does nothing else."""
_END_SECONDS = 2.0
_Replies = list[tuple[int, WorkerReply]]


@dataclass
class _Conversation:
    """Keep what belongs to one coordinator."""

    name: str
    functions: dict[str, Function] = field(default_factory=dict)
    resources: Resources = field(default_factory=Resources)
    fresh: list[Outcome] = field(default_factory=list)  # What no answer has brought home yet.
    sent: dict[int, Outcome] = field(default_factory=dict)  # What this turn's answer holds.
    turn: int = 0
    reply: Outcomes | None = None  # To this turn; None while it waits.
    ticket: int = 0
    unfinished: int = 0
    idle: bool = False  # Whether nothing was left to run when this turn began.
    over: bool = False


class WorkerDesk:
    """Answer coordinators: run their closures, one at a time.

    Args:
        name: how this worker is called.
        message_bytes: the longest message.
        result_bytes: the longest result.
    """

    def __init__(
        self, name: str, message_bytes: int = 4 << 30, result_bytes: int = 256 << 20
    ) -> None:
        self._limit = message_bytes
        self._result_limit = result_bytes
        self._executor = Executor(f"ndistribute {name} closures")
        self._lock = threading.Lock()
        self._deliver: Callable[[Sequence[tuple[int, WorkerReply]]], None] = _nobody
        self._conversations: dict[str, _Conversation] = {}

    def bind(self, deliver: Callable[[Sequence[tuple[int, WorkerReply]]], None]) -> None:
        """Learn where to bring what is known only later."""
        self._deliver = deliver

    def read(self, message: memoryview) -> WorkerRequest:
        """Return the request that a message holds."""
        # Functions and arguments are kept until they are run, which may be after the answer.
        return decode_worker_request(bytes(message), self._limit)

    def handle(self, client: str, ticket: int, request: WorkerRequest) -> _Replies:
        """Do what a request asks."""
        with self._lock:
            if isinstance(request, Hello):
                self._end(client)
                talk = self._conversations[client] = _Conversation(secrets.token_hex(8))
                return [(ticket, Welcome(talk.name))]
            found = self._conversations.get(client)
            if found is None or found.name != request.conversation:
                return [(ticket, Forgotten())]
            if isinstance(request, Collect):
                outcome = found.sent.get(request.number)
                return [(ticket, Forgotten() if outcome is None else Outcomes((outcome,)))]
            return self._exchange(found, ticket, request)

    def leave(self, client: str, died: bool) -> _Replies:
        """Forget a coordinator; what runs for it now ends by itself."""
        with self._lock:
            self._end(client)
        return []

    def write(self, reply: WorkerReply) -> Sequence[Buffer]:
        """Return a reply as buffers."""
        return records.encode(reply)

    def shared_file(self) -> int | None:
        """Return None: a worker shares no memory."""
        return None

    def close(self) -> None:
        """Run nothing any more."""
        with self._lock:
            for client in list(self._conversations):
                self._end(client)
        self._executor.close(_END_SECONDS)

    def _end(self, client: str) -> None:
        talk = self._conversations.pop(client, None)
        if talk is not None:
            talk.over = True

    def _exchange(self, talk: _Conversation, ticket: int, request: Exchange) -> _Replies:
        if request.turn == talk.turn:  # Asked again: the answer was lost, or is still to come.
            talk.ticket = ticket
            return [] if talk.reply is None else [(ticket, talk.reply)]
        if request.turn != talk.turn + 1:
            return [(ticket, Forgotten())]
        talk.turn, talk.ticket, talk.reply, talk.sent = request.turn, ticket, None, {}
        talk.idle = not talk.unfinished
        talk.unfinished += len(request.runs)
        for pickled in request.functions:
            talk.functions[pickled.digest] = Function(pickled)
        if request.forgotten:
            self._executor.submit(functools.partial(talk.resources.forget, request.forgotten))
        for order in request.runs:
            functions = {digest: talk.functions[digest] for digest in order.functions}
            self._executor.submit(functools.partial(self._run, talk, order, functions))
        while len(talk.functions) > MAXIMUM_FUNCTIONS:
            del talk.functions[next(iter(talk.functions))]
        return self._answer(talk, at_once=not request.wait)

    def _run(self, talk: _Conversation, order: Run, functions: dict[str, Function]) -> None:
        if talk.over:
            return
        outcome = run(order, functions, talk.resources, self._result_limit)
        with self._lock:
            talk.fresh.append(outcome)
            talk.unfinished -= 1
            waits = talk.reply is None and not talk.over
            replies = self._answer(talk) if waits else []
        self._deliver(replies)  # Without the lock: who delivers may be about to ask this desk.

    @staticmethod
    def _answer(talk: _Conversation, at_once: bool = False) -> _Replies:
        """Return the answer to the present turn, if there is one."""
        if not talk.fresh and not at_once:
            return []
        talk.sent = {outcome.number: outcome for outcome in talk.fresh}
        talk.reply = Outcomes(tuple(_announced(outcome) for outcome in talk.fresh), talk.idle)
        talk.fresh = []
        return [(talk.ticket, talk.reply)]


def _announced(outcome: Outcome) -> Outcome:
    """Return an outcome without its value where that is long."""
    if outcome.nbytes <= INLINE_BYTES:
        return outcome
    return replace(outcome, value=None)


def _nobody(replies: Sequence[tuple[int, WorkerReply]]) -> None:
    """Deliver to nobody: the desk is not bound yet."""
