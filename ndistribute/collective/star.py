"""The star over rank 0 through which the processes of a group tell each other how they fare.

Every other process has one connection to rank 0. There a hub collects what all pass under a key,
and passes all other messages on, one after the other: each process learns the same in the same
order. What a message means to a process is not said here.
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

from ndistribute.collective.bootstrap import ProcessInfo
from ndistribute.errors import (
    AuthenticationError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistributeError,
    WorkerLostError,
)
from ndistribute.transport.codec import Decoder, Record
from ndistribute.transport.connection import (
    Connection,
    ConnectionLostError,
    connect,
    unix_wanted,
)
from ndistribute.transport.handshake import Accepted, Hello
from ndistribute.transport.listener import Listener, listen_unix
from ndistribute.transport.waiting import WaitReport

JOIN = "join"
"""The kind of the first exchange, in which every process says who it is."""
CALL, MADE, SKIPPED = "call", b"+", b"-"
"""The kind of an exchange about a call, and what is passed: made, or left its step without it."""

_KEYS = 100  # What is waited for at one time is less; an exchange that is forgotten begins again.
_POLL_SECONDS = 0.1  # Between two questions to a process about the same call.
_RETRY_SECONDS = 0.05
_FAREWELL_SECONDS = 2.0
_MOST_CHARACTERS = 4000
_KINDS: dict[str, type[DistributeError]] = {
    kind.__name__: kind
    for kind in (CollectiveMismatchError, CollectiveTimeoutError, WorkerLostError)
}
_log = logging.getLogger("ndistribute")


class Failure(Record, frozen=True):
    """An error, as the other processes raise it."""

    kind: str
    text: str
    rank: int | None = None
    op: str | None = None
    sequence: int | None = None


class Failed(Record, frozen=True):
    """Tell that this process's own code raised in a step, after the call at a place."""

    generation: int
    place: tuple[int, int]  # The last call that the sender has finished.
    before: int  # The last one that it finished in the step before.
    error: Failure


class Abort(Record, frozen=True):
    """Break the group off, from the call after the place of a failure on."""

    failed: Failed


class Exchange(Record, frozen=True):
    """Pass something under a key; rank 0 answers with what is there, by the ranks that passed it.

    What is passed about a call is whether it was made. Who has passed nothing is asked: it gets the
    answer as well.
    """

    kind: str
    generation: int
    place: tuple[int, int]
    passed: dict[int, bytes]


class GoodBye(Record, frozen=True):
    """Leave the job: why, whether by a failure, and the last call that was surely made."""

    reason: str
    failed: bool
    made: tuple[int, int]


class Lost(Record, frozen=True):
    """Tell that the connection of a process ended without a good-bye."""

    why: str


Message = Abort | Failed | Exchange | GoodBye | Lost
_messages: Decoder[Message] = Decoder(Message)


class Hub:
    """Decide at rank 0 what a message leads to; it has neither threads nor connections.

    `deliver` is called with a rank, the rank that a message comes from, and the message.
    """

    def __init__(self, size: int, deliver: Callable[[int, int, Message], None]) -> None:
        self._ranks = range(size)
        self._deliver = deliver
        self.gone: set[int] = set()  # Who has said good-bye or was lost.
        self.joined = False  # Whether all have joined.
        self._passed: dict[tuple[str, int, tuple[int, int]], dict[int, bytes]] = {}
        self._polled: dict[object, float] = {}  # When the others were asked about a call last.

    def take(self, sender: int, message: Message) -> None:
        """Act on what a process says."""
        if isinstance(message, Exchange):
            self._collect(sender, message)
            return
        for rank in self._ranks:
            if rank != sender:
                self._deliver(rank, sender, message)
        if isinstance(message, GoodBye | Lost):
            self.gone.add(sender)

    def end(self, rank: int, why: str) -> None:
        """Act on the end of a process's connection."""
        if not self.joined:  # It may be started again.
            self.gone.discard(rank)
            for passed in self._passed.values():
                passed.pop(rank, None)
        elif rank not in self.gone:
            self.take(rank, Lost(why))

    def _collect(self, sender: int, message: Exchange) -> None:
        """Tell who passes something what is there; tell all when the last one has passed it."""
        key = message.kind, message.generation, message.place
        passed = self._passed.setdefault(key, {})
        is_new = sender not in passed
        passed[sender] = own = message.passed[sender]
        if len(self._passed) > _KEYS:
            del self._passed[next(iter(self._passed))]
        told, missing = [sender], [rank for rank in self._ranks if rank not in passed]
        if is_new and not missing:
            told, self.joined = list(self._ranks), True
        elif message.kind == CALL:
            if own == SKIPPED:
                told = list(passed)  # They wait there.
            now = time.monotonic()
            if now - self._polled.get(key, 0.0) >= _POLL_SECONDS:
                self._polled = {k: at for k, at in self._polled.items() if now - at < _POLL_SECONDS}
                self._polled[key] = now
                told += missing
        answer = Exchange(*key, dict(passed))
        for rank in told:
            self._deliver(rank, 0, answer)


