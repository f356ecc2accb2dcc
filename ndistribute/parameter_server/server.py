"""`StoreService`: a store that answers the connections of a server, and outlives its process.

Under its lock the store is changed, lends its arrays to a snapshot, and begins a new log; snapshots
are written, and the log is synced, beside it. A `LocalServer` serves its own process, by calls.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from typing import Any, Literal

from ndistribute.errors import CollectiveTimeoutError, WorkerLostError
from ndistribute.parameter_server import messages as m
from ndistribute.parameter_server.snapshot import Disk, UpdateLog
from ndistribute.parameter_server.store import Answers, Store
from ndistribute.timeline import recorded

_CLOSE_SECONDS = 600.0
_LOG_BYTES = 1 << 30  # A longer log is replaced by a snapshot before that is due.
_log = logging.getLogger("ndistribute")


class StoreService:
    """Answer by a store; write what changed to a directory, if there is one, every `seconds`.

    With durability ``"log"`` a change is answered once it is in a log on the disk. Clients of
    before a restart count as dead, lest others wait, if they are not back after `return_seconds`.
    """

    requests = m.Request
    sealed = False

    def __init__(
        self,
        directory: str | os.PathLike[str] | None,
        task: str,
        *,
        seconds: float = 30.0,
        durability: Literal["snapshot", "log"] = "snapshot",
        return_seconds: float = 10.0,
    ) -> None:
        if durability == "log" and directory is None:
            raise ValueError(
                f'durability="log" of {task} needs a directory for its log and snapshots: give '
                'snapshot_directory, or use durability="snapshot".'
            )
        self._task, self._seconds = task, seconds
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._peers: dict[str, object] = {}
        self._asked: list[tuple[Any, Any]] = []  # The calls that wait for a snapshot.
        self._changed = self._due = self._closing = False
        self.failed_last_snapshot = False  # Whether `close` could not write what changed.
        self._disk = None if directory is None else Disk(directory, task, log=durability == "log")
        self.store = Store() if self._disk is None else self._disk.store
        self.store.variables.adopts = True
        self.resumed = self._disk is not None and self._disk.resumed
        if self._disk is None:
            return
        self._changed = self._disk.replayed
        expires = time.monotonic() + return_seconds if self.store.clients else math.inf
        self._writer = threading.Thread(
            target=self._live, args=(self._disk, expires), name="ndistribute snapshots", daemon=True
        )
        self._writer.start()

    def connected(self, peer: Any) -> None:
        with self._lock:
            self._peers[peer.name] = peer

    @recorded(lambda reply, self, peer, *_: ("serve", peer.name))
    def handle(self, peer: Any, call: Any, request: m.Request) -> m.Reply | None:
        """Do what a request asks, and return the reply unless that comes later."""
        reads = isinstance(request, m.Read | m.Status)
        with self._lock:
            logs = [] if self._disk is None else self._disk.logs
            if isinstance(request, m.Status) and self._disk is not None and request.of != "memory":
                # What is there before a log begins has to be on the disk as well.
                if request.of == "log" and not logs:
                    self._disk.begin_log()
                self._asked.append((peer, call))
                self._wake.notify_all()
                return None
            if isinstance(request, m.Logged):
                if self._closing:  # The next life of this server will be asked again.
                    return None
                for log in logs:
                    if log.broken:
                        return self._not_logged(log, log.broken, "nothing was changed")
            answers = self.store.handle(peer.name, (peer, call), request)
            self._changed = self._changed or not reads
            in_use = logs[-1] if logs and not reads else None
            position = in_use.written if in_use is not None else 0
            if position > _LOG_BYTES:
                self._write_soon()
        if in_use is not None:
            answers = self._synced(in_use, position, answers)
        reply = None
        for (to, number), answer in answers:
            if to is peer and number == call:
                reply = answer
            else:
                to.send(answer, number)
        return reply

    def disconnected(self, peer: Any, died: bool) -> None:
        """Let others wait for a client no more, unless it is back already."""
        with self._lock:
            name = peer.name
            if self._peers.get(name) is not peer:
                return
            del self._peers[name]
            self._changed = self._changed or name in self.store.clients
            answers = self.store.left(name)
        _send(answers)

    def close(self) -> None:
        """Write what changed, and make no changes from now on; a second call does nothing."""
        with self._lock:
            self._closing = True
            self._wake.notify_all()
        if self._disk is None:
            return
        self._writer.join(timeout=_CLOSE_SECONDS)
        if self._writer.is_alive():
            self.failed_last_snapshot = True
            _log.error("%s still writes its last snapshot and is left to it", self._task)
            return
        self._disk.close()

    def _write_soon(self) -> None:
        self._due = True
        self._wake.notify_all()

    def _synced(self, log: UpdateLog, position: int, answers: Answers) -> Answers:
        """Return the answers once what they acknowledge is on the disk, or failures."""
        try:
            log.sync(position)
            return answers
        except OSError as error:
            with self._lock:  # Only a snapshot can tell what the disk holds.
                self._write_soon()
            failure = self._not_logged(log, error, "what was changed may be lost")
            return [(call, failure) for call, _ in answers]

    def _not_logged(self, log: UpdateLog, error: OSError, consequence: str) -> m.Failure:
        return m.Failure(
            "full",
            f"{self._task} could not bring {log.path} to the disk ({error}): {consequence}. "
            "It takes changes again once it could write a snapshot.",
        )

    def _live(self, disk: Disk, expires: float) -> None:
        """Write snapshots until the service is closed; the last one then."""
        closing = False
        while not closing:
            wait = max(0.0, min(self._seconds, expires - time.monotonic()))
            with self._lock:
                self._wake.wait_for(lambda: self._asked or self._due or self._closing, wait)
                closing, self._due = self._closing, False
                changed, self._changed = self._changed, False
                asked, self._asked = self._asked, []
                reply: m.Totals | m.Failure = self.store.totals
            if changed:
                reply = self._save(disk)
            _send([(call, reply) for call in asked])
            if time.monotonic() >= expires:
                self._expire_clients()
                expires = math.inf
        self.failed_last_snapshot = isinstance(reply, m.Failure)

    def _save(self, disk: Disk) -> m.Totals | m.Failure:
        try:
            return disk.write(self._lock)
        except Exception as error:  # The server is worth more than its snapshot: it goes on.
            with self._lock:
                self._changed = True
            known = isinstance(error, OSError | MemoryError)
            # As text: a log that keeps the error would keep the arrays of the snapshot.
            _log.error("%s wrote no snapshot: %s", self._task, f"{error}", exc_info=not known)
            return m.Failure("full", f"{self._task} could not write a snapshot: {error}")

    def _expire_clients(self) -> None:
        """Let those leave who died while this server was away: others may wait for them."""
        with self._lock:
            gone = self.store.clients - self._peers.keys()
            answers = [answer for client in gone for answer in self.store.left(client)]
        what = "%s counts as dead: %s was restarted, and it did not return"
        for client in sorted(gone):
            _log.warning(what, client, self._task)
        _send(answers)


class LocalServer(StoreService):
    """Serve clients of this very process, whose arrays are theirs."""

    def __init__(self) -> None:
        super().__init__(None, "the server in this process")
        self.store.variables.adopts = False

    def connect(self, name: str, timeout: float) -> _Client:
        return _Client(self, name, timeout)


class _Client:
    """Carry requests and replies as a connection would."""

    instance = "the only one"

    def __init__(self, server: LocalServer, name: str, timeout: float) -> None:
        self.name, self._timeout = name, timeout
        self._server = server
        self._closed = False
        server.connected(self)

    def start(self, request: Any) -> _Call:
        if self._closed:
            raise WorkerLostError(f"{self.name} was closed.")
        call = _Call(self.name, self._timeout)
        reply = self._server.handle(self, call, request)
        if reply is not None:
            self.send(reply, call)
        return call

    def send(self, record: Any, call: Any) -> None:
        call.reply = record
        call.arrived.set()

    def close(self) -> None:
        if not self._closed:  # A collected strategy closes again, maybe under the server's lock.
            self._closed = True
            self._server.disconnected(self, died=False)


class _Call:
    """A request that may have to wait for what other threads do."""

    instance = _Client.instance

    def __init__(self, name: str, timeout: float) -> None:
        self.arrived = threading.Event()
        self.reply: Any = None
        self._name, self._timeout = name, timeout
        self._deadline = time.monotonic() + timeout

    def result(self, until: float = math.inf) -> Any:
        left = min(until, self._deadline) - time.monotonic()
        if not self.arrived.wait(timeout=max(0.0, left)) and time.monotonic() > self._deadline:
            within = f"within {self._timeout:g} s"
            raise CollectiveTimeoutError(f"{self._name}: no answer in this process {within}.")
        return self.reply

    def cancel(self) -> None:
        """Wait no more."""


def _send(answers: Answers) -> None:
    for (peer, call), reply in answers:
        peer.send(reply, call)
