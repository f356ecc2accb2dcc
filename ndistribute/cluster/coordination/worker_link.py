"""A coordinator's end of the conversation with one worker, on a thread of its own.

The thread takes closures, sends them, waits for outcomes, and notices when the worker is gone: its
closures go to others then, and the thread waits for its return.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Sequence

from ndistribute.cluster.coordination.closures import MOST_INPUTS, Closure
from ndistribute.cluster.coordination.dispatch import Dispatch
from ndistribute.cluster.coordination.pickles import Pickled, load
from ndistribute.cluster.coordination.worker_desk import INLINE_BYTES, MAXIMUM_FUNCTIONS
from ndistribute.cluster.coordination.worker_requests import (
    Collect,
    Exchange,
    Hello,
    Outcome,
    Outcomes,
    Run,
    Welcome,
    WorkerReply,
    decode_worker_reply,
)
from ndistribute.cluster.links.totals import Report
from ndistribute.cluster.wire import records
from ndistribute.cluster.wire.client import Client
from ndistribute.cluster.wire.tensors import Buffer, MalformedError
from ndistribute.errors import CollectiveTimeoutError, DistributeError, WorkerLostError

__all__ = ["WorkerLink"]

_ROUND_SECONDS = 1.0  # So long a worker may be silent before it is asked whether it is there.
_MISSED_SECONDS = 0.1  # So long one is looked for that is not reached: its process is gone, mostly.
_BYTES_A_SECOND = 10e6  # Longer messages may take longer: by what a slow network carries.
_LONG_SECONDS = 0.02  # Beside this a round trip is nothing, so no closure is sent in advance.
_USUAL_DEPTH, _MOST_DEPTH = 2, 8  # How many closures a worker has where it is faster.
_END_SECONDS = 5.0
_FORGOTTEN_TOGETHER = 1000
_LIMIT_BYTES = 4 << 30
_log = logging.getLogger("ndistribute")


class WorkerLink:
    """Keep one worker busy.

    Args:
        index: of the worker.
        name: how it is called.
        client: of the worker; closed with this.
        dispatch: where closures come from.
        series: in which they are numbered.
        learn: takes what the worker knows of the servers.
        silence_seconds: after how long without a word the worker counts as lost.
    """

    def __init__(
        self,
        index: int,
        name: str,
        client: Client,
        dispatch: Dispatch,
        series: str,
        learn: Callable[[Sequence[Report]], None],
        silence_seconds: float,
    ) -> None:
        self._index = index
        self._name = name
        self._client = client
        self._dispatch = dispatch
        self._series = series
        self._learn = learn
        self._silence = silence_seconds
        self._round = min(_ROUND_SECONDS, silence_seconds / 4)
        self._conversation = ""
        self._turn = 0
        self._depth = 1
        self._known: dict[str, None] = {}  # The functions that the worker keeps, as it does.
        self._flying: dict[int, Closure] = {}
        self.forgotten: collections.deque[int] = collections.deque()
        self._thread = threading.Thread(target=self._serve, name=f"ndistribute {name}", daemon=True)

    def start(self) -> None:
        """Look for the worker."""
        self._thread.start()

    def close(self) -> None:
        """Let the worker go; the dispatch is closed already."""
        self._client.close()
        if self._thread.is_alive():
            self._thread.join(timeout=_END_SECONDS)

    def _serve(self) -> None:
        while not self._dispatch.closing.is_set():
            if not self._conversation and not self._meet():
                continue
            taken = self._dispatch.take(self._index, self._depth, wait=not self._flying)
            if not taken and not self._flying:
                continue
            self._flying.update((closure.number, closure) for closure in taken)
            try:
                outcomes = self._exchange(taken)
            except (DistributeError, MalformedError, TimeoutError) as error:
                self._lose(error)
            except Exception as error:  # What is to be sent is too long, say.
                for closure in taken:
                    self._dispatch.fail(self._index, closure, error)
                self._lose(error)
            else:
                for outcome in outcomes:
                    self._finish(outcome)

    def _meet(self) -> bool:
        """Begin a conversation; say whether the worker is there."""
        begun = time.monotonic()
        try:
            reply = self._request(records.encode(Hello()), self._round)
        except Exception as error:
            self._dispatch.absent(self._index, error)
            self._dispatch.closing.wait(timeout=begun + self._round / 4 - time.monotonic())
            return False
        if not isinstance(reply, Welcome):
            return False
        self._conversation, self._turn = reply.conversation, 0
        self._known.clear()
        self.forgotten.clear()
        self._dispatch.arrived(self._index)
        _log.info("%s is there", self._name)
        return True

    def _lose(self, problem: Exception) -> None:
        self._conversation = ""
        self._flying.clear()
        self._dispatch.lost(self._index, problem)

    def _exchange(self, taken: Sequence[Closure]) -> list[Outcome]:
        """Send closures, and return at least one outcome."""
        long = sum(self._nbytes(closure) for closure in taken) > INLINE_BYTES
        if long or sum(len(closure.inputs) for closure in taken) > MOST_INPUTS:
            # Each by itself, answered at once: it is not sent again while it runs.
            found = [self._ask_for_outcomes((closure,), wait=False) for closure in taken]
        else:
            found = [self._ask_for_outcomes(taken, wait=True)]
        if not any(found):
            found = [self._ask_for_outcomes((), wait=True)]
        return [outcome for some in found for outcome in some]

    def _ask_for_outcomes(self, closures: Sequence[Closure], *, wait: bool) -> list[Outcome]:
        nbytes = sum(self._nbytes(closure) for closure in closures)
        functions = self._unknown(closures)
        count = min(len(self.forgotten), _FORGOTTEN_TOGETHER)
        forgotten = tuple(self.forgotten.popleft() for _ in range(count))
        runs = tuple(self._order(closure) for closure in closures)
        self._turn += 1
        request = Exchange(self._conversation, self._turn, tuple(functions), runs, forgotten, wait)
        begun = time.monotonic()
        reply = self._outcomes(records.encode(request), nbytes)
        if time.monotonic() - begun > _LONG_SECONDS:
            self._depth = 1
        elif reply.idle:
            self._depth = min(2 * self._depth, _MOST_DEPTH)
        elif len(reply.outcomes) < 2:
            self._depth = max(self._depth // 2, _USUAL_DEPTH)
        return [self._whole(outcome) for outcome in reply.outcomes]

    def _unknown(self, closures: Sequence[Closure]) -> list[Pickled]:
        """Return the functions that the worker does not keep; it does from now on."""
        unknown = []
        for closure in closures:
            for function in (closure.function, *closure.datasets):
                if function.digest not in self._known:
                    unknown.append(function)
                    self._known[function.digest] = None
        while len(self._known) > MAXIMUM_FUNCTIONS:
            del self._known[next(iter(self._known))]
        return unknown

    def _nbytes(self, closure: Closure) -> int:
        """Return how much has to be sent."""
        functions = (closure.function, *closure.datasets)
        unknown = [function for function in functions if function.digest not in self._known]
        inputs = [value.payload for value in closure.inputs if value.payload is not None]
        return sum(pickled.nbytes for pickled in (closure.arguments, *unknown, *inputs))

    def _order(self, closure: Closure) -> Run:
        functions = (closure.function, *closure.datasets)
        inputs = (value.payload for value in closure.inputs)
        return Run(
            self._series,
            closure.number,
            tuple(function.digest for function in functions),
            closure.arguments,
            tuple(payload for payload in inputs if payload is not None),
        )

    def _whole(self, outcome: Outcome) -> Outcome:
        if outcome.value is not None:
            return outcome
        request = Collect(self._conversation, outcome.number)
        (whole,) = self._outcomes(records.encode(request), outcome.nbytes).outcomes
        if whole.value is None:
            raise MalformedError("an outcome was collected, and nothing came.")
        return whole

    def _outcomes(self, message: Sequence[Buffer], nbytes: int) -> Outcomes:
        timeout = self._round + nbytes / _BYTES_A_SECOND
        heard = time.monotonic()
        while True:
            try:
                reply = self._request(message, timeout)
            except CollectiveTimeoutError as error:
                if self._dispatch.closing.is_set():
                    raise
                if self._client.probe(self._round):
                    heard = time.monotonic()
                elif time.monotonic() - heard > self._silence:
                    raise WorkerLostError(f"it was silent for {self._silence:g} s") from error
                continue
            if not isinstance(reply, Outcomes):
                raise WorkerLostError("it was started again, and knows nothing of its functions")
            return reply

    def _request(self, message: Sequence[Buffer], timeout: float) -> WorkerReply:
        return decode_worker_reply(
            self._client.call(message, timeout, _MISSED_SECONDS), _LIMIT_BYTES
        )

    def _finish(self, outcome: Outcome) -> None:
        closure = self._flying.pop(outcome.number, None)
        if closure is None or outcome.value is None:
            return
        self._learn(outcome.reports)
        if outcome.good:
            self._dispatch.succeed(self._index, closure, outcome.value)
            return
        error = _exception(outcome.value, outcome.trace)
        error.add_note(f"{closure} raised this on {self._name}, there:\n{outcome.trace.rstrip()}")
        self._dispatch.fail(self._index, closure, error)


def _exception(pickled: Pickled, trace: str) -> Exception:
    """Return the exception that a worker sent."""
    try:
        error = load(pickled)
    except Exception as problem:  # Its class is not known here, say.
        return RuntimeError(
            f"{trace.strip().splitlines()[-1]} (it can not be made here: {problem})"
        )
    return error if isinstance(error, Exception) else RuntimeError(str(error))
