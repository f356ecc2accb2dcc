"""`StoreService`: the service that executes requests on a store and saves the store.

A lock protects the store. Snapshots are written, and the log is synced, without the lock. A
`LocalServer` serves clients of its own process.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import threading
import time
from pathlib import Path
from typing import Any, Literal

from ndistribute.errors import DistributeError, UnavailableError
from ndistribute.parameter_server import messages as m
from ndistribute.parameter_server.shared import storable
from ndistribute.parameter_server.snapshot import Disk, UpdateLog
from ndistribute.parameter_server.store import Answers, Store
from ndistribute.parameter_server.stored_variables import Refused
from ndistribute.task.server import SERVICES, ServedTask, TaskService
from ndistribute.timeline import recorded
from ndistribute.transport.failure_detector import silence_seconds
from ndistribute.transport.rpc import ClientCount, LocalClient

_CLOSE_SECONDS = 600.0
_LOG_BYTES = 1 << 30  # A longer log triggers a snapshot.
MISFIT = (
    "{} was written with replicas={}, and this strategy has replicas={}, so it would start from "
    "initial values: pass the same replicas, move the snapshots away, or name another folder."
)
_log = logging.getLogger("ndistribute")


class StoreService(TaskService):
    """Execute requests on a store; with a directory, save a snapshot every `seconds`.

    With durability ``"log"`` the reply to a change is sent after the log on the disk contains the
    change. After a restart, earlier clients count as dead if they are not back within
    `return_seconds`, so that other clients do not wait for them.
    """

    requests = m.Request
    macs = False

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
                f'durability="log" of {task} needs a directory for its log and snapshots: pass '
                'snapshot_directory, or use durability="snapshot".'
            )
        self._task, self._directory, self._seconds = task, directory, seconds
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._saving = threading.Lock()
        self._clients = ClientCount()
        self._asked: list[tuple[Any, Any]] = []  # Calls that wait for a snapshot.
        self._changed = self._due = self._closing = False
        self._failed_last_snapshot = False
        self._told: dict[str, str] = {}  # The logged failures, and their reasons.
        self._logs_all, self._return_seconds = durability == "log", return_seconds
        self._disk: Disk | None = None
        self._open()

    def _open(self) -> None:
        """Restore the store, and begin to save it."""
        if self._directory is not None:
            self._disk = Disk(self._directory, self._task, log=self._logs_all)
        self.store = Store() if self._disk is None else self._disk.store
        self.store.variables.may_keep_arrays = True
        self.resumed = self._disk is not None and self._disk.resumed
        if self._disk is None:
            return
        self.store.shared.keep(self._lock, self._log_shared, self._sync_shared)
        self._changed = self._disk.replayed
        expires = time.monotonic() + self._return_seconds if self.store.clients else math.inf
        live, name = functools.partial(self._live, self._disk, expires), "ndistribute snapshots"
        self._writer = threading.Thread(target=live, name=name, daemon=True)
        self._writer.start()

    def connected(self, peer: Any) -> None:
        with self._lock:
            self._clients.add(peer)

    @recorded(lambda reply, self, peer, *_: ("serve", peer.name))
    def handle(self, peer: Any, call: Any, request: m.Request) -> m.Reply | None:
        """Execute a request; return the reply, or None if it is sent later."""
        reads = isinstance(request, m.Read | m.Status)
        if isinstance(request, m.Status) and (why := self._misfit()):  # A strategy's first request.
            return m.Failure("mismatch", why)
        with self._lock:
            if isinstance(request, m.Status) and self._disk is not None and request.of != "memory":
                # The state before the log begins must be on the disk as well.
                if request.of == "log" and not self._disk.logs:
                    self._disk.begin_log()
                self._asked.append((peer, call))
                self._wake.notify_all()
                return None
            if isinstance(request, m.ClientChange):
                if self._closing:  # The client asks the restarted server again.
                    return None
                if (failure := self._broken()) is not None:
                    return failure
            answers = self.store.handle(peer.name, (peer, call), request)
            self._changed = self._changed or not reads
            logs = self._logs(reads)
        if (failure := self._sync(logs)) is not None:
            answers = [(to, failure) for to, _ in answers]
        reply = None
        for (to, number), answer in answers:
            if to is peer and number == call:
                reply = answer
            else:
                to.send(answer, number)
        return reply

    def disconnected(self, peer: Any, died: bool) -> None:
        """Remove a client that others may wait for, unless it has already come back."""
        with self._lock:
            if not self._clients.remove(peer, died):
                return
            self._changed = self._changed or peer.name in self.store.clients
            answers = self.store.left(peer.name)
        _send(answers)

    def close(self) -> None:
        """Save the last changes, and refuse further ones.

        Raises:
            DistributeError: the last snapshot could not be written.
        """
        with self._lock:
            self._closing = True
            self._wake.notify_all()
        if self._disk is None:
            return
        self._writer.join(timeout=_CLOSE_SECONDS)
        if self._writer.is_alive():
            self._failed_last_snapshot = True
            _log.error("%s still writes its last snapshot; nothing waits for it", self._task)
        else:
            self._disk.close()
        if self._failed_last_snapshot:
            raise DistributeError(
                f"{self._task} could not write its last snapshot to {self._directory}: changes "
                "after the snapshot before it are lost. The log of this task has the reason."
            )

    def _misfit(self) -> str:
        """Return why a strategy cannot use this state: its folder has copies of `replicas=2`."""
        if self._directory is not None:
            for path in Path(self._directory).glob("copy-?-of-ps-*[0-9].[0-9]*"):
                if path.is_dir() or path.stat().st_size:
                    return MISFIT.format(path, 2, 1)
        return ""

    def _write_soon(self) -> None:
        self._due = True
        self._wake.notify_all()

    def _logs(self, reads: bool = False) -> list[tuple[Any, int]]:
        """Return the logs that must have all changes before a reply, and the positions to reach.

        A position is the length of a log. A request that only reads needs no logs. The caller
        holds the lock.
        """
        logs = (
            [] if self._disk is None or reads else [(log, log.written) for log in self._disk.logs]
        )
        if logs and logs[-1][1] > _LOG_BYTES:
            self._write_soon()
        return logs

    def _sync(self, logs: list[tuple[Any, int]]) -> m.Failure | None:
        """Sync logs; if that fails, return the reply to the changes in them."""
        for log, position in logs:
            try:
                log.sync(position)
            except OSError as error:
                with self._lock:  # Only a snapshot makes the state on the disk known again.
                    self._write_soon()
                return self._not_logged(log, error, "the change may be lost")
        return None

    def _broken(self) -> m.Failure | None:
        """Return the reply to changes until a snapshot replaces a log of unknown content."""
        for log in [] if self._disk is None else self._disk.logs:
            if log.broken:
                return self._not_logged(log, log.broken, "nothing was changed")
        return None

    def _not_logged(self, log: UpdateLog, error: OSError, consequence: str) -> m.Failure:
        return m.Failure(
            "full",
            f"{self._task} could not write {log.path} to the disk ({error}): {consequence}. It "
            "accepts changes again after it has written a snapshot.",
        )

    def _log_shared(self, change: m.SharedChange) -> None:
        """Log a change of a graph's variable before it is made; the caller holds the lock."""
        if self._closing:
            raise Refused(f"{self._task} was stopped.", "full")
        if (failure := self._broken()) is not None:
            raise Refused(failure.message, "full")
        self.store.log(storable(change))
        self._changed = True

    def _sync_shared(self) -> None:
        """Wait until the disk has all changes of graphs' variables so far.

        Raises:
            UnavailableError: the log cannot be written.
        """
        with self._lock:
            logs = self._logs()
        if (failure := self._sync(logs)) is not None:
            raise UnavailableError(failure.message)

    def _live(self, disk: Disk, expires: float) -> None:
        """Write snapshots until the service is closed, and then a last one."""
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
        self._failed_last_snapshot = isinstance(reply, m.Failure)

    def _save(self, disk: Disk) -> m.Totals | m.Failure:
        try:
            with self._saving:
                totals = disk.write(self._lock)
        except Exception as error:  # Continue without this snapshot.
            with self._lock:
                self._changed = True
            self._tell("write a snapshot", error)
            return m.Failure("full", f"{self._task} could not write a snapshot: {error}")
        self._tell("write a snapshot")
        return totals

    def _tell(self, what: str, error: Exception | None = None) -> None:
        """Log that something fails or works again, but each reason, such as a full disk, once."""
        # An incomplete snapshot has another name each time.
        reason = " ".join(word for word in f"{error or ''}".split() if ".writing" not in word)
        before, self._told[what] = self._told.get(what, ""), reason
        if reason not in ("", before):
            known = isinstance(error, OSError | MemoryError | DistributeError)
            # As text: a handler that keeps the error would keep the snapshot's arrays.
            _log.error("%s could not %s: %s", self._task, what, f"{error}", exc_info=not known)
        elif before and not reason:
            _log.warning("%s can %s again", self._task, what)

    def _expire_clients(self) -> None:
        """Remove clients that died while this server was down, since others may wait for them."""
        with self._lock:
            gone = self.store.clients - {*self._clients}
            answers = [answer for client in gone for answer in self.store.left(client)]
        what = "%s counts as dead, because it did not return after %s was restarted"
        for client in sorted(gone):
            _log.warning(what, client, self._task)
        _send(answers)


def _serve(task: ServedTask) -> StoreService | None:
    if task.job not in ("ps", "local"):
        return None
    return StoreService(
        task.snapshot_directory,
        task.name,
        seconds=task.snapshot_seconds,
        durability=task.durability,
        return_seconds=silence_seconds(task.environ),
    )


SERVICES["ps"] = _serve


class LocalServer(StoreService):
    """A server for clients of the same process, which keep their arrays."""

    def __init__(self) -> None:
        super().__init__(None, "the server in this process")
        self.store.variables.may_keep_arrays = False

    def connect(self, name: str, timeout: float) -> LocalClient:
        return LocalClient(self, name, timeout)


def _send(answers: Answers) -> None:
    for (peer, call), reply in answers:
        peer.send(reply, call)
