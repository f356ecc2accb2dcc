"""The star over rank 0 through which the processes of a group tell each other how they fare.

Every other process has one connection to rank 0. There a hub collects what all exchange, finds out
for those who wait who else has come, and passes all other messages on, one after the other: each
process learns the same in the same order. What a message means to a process is not said here.
"""

from __future__ import annotations

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

JOIN = "0:join"
"""The key of the first exchange, in which every process says who it is."""

_POLL_SECONDS = 0.1  # Between two questions to a process about the same call.
_RETRY_SECONDS = 0.05
_FAREWELL_SECONDS = 2.0
_MOST_CHARACTERS = 4000
_log = logging.getLogger("ndistribute")


class Failure(Record, frozen=True):
    """An error, as the other processes raise it."""

    kind: str
    text: str
    rank: int | None = None
    op: str | None = None
    sequence: int | None = None


class Abort(Record, frozen=True):
    """Break the group of a generation off, from the call after a place on."""

    generation: int
    place: tuple[int, int]  # The last call that the sender has finished.
    before: int  # The last one that it finished in the step before.
    error: Failure


class Failed(Record, frozen=True):
    """Tell that this process's own code raised in a step, after the call at a place."""

    generation: int
    place: tuple[int, int]
    error: Failure


class Left(Record, frozen=True):
    """Answer a process that failed that this one has left that step."""

    to: int
    generation: int
    position: int
    broken: bool  # Whether it was told that the group is broken.


class Ask(Record, frozen=True):
    """Ask whether the other processes have made, or skipped, the call at a place."""

    generation: int
    place: tuple[int, int]


class Reply(Ask, frozen=True):
    """Answer that this process has made the call, or else has left the step without it."""

    made: bool


class Seen(Ask, frozen=True):
    """Tell who asked which processes have made, and which have skipped, the call."""

    reached: list[int]
    skipped: list[int]


class Exchange(Record, frozen=True):
    """Pass what an exchange takes of this process; a second time, ask who is missing."""

    key: str
    blob: bytes


class Answer(Record, frozen=True):
    """Return what all processes passed, in rank order, or else who has not passed anything yet."""

    key: str
    blobs: list[bytes]
    missing: list[int]


class GoodBye(Record, frozen=True):
    """Leave the job: why, whether by a failure, and the last call that was surely made."""

    reason: str
    failed: bool
    made: tuple[int, int]


class Lost(Record, frozen=True):
    """Tell that the connection of a process ended without a good-bye."""

    why: str


Message = Abort | Failed | Left | Ask | Reply | Seen | Exchange | Answer | GoodBye | Lost
_messages: Decoder[Message] = Decoder(Message)
_Call = tuple[int, int, int]  # Generation and place.


class Hub:
    """Decide at rank 0 what a message leads to; it has neither threads nor connections.

    Args:
        size: how many processes there are.
        deliver: called with a rank, the rank that a message comes from, and the message.

    Attributes:
        gone: who has said good-bye or was lost.
        joined: whether all processes have joined.
    """

    def __init__(self, size: int, deliver: Callable[[int, int, Message], None]) -> None:
        self._ranks = range(size)
        self._deliver = deliver
        self.gone: set[int] = set()
        self.joined = False
        self._blobs: dict[str, dict[int, bytes]] = {}
        self._answered: set[str] = set()
        self._reached: dict[int, _Call] = {}
        self._skipped: dict[int, _Call] = {}
        self._polled: dict[_Call, float] = {}

    def take(self, sender: int, message: Message) -> None:
        """Act on what a process says."""
        match message:
            case Exchange():
                self._collect(sender, message)
            case Reply():
                self._note(sender, message)
            case Ask():
                self._ask(sender, message)
            case Left():
                self._deliver(message.to, sender, message)
            case _:
                self._pass_on(sender, message)
        if isinstance(message, GoodBye):
            self.gone.add(sender)

    def end(self, rank: int, why: str) -> None:
        """Act on the end of a process's connection."""
        if not self.joined:  # It may be started again.
            self.gone.discard(rank)
            for blobs in self._blobs.values():
                blobs.pop(rank, None)
        elif rank not in self.gone:
            self.gone.add(rank)
            self._pass_on(rank, Lost(why))

    def _pass_on(self, sender: int, message: Message) -> None:
        for rank in self._ranks:
            if rank != sender:
                self._deliver(rank, sender, message)

    def _collect(self, sender: int, message: Exchange) -> None:
        key = message.key
        if key in self._answered:
            return  # The answer is on its way.
        blobs = self._blobs.setdefault(key, {})
        asks = sender in blobs
        blobs[sender] = message.blob
        missing = [rank for rank in self._ranks if rank not in blobs]
        if missing:
            if asks:
                self._deliver(sender, 0, Answer(key, [], missing))
            return
        if key.endswith(":recover"):  # What was begun before it is never ended.
            self._blobs.clear()
            self._answered.clear()
        self._blobs.pop(key, None)
        self._answered.add(key)
        self.joined = True
        answer = Answer(key, [blobs[rank] for rank in self._ranks], [])
        for rank in self._ranks:
            self._deliver(rank, 0, answer)

    def _ask(self, sender: int, message: Ask) -> None:
        """Tell a process what is known of the others, and ask those of whom nothing is."""
        call, now = (message.generation, *message.place), time.monotonic()
        self._reached[sender] = call
        reached = [rank for rank, last in self._reached.items() if last >= call]
        skipped = [rank for rank, last in self._skipped.items() if last == call]
        self._deliver(sender, 0, Seen(message.generation, message.place, reached, skipped))
        self._polled = {c: at for c, at in self._polled.items() if now - at < _POLL_SECONDS}
        if call not in self._polled:
            self._polled[call] = now
            known = self.gone.union(reached, skipped)
            for rank in self._ranks:
                if rank not in known:
                    self._deliver(rank, 0, Ask(message.generation, message.place))

    def _note(self, sender: int, message: Reply) -> None:
        call = (message.generation, *message.place)
        if message.made:
            self._reached[sender] = max(call, self._reached.get(sender, call))
            return
        self._skipped[sender] = call
        for rank, last in self._reached.items():
            if last == call:  # It waits there.
                self._deliver(rank, 0, Seen(message.generation, message.place, [], [sender]))


