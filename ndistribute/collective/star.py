"""The star: the control messages of a group, which rank 0 relays.

Every other process has one connection to rank 0. A hub there collects the values of exchanges, and
relays all other messages one by one, so each process gets the same messages in the same order. The
control plane decides what a message means.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from ndistribute import errors
from ndistribute.collective.bootstrap import ProcessInfo
from ndistribute.timers import Attempts
from ndistribute.tracebacks import OF_SEVERAL
from ndistribute.transport.codec import Decoder, Record
from ndistribute.transport.connection import Connection, ConnectionLostError, connect
from ndistribute.transport.failures import Failure, error_of, failure_of, sendable
from ndistribute.transport.handshake import Accepted, Hello
from ndistribute.transport.listener import Listener, listen_unix
from ndistribute.transport.waiting import WaitReport

# The kind of the first exchange: names and addresses.
JOIN = "join"
# The kind of an exchange about a call, and its values: made, or skipped by leaving the step.
CALL, MADE, SKIPPED = "call", b"+", b"-"

_KEYS = 100  # The most pending exchanges, more than are needed; a dropped one starts again.
_POLL_SECONDS = 0.1  # Seconds between two questions about the same call.
_RETRY_SECONDS = 0.05
_FAREWELL_SECONDS = 2.0
_KINDS = {"": errors.WorkerLostError, **{kind.__name__: kind for kind in OF_SEVERAL}}
_log = logging.getLogger("ndistribute")


class StepFailure(Record, frozen=True):
    """The message that the sender's user code raised in a step, after the call at `place`."""

    generation: int
    place: tuple[int, int]  # The last call that the sender has completed.
    before: int  # The last call that the sender completed in the previous step.
    error: Failure


class GroupFailure(Record, frozen=True):
    """The message that the group is broken, from the call after the failure's place on."""

    failed: StepFailure


class Exchange(Record, frozen=True):
    """A value passed under a key; rank 0 answers with the values of all ranks, by rank.

    In an exchange about a call, the value is `MADE` or `SKIPPED`. The answer also goes to ranks
    that have not passed a value; for them it is a question.
    """

    kind: str
    generation: int
    place: tuple[int, int]
    passed: dict[int, bytes]


class GoodBye(Record, frozen=True):
    """The message that the sender leaves: why, whether it failed, and the last call it made."""

    reason: str
    failed: bool
    made: tuple[int, int]


class Lost(Record, frozen=True):
    """The message that the connection of the sender ended without a `GoodBye`."""

    why: str


class Obstacle(Record, frozen=True):
    """Why the sender cannot reach a process, or has refused it; empty once it has reached it."""

    rank: int  # The sender's own rank if it has refused a process.
    why: str


Message = GroupFailure | StepFailure | Exchange | GoodBye | Lost | Obstacle
_messages: Decoder[Message] = Decoder(Message)