class Star:
    """Hold this process's part of the star: one connection to rank 0, or all of them there.

    `on_message` is called with the rank that a message comes from, and the message; rank 0 is
    `Lost` when the connection to it has ended, in whatever way.

    Raises:
        CollectiveTimeoutError: rank 0 was not reached within `timeout` seconds.
        AuthenticationError: it does not know the job's secret, or refuses this process.
    """

    def __init__(
        self, info: ProcessInfo, on_message: Callable[[int, Message], None], timeout: float
    ) -> None:
        self._info = info
        self._on_message = on_message
        self.refusal = ""  # Why rank 0 sent a process away.
        self._links: dict[int, Connection] = {}
        self._readers: list[threading.Thread] = []
        # What is to be done about whom. It is left to a thread: an interrupt in the middle of a
        # write would end the connection, and a process that does not read would stop who writes.
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
        """Send a message as soon as the connection takes it; this never waits."""
        self._order(self._info.rank, self._act, self._info.rank, message)

    def stop_accepting(self) -> None:
        """Let nobody join any more."""
        if self._entrance is not None:
            self._entrance.close()

    def close(self, farewell: GoodBye, broken: bool) -> None:
        """Send a last message, and end all connections when the others have it.

        If the group is broken, they have nothing more to agree on.
        """
        try:
            self.post(farewell)
            hub = self._hub
            if hub is not None and hub.joined and not (broken or farewell.failed):
                self._alone.wait(_FAREWELL_SECONDS)  # They need the hub until they leave as well.
        finally:
            self._end()

    def _end(self) -> None:
        """End connections and threads; an interrupt in the end of one leaves out no other."""
        with contextlib.ExitStack() as last_first:
            last_first.callback(_wait_for, self._readers)
            last_first.callback(self._part)
            last_first.callback(_wait_for, [self._worker])
            last_first.callback(self._orders.put, None)
            last_first.callback(self.stop_accepting)

    def _part(self) -> None:
        """Cut all connections, each when the other end has read what was sent to it."""
        links = list(self._links.values())
        with contextlib.ExitStack() as each:
            for link in links:
                wait = _FAREWELL_SECONDS / len(links)
                each.callback(link.abort, "this process has left.", clean=True, wait=wait)

    def _open(self, entrance: socket.socket) -> None:
        """Listen for the other processes, at rank 0."""
        info, sockets = self._info, [entrance]
        if unix_wanted():
            unix = listen_unix(info.first)
            sockets = [entrance] if unix is None else [unix, entrance]
        own = Hello(name="worker 0")
        self._entrance = Listener(
            sockets, info.credentials, own, self._admit, check=self._refusal_of
        )

    def _refusal_of(self, hello: Hello) -> str:
        """Return what is wrong with a process that says which one it is, if anything is."""
        joined = self._hub is not None and self._hub.joined
        reason = self._info.refusal_of(hello, joined) or self._double_of(hello)
        if reason:
            self.refusal = f" It refused one: {reason}."
            _log.warning("worker 0 refused a worker: %s", reason)
        return reason

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
            f"pid {fields.get('pid')} on {fields.get('name')}; every process needs an index of its "
            "own"
        )

    def _admit(self, sock: socket.socket, accepted: Accepted) -> None:
        """Take in a process, on the listener's thread."""
        rank: Any = accepted.hello.details["rank"]
        ours = accepted.hello.details["group"] == self._info.group
        if ours and accepted.hello.purpose == "control":
            self._order(rank, self._welcome, rank, Connection(sock, accepted, _messages))
        else:
            sock.close()  # It tries again, and finds the group that it looks for.

    def _welcome(self, rank: int, connection: Connection) -> None:
        if self._double_of(connection.peer):  # They came at once, before either was known.
            connection.abort("another process has its rank.", clean=True)  # Waits for nobody.
            connection.close()  # It tries again, and is told.
            return
        stale = self._links.get(rank)
        if stale is not None:  # Before what the new one brings.
            self._drop(rank, stale, "the process connected again.")
        self._follow(rank, connection)
        self._deliver(rank, 0, Exchange(JOIN, 0, (0, 0), {}))

    def _reach_rank_0(self, timeout: float) -> Connection:
        """Connect to rank 0, which may not have started yet."""
        info, reason = self._info, "there was no time to try"
        hello = Hello(f"worker {info.rank}", "control", "worker 0", details=info.details())
        deadline, pause = time.monotonic() + timeout, threading.Event()
        report = WaitReport(f"worker {info.rank}")
        while time.monotonic() < deadline:
            connection = None
            try:
                who = info.first, info.credentials, hello, _messages
                connection = connect(*who, deadline=deadline)
                connection.receive(deadline)  # It is one of the group from then on.
                return connection
            except BaseException as error:
                if connection is not None:
                    connection.close()
                if isinstance(error, AuthenticationError) or not isinstance(error, OSError):
                    raise
                reason = f"{error}".rstrip(".")
                report.tell(f"worker 0 at {info.first} ({reason})")
            pause.wait(timeout=_RETRY_SECONDS)
        raise CollectiveTimeoutError(
            f"worker {info.rank} waited {timeout:g} s for worker 0 at {info.first} to start: "
            f"{reason}. Were all {info.size} processes started, with the same secret, and is that "
            "address reachable from here?",
            rank=0,
            op="start",
        )

    def _follow(self, rank: int, connection: Connection) -> None:
        """Read what comes over a connection, on a thread of its own, which closes it."""
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
        except Exception as error:  # Whatever it is, others are to be told.
            why = f"it sent what no worker sends ({error!r})"
        try:
            if self._hub is None:
                self._on_message(0, Lost(why))
            else:
                self._order(rank, self._drop, rank, connection, why)
        finally:
            connection.close()

    def _drop(self, rank: int, connection: Connection, why: str) -> None:
        """Act on the end of a connection at rank 0, unless the process has another one by now."""
        if self._hub is not None and self._links.get(rank) is connection:
            del self._links[rank]
            connection.abort(why)
            self._hub.end(rank, why)

    def _order(self, rank: int, action: Callable[..., None], *args: object) -> None:
        self._orders.put((rank, functools.partial(action, *args)))

    def _work(self) -> None:
        """Send what is posted; at rank 0, act on what comes from anybody."""
        while (order := self._orders.get()) is not None:
            rank, action = order
            try:
                action()
            except Exception as error:
                _log.exception("a message of worker %d could not be handled", rank)
                if rank in self._links:
                    self._links[rank].abort(f"it sent what no worker sends ({error!r})")
            if self._hub is not None and len(self._hub.gone) >= self._info.size:
                self._alone.set()

    def _deliver(self, rank: int, sender: int, message: Message) -> None:
        if rank == self._info.rank:
            self._on_message(sender, message)
        elif rank in self._links:
            try:
                self._links[rank].send(message, sender)
            except (ConnectionLostError, TimeoutError):
                pass  # Who does not read is cut off; the thread that reads tells of it.
            except Exception as error:  # It is not the sender's fault, and others are to be told.
                self._links[rank].abort(f"it could not be told something ({error!r})")