class Star:
    """Hold this process's part of the star: one connection to rank 0, or all of them there.

    Args:
        info: who this process is.
        on_message: called with the rank that a message comes from, and the message.
        on_end: called with the reason when the connection to rank 0 has ended.
        timeout: how long to look for rank 0, in seconds.

    Raises:
        CollectiveTimeoutError: rank 0 was not reached in time.
        AuthenticationError: it does not know the job's secret, or refuses this process.
    """

    def __init__(
        self,
        info: ProcessInfo,
        on_message: Callable[[int, Message], None],
        on_end: Callable[[str], None],
        timeout: float,
    ) -> None:
        self._info = info
        self._on_message = on_message
        self._on_end = on_end
        self.refusal = ""  # Why rank 0 sent a process away.
        self._links: dict[int, Connection] = {}
        self._live: set[Connection] = set()  # Those whose end is yet to be acted on.
        self._threads: list[threading.Thread] = []
        # Messages are left to a thread: an interrupt in the middle of a write would end the
        # connection, and a process that does not read would stop who writes to it.
        self._orders: queue.SimpleQueue[tuple[int, Message | Connection, str] | None] = (
            queue.SimpleQueue()
        )
        self._alone = threading.Event()
        self._hub: Hub | None = None
        self._entrance: Listener | None = None
        try:
            if info.entrance is not None:
                self._hub = Hub(info.size, self._deliver)
                self._open(info.entrance)
            else:
                self._follow(0, self._reach_rank_0(timeout))
            self._worker = self._start(self._work, name=f"ndistribute-control-{info.rank}")
        except BaseException:
            self.stop_accepting()
            for link in self._links.values():
                link.close()
            raise

    def post(self, message: Message) -> None:
        """Send a message as soon as the connection takes it; this never waits."""
        self._orders.put((self._info.rank, message, ""))

    def stop_accepting(self) -> None:
        """Let nobody join any more."""
        if self._entrance is not None:
            self._entrance.close()

    def close(self, farewell: GoodBye, broken: bool) -> None:
        """Send a last message, wait until the others have it, and end all connections.

        Args:
            farewell: the message.
            broken: whether the others have nothing more to agree on.
        """
        self.stop_accepting()
        self.post(farewell)
        hub = self._hub
        if hub is not None and hub.joined and not (broken or farewell.failed):
            self._alone.wait(_FAREWELL_SECONDS)  # They need the hub until they leave as well.
        self._orders.put(None)
        self._worker.join(timeout=_FAREWELL_SECONDS)
        for link in list(self._links.values()):
            if hub is None:
                link.close()
            else:
                link.abort("worker 0 has left.", clean=True)
        deadline = time.monotonic() + _FAREWELL_SECONDS
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))

    def _start(self, target: Callable[..., None], *args: Any, name: str) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, name=name, daemon=True)
        thread.start()
        return thread

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
        reason = self._info.refusal_of(hello.details)
        if not reason and hello.purpose == "control":  # Who looks for data soon finds it.
            reason = self._obstacle_to(hello.details)
        if reason:
            self.refusal = f" It refused one: {reason}."
            _log.warning("worker 0 refused a worker: %s", reason)
        return reason

    def _obstacle_to(self, fields: dict[str, Any]) -> str:
        if fields["group"] != self._info.group:
            return ""  # It is in another group already, and tries again.
        if self._hub is not None and self._hub.joined:
            return f"all {self._info.size} workers have joined: start the whole job again"
        other = self._links.get(fields["rank"])
        if other is None or not other.is_open:
            return ""
        known = other.peer.details
        if [known["name"], known["pid"]] == [fields.get("name"), fields.get("pid")]:
            return ""
        return (
            f"two processes are worker {known['rank']}, pid {known['pid']} on {known['name']} and "
            f"pid {fields.get('pid')} on {fields.get('name')}; every process needs an index of its "
            "own"
        )

    def _admit(self, sock: socket.socket, accepted: Accepted) -> None:
        """Take in a process, on the listener's thread."""
        fields: dict[str, Any] = accepted.hello.details
        if fields["group"] != self._info.group or accepted.hello.purpose != "control":
            sock.close()  # It tries again, and finds the group that it looks for.
            return
        connection = Connection(sock, accepted, _messages)
        try:
            connection.send(Answer(JOIN, [], []))  # It is welcome.
            stale = self._links.get(fields["rank"])
            if stale is not None:
                why = "the process connected again."
                stale.abort(why)
                self._orders.put((fields["rank"], stale, why))  # Before what the new one brings.
            self._follow(fields["rank"], connection)
        except BaseException:
            connection.close()
            raise

    def _reach_rank_0(self, timeout: float) -> Connection:
        """Connect to rank 0, which may not have started yet."""
        info, reason = self._info, "there was no time to try"
        hello = Hello(f"worker {info.rank}", "control", "worker 0", details=info.details())
        deadline, pause = time.monotonic() + timeout, threading.Event()
        while time.monotonic() < deadline:
            try:
                who = info.first, info.credentials, hello, _messages
                connection = connect(*who, deadline=deadline)
                try:
                    connection.receive(deadline)  # It is one of the group from then on.
                    return connection
                except BaseException:
                    connection.close()
                    raise
            except AuthenticationError:
                raise
            except OSError as error:
                reason = f"{error}".rstrip(".")
            pause.wait(timeout=_RETRY_SECONDS)
        raise CollectiveTimeoutError(
            f"worker {info.rank} waited {timeout:g} s for worker 0 at {info.first} to start: "
            f"{reason}. Were all {info.size} processes started, with the same secret, and is that "
            "address reachable from here?",
            rank=0,
            op="start",
        )

    def _follow(self, rank: int, connection: Connection) -> None:
        """Read what comes over a connection, on a thread of its own."""
        self._links[rank] = connection
        self._live.add(connection)
        name = f"ndistribute-control-{self._info.rank}-of-{rank}"
        self._threads.append(self._start(self._read, rank, connection, name=name))

    def _read(self, rank: int, connection: Connection) -> None:
        try:
            while True:
                sender, message = connection.receive()
                if self._hub is None:
                    self._on_message(sender, message)
                else:
                    self._orders.put((rank, message, ""))
        except ConnectionLostError as error:
            why = str(error)
        except Exception as error:  # Whatever it is, others are to be told.
            why = f"it sent what no worker sends ({error!r})"
        if self._hub is None:
            self._on_end(why)
        else:
            self._orders.put((rank, connection, why))
        connection.close()

    def _work(self) -> None:
        """Send what is posted; at rank 0, let the hub act on what comes from anybody."""
        while (order := self._orders.get()) is not None:
            sender, message, why = order
            try:
                if self._hub is None:
                    self._deliver(0, sender, message)
                elif not isinstance(message, Connection):
                    self._hub.take(sender, message)
                elif message in self._live:
                    self._live.discard(message)
                    if self._links.get(sender) is message:
                        del self._links[sender]
                    self._hub.end(sender, why)
            except Exception as error:
                _log.exception("a message of worker %d could not be handled", sender)
                if sender in self._links:
                    self._links[sender].abort(f"it sent what no worker sends ({error!r})")
            if self._hub is not None and len(self._hub.gone) >= self._info.size:
                self._alone.set()

    def _deliver(self, rank: int, sender: int, message: Any) -> None:
        if rank == self._info.rank:
            self._on_message(sender, message)
        elif rank in self._links:
            try:
                self._links[rank].send(message, sender)
            except (ConnectionLostError, TimeoutError):
                pass  # Who does not read is cut off; the thread that reads tells of it.
            except Exception as error:  # It is not the sender's fault, and others are to be told.
                self._links[rank].abort(f"it could not be told something ({error!r})")


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
    kinds: dict[str, type[DistributeError]] = {
        kind.__name__: kind
        for kind in (CollectiveMismatchError, CollectiveTimeoutError, WorkerLostError)
    }
    return kinds.get(failure.kind, WorkerLostError)(
        failure.text, rank=failure.rank, op=failure.op, sequence=failure.sequence
    )


def sendable(text: str) -> str:
    """Return a text that can be sent: not too long, and without halves of characters.

    >>> sendable("a file's name: " + chr(0xDCFF))
    "a file's name: ?"
    """
    return text[:_MOST_CHARACTERS].encode(errors="replace").decode()