class Hub:
    """The relay at rank 0, without threads and connections.

    It calls `deliver` with the receiver's rank, the sender's rank, and the message.
    """

    def __init__(self, size: int, deliver: Callable[[int, int, Message], None]) -> None:
        self._ranks = range(size)
        self._deliver = deliver
        self.gone: set[int] = set()  # Ranks that left or were lost.
        self.joined = False  # Whether all processes have joined.
        self._passed: dict[tuple[str, int, tuple[int, int]], dict[int, bytes]] = {}
        self._polled: dict[object, float] = {}  # The time of the last question, by call.

    def take(self, sender: int, message: Message) -> None:
        """Handle a message of a process."""
        if isinstance(message, Exchange):
            self._collect(sender, message)
            return
        for rank in self._ranks:
            if rank != sender:
                self._deliver(rank, sender, message)
        if isinstance(message, GoodBye | Lost):
            self.gone.add(sender)

    def end(self, rank: int, why: str) -> None:
        """Handle the end of the connection of a process."""
        if not self.joined:  # The process may be started again.
            self.gone.discard(rank)
            for passed in self._passed.values():
                passed.pop(rank, None)
        elif rank not in self.gone:
            self.take(rank, Lost(why))

    def _collect(self, sender: int, message: Exchange) -> None:
        """Answer the sender of a value; answer all ranks once the last value has come."""
        key = message.kind, message.generation, message.place
        passed = self._passed.setdefault(key, {})
        is_new = sender not in passed
        passed[sender] = value = message.passed[sender]
        if len(self._passed) > _KEYS:
            del self._passed[next(iter(self._passed))]
        receivers, missing = [sender], [rank for rank in self._ranks if rank not in passed]
        if is_new and not missing:
            receivers, self.joined = list(self._ranks), True
        elif message.kind == CALL:
            if value == SKIPPED:
                receivers = list(passed)  # These ranks wait in that call.
            now = time.monotonic()
            if now - self._polled.get(key, 0.0) >= _POLL_SECONDS:
                self._polled = {k: at for k, at in self._polled.items() if now - at < _POLL_SECONDS}
                self._polled[key] = now
                receivers += missing
        answer = Exchange(*key, dict(passed))
        for rank in receivers:
            self._deliver(rank, 0, answer)