def _wait_for(threads: list[threading.Thread]) -> None:
    deadline = time.monotonic() + _FAREWELL_SECONDS
    for thread in threads:
        if thread.is_alive():
            thread.join(timeout=max(0.0, deadline - time.monotonic()))


def describe_error(error: BaseException, worker: int) -> Failure:
    """Return what the other processes are told of a failure on one of them."""
    if isinstance(error, CollectiveMismatchError | CollectiveTimeoutError | WorkerLostError):
        return Failure(
            type(error).__name__,
            sendable(str(error)),
            None if error.rank is None else int(error.rank),
            None if error.op is None else sendable(str(error.op)),
            None if error.sequence is None else int(error.sequence),
        )
    try:
        told = str(error)
    except Exception as failure:  # The class is the user's, and this must not fail.
        told = f"(its text can not be had: {type(failure).__name__})"
    text = f"worker {worker} failed: {type(error).__name__}: {told}"
    notes = [note for note in getattr(error, "__notes__", ()) if isinstance(note, str)]
    return Failure("WorkerLostError", sendable("; ".join([text, *notes])), worker)


def restore_error(failure: Failure) -> DistributeError:
    """Return the exception that a process raises for a failure that it was told of."""
    return _KINDS.get(failure.kind, WorkerLostError)(
        failure.text, rank=failure.rank, op=failure.op, sequence=failure.sequence
    )


def sendable(text: str) -> str:
    """Return a text that can be sent: not too long, and without halves of characters.

    >>> sendable("a file's name: " + chr(0xDCFF))
    "a file's name: ?"
    """
    return text[:_MOST_CHARACTERS].encode(errors="replace").decode()