class Star:
    """The star in one process: the connection to rank 0, or all connections of rank 0.

    It calls `on_message` with the sender's rank and the message. If the connection to rank 0 ends,
    `on_message` gets `Lost` from rank 0.
    """

    def __init__(
        self,
        info: ProcessInfo,
        on_message: Callable[[int, Message], None],
        timeout: float,
        check_start: Callable[[], None] = lambda: None,
    ) -> None:
        self._info, self._check_start = info, check_start
        self._handle = on_message
        self._obstacles: dict[tuple[int, int], str] = {}  # By the sender and the other rank.
        self._links: dict[int, Connection] = {}
        self._readers: list[threading.Thread] = []
        # Pending actions by rank. A thread runs them: an interrupt during a write would end the
        # connection, and a process that does not read would block the writer.
        self._orders: queue.SimpleQueue[tuple[int, Callable[[], None]] | None] = queue.SimpleQueue()
        self._alone = threading.Event()
        self._hub = None if info.rank else Hub(info.size, self._deliver)
        self._act: Callable[[int, Message], None] = functools.partial(self._deliver, 0)
        if self._hub is not None:
            self._act = self._hub.take
        self._entrance: Listener | None = None
        name = f"ndistribute-control-{info.rank}"
        self._worker = threading.Thread(target=self._work, name=name, daemon=True)
        try:
            self._worker.start()
            if info.rank:
                self._follow(0, self._reach_rank_0(timeout))
            else:
                self._open(info.entrance or info.listener.dup())
        except BaseException:
            self._end()
            if info.entrance is not None:
                info.entrance.close()
            raise

    def post(self, message: Message) -> None:
        """Queue a message for the thread that sends messages; return at once."""
        self._order(self._info.rank, self._act, self._info.rank, message)

    @property
    def obstacles(self) -> str:
        """Sentences about the connections that could not be made, each preceded by a space."""
        reasons = [why.rstrip(".") for why in list(self._obstacles.values()) if why]
        return "".join(f" {why[0].upper()}{why[1:]}." for why in reasons)

    def report(self, rank: int, why: str) -> None:
        """Tell all processes why this one cannot reach another; empty text: it did reach it."""
        me = self._info.rank
        if self._obstacles.get((me, rank), "") != why:
            self._obstacles[me, rank] = why
            self.post(Obstacle(rank, sendable(why)))

    def stop_accepting(self) -> None:
        """Stop accepting processes."""
        self._obstacles.pop((0, 0), None)
        if self._entrance is not None:
            self._entrance.close()

    def close(self, farewell: GoodBye, broken: bool) -> None:
        """Send a last message; close all connections when the others have received it.

        Unless the group is broken, rank 0 first waits until the others leave.
        """
        try:
            self.post(farewell)
            hub = self._hub
            if hub is not None and hub.joined and not (broken or farewell.failed):
                self._alone.wait(_FAREWELL_SECONDS)  # The others need the hub until they leave.
        finally:
            self._end()

    def _end(self) -> None:
        """End all connections and threads, even if an interrupt comes while one ends."""
        with contextlib.ExitStack() as last_first:
            last_first.callback(_wait_for, self._readers)
            last_first.callback(self._part)
            last_first.callback(_wait_for, [self._worker])
            last_first.callback(self._orders.put, None)
            last_first.callback(self.stop_accepting)

    def _part(self) -> None:
        """Close each connection when the other end has read all messages."""
        links = list(self._links.values())
        with contextlib.ExitStack() as each:
            for link in links:
                wait = _FAREWELL_SECONDS / len(links)
                each.callback(link.abort, "this process has left.", clean=True, wait=wait)

    def _open(self, entrance: socket.socket) -> None:
        """Accept the other processes, at rank 0."""

        def refused(reason: object) -> None:
            self.report(0, f"worker 0 refused a process: {reason}")

        sockets, hello = [*listen_unix(self._info.first), entrance], Hello(name="worker 0")
        secret, check = self._info.credentials, self._refusal_of
        self._entrance = Listener(
            sockets, secret, hello, self._admit, check=check, on_refusal=refused
        )

    def _refusal_of(self, hello: Hello) -> str:
        """Return why a process with this `Hello` is refused, or an empty string."""
        joined = self._hub is not None and self._hub.joined
        return self._info.refusal_of(hello, joined) or self._double_of(hello)

    def _double_of(self, hello: Hello) -> str:
        fields: dict[str, Any] = hello.details
        other = self._links.get(fields["rank"])
        if other is None or not other.is_open or fields["group"] != self._info.group:
            return ""
        known = other.peer.details
        if known == fields or hello.purpose != "control":
            return ""
        return (
            f"two processes are worker {known['rank']}, pid {known['pid']} on {known['name']} and "
            f"pid {fields.get('pid')} on {fields.get('name')}; give every process a different index"
        )

    def _admit(self, sock: socket.socket, accepted: Accepted) -> None:
        """Add an authenticated process, on the listener's thread."""
        rank: Any = accepted.hello.details["rank"]
        ours = accepted.hello.details["group"] == self._info.group
        if ours and accepted.hello.purpose == "control":
            self._order(rank, self._welcome, rank, Connection(sock, accepted, _messages))
        else:
            sock.close()  # The process tries again until its own group listens.

    def _welcome(self, rank: int, connection: Connection) -> None:
        if self._double_of(connection.peer):  # Both connected before either was added.
            connection.abort("another process has its rank.", clean=True)  # This does not wait.
            connection.close()  # The process tries again, and then gets the refusal.
            return
        stale = self._links.get(rank)
        if stale is not None:  # This comes before the messages of the new connection.
            self._drop(rank, stale, "the process connected again.")
        self._follow(rank, connection)
        self._deliver(rank, 0, Exchange(JOIN, 0, (0, 0), {}))
        if refusal := self._obstacles.get((0, 0)):  # It may wait for the refused process.
            self._deliver(rank, 0, Obstacle(0, refusal))

    def _reach_rank_0(self, timeout: float) -> Connection:
        """Connect to rank 0, which may not have started yet."""
        info = self._info
        hello = Hello(f"worker {info.rank}", "control", "worker 0", details=info.details())
        deadline, report = time.monotonic() + timeout, WaitReport(f"worker {info.rank}")
        for _ in Attempts(deadline, _RETRY_SECONDS):
            self._check_start()
            connection = None
            try:
                who = info.first, info.credentials, hello, _messages
                connection = connect(*who, deadline=deadline)
                connection.receive(deadline)  # The answer that `_welcome` sends.
                return connection
            except BaseException as error:
                if connection is not None:
                    connection.close()
                if isinstance(error, errors.AuthenticationError) or not isinstance(error, OSError):
                    raise
                reason = f"{error}".rstrip(".")
                report.tell(f"worker 0 at {info.first} ({reason})")
        raise errors.CollectiveTimeoutError(
            f"worker {info.rank} waited {timeout:g} s for worker 0 at {info.first} to start: "
            f"{reason}. Check that all {info.size} processes were started with the same secret, "
            "and that this process can reach that address.",
            rank=0,
            op="start",
        )

    def _on_message(self, rank: int, message: Message) -> None:
        if isinstance(message, Obstacle):
            self._obstacles[rank, message.rank] = message.why
        else:
            self._handle(rank, message)

    def _follow(self, rank: int, connection: Connection) -> None:
        """Start the thread that reads a connection until its end and then closes it."""
        name = f"ndistribute-control-{self._info.rank}-of-{rank}"
        args = rank, connection
        thread = threading.Thread(target=self._read, args=args, name=name, daemon=True)
        try:
            self._links[rank] = connection
            thread.start()
            self._readers.append(thread)
        except BaseException:
            connection.close()
            raise

    def _read(self, rank: int, connection: Connection) -> None:
        try:
            while True:
                sender, message = connection.receive()
                if self._hub is None:
                    self._on_message(sender, message)
                else:
                    self._order(rank, self._act, rank, message)
        except ConnectionLostError as error:
            why = str(error)
        except Exception as error:  # The other processes must learn of any error.
            why = f"it sent an invalid message ({error!r})"
        try:
            if self._hub is None:
                self._on_message(0, Lost(why))
            else:
                self._order(rank, self._drop, rank, connection, why)
        finally:
            connection.close()

    def _drop(self, rank: int, connection: Connection, why: str) -> None:
        """Handle the end of a connection at rank 0, unless the process has a new connection."""
        if self._hub is not None and self._links.get(rank) is connection:
            del self._links[rank]
            connection.abort(why)
            self._hub.end(rank, why)

    def _order(self, rank: int, action: Callable[..., None], *args: object) -> None:
        self._orders.put((rank, functools.partial(action, *args)))

    def _work(self) -> None:
        """Send posted messages; at rank 0, handle the messages of all processes."""
        while (order := self._orders.get()) is not None:
            rank, action = order
            try:
                action()
            except Exception as error:
                _log.exception("a message of worker %d could not be handled", rank)
                if rank in self._links:
                    self._links[rank].abort(f"it sent an invalid message ({error!r})")
            if self._hub is not None and len(self._hub.gone) >= self._info.size:
                self._alone.set()

    def _deliver(self, rank: int, sender: int, message: Message) -> None:
        if rank == self._info.rank:
            self._on_message(sender, message)
        elif rank in self._links:
            try:
                self._links[rank].send(message, sender)
            except (ConnectionLostError, TimeoutError):
                pass  # The connection is closed, and its reader thread reports the end.
            # The other processes must learn that this process is cut off.
            except Exception as error:
                self._links[rank].abort(f"a message to it could not be sent ({error!r})")


def _wait_for(threads: list[threading.Thread]) -> None:
    deadline = time.monotonic() + _FAREWELL_SECONDS
    for thread in threads:
        if thread.is_alive():
            thread.join(timeout=max(0.0, deadline - time.monotonic()))


def describe_error(error: BaseException, worker: int) -> Failure:
    """Return the failure that the other processes get for an exception of this worker."""
    failure = failure_of(error, _KINDS)
    if failure.kind:
        return failure
    notes = [note for note in getattr(error, "__notes__", ()) if isinstance(note, str)]
    text = "; ".join([f"worker {worker} failed: {failure.message}", *notes])
    return Failure("", sendable(text), worker)


def restore_error(failure: Failure) -> Exception:
    """Return the exception to raise for a failure of another process."""
    return error_of(failure, _KINDS)
