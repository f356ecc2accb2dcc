"""`StoreService`: a store that answers the connections of a server, and outlives its process.

The store is locked while it is changed and while its arrays are lent to a snapshot. Nobody waits
for the disk under the lock: snapshots are written, and the log is synced, beside it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any, Literal

from ndistribute import tensor_files
from ndistribute.errors import CheckpointCorruptError
from ndistribute.parameter_server.messages import (
    Failure,
    Logged,
    Read,
    Reply,
    Request,
    Status,
    Totals,
)
from ndistribute.parameter_server.snapshot import UpdateLog, read_log, restore, take
from ndistribute.parameter_server.store import Answers, Store
from ndistribute.parameter_server.variables import Refused
from ndistribute.transport.codec import MalformedError
from ndistribute.transport.rpc import Peer

__all__ = ["StoreService"]

_EPOCH_BITS = 30
_CLAIM_SECONDS = 30.0  # A process that is being stopped still writes its last snapshot.
_CLOSE_SECONDS = 600.0
_LOG_BYTES = 1 << 30  # A longer log is replaced by a snapshot before that is due.
_log = logging.getLogger("ndistribute")


class StoreService:
    """Answer by a store; write what it holds to a directory, if there is one.

    Args:
        directory: where snapshots and logs are, and go; None: what the store holds ends with it.
        task: the name of this server, such as ``"ps:0"``.
        seconds: after so long something that changed is written.
        durability: ``"snapshot"``: what changed since the last snapshot is lost with a server that
            is killed. ``"log"``: a change is answered once it is in a log on the disk, so nothing
            that was acknowledged is lost. Others may read a change before it is acknowledged.
        return_seconds: so long after a restart, clients of before that have no connection count
            as dead: others may wait for them.

    Attributes:
        resumed: whether there was something to go on from.
        failed_last_snapshot: whether `close` could not write what changed.

    Raises:
        CheckpointCorruptError: there are snapshots, and none can be used, or logs are missing.
        OSError: the directory can not be used.
        ValueError: there is no directory for a log.

    >>> service = StoreService(None, "ps:0")
    >>> service.close()
    """

    requests = Request
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
        self.resumed = self.failed_last_snapshot = False
        self._task, self._stem = task, task.replace(":", "-")
        self._directory = None if directory is None else Path(directory)
        self._seconds = seconds
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._peers: dict[str, Peer] = {}
        self._asked: dict[str, tuple[Peer, int]] = {}  # Who waits for a snapshot.
        self._changed = self._due = self._closing = False
        self._logs: list[UpdateLog] = []  # Those that no snapshot replaces; the last is in use.
        self._log_number = 1
        self._kept_log = False  # Whether an earlier life of this server kept a log.
        self._kept_from = [1]  # The first log that each of the last snapshots goes on with.
        self._store = Store()
        self._writer: threading.Thread | None = None
        self._store.variables.adopts = True
        if self._directory is None:
            return
        self._claim = tensor_files.claim(self._directory, self._stem, _CLAIM_SECONDS)
        try:
            self._resume(self._directory)
            if durability == "log" or self._kept_log:
                self._keep_log()
        except BaseException:
            self._claim.close()
            raise
        expires = time.monotonic() + return_seconds if self._store.clients else None
        self._writer = threading.Thread(
            target=self._live, args=(expires,), name="ndistribute snapshots", daemon=True
        )
        self._writer.start()

    def connected(self, peer: Peer) -> None:
        """Know that a client is there."""
        with self._lock:
            self._peers[peer.name] = peer

    def handle(self, peer: Peer, call: int, request: Request) -> Reply | None:
        """Do what a request asks, and return the reply unless that comes later."""
        reads = isinstance(request, Read | Status)
        with self._lock:
            of = request.of if isinstance(request, Status) else "memory"
            if of != "memory" and self._writer is not None:
                if of == "log":  # What is there already has to be on the disk as well.
                    self._keep_log()
                self._asked[peer.name] = (peer, call)
                self._wake.notify_all()
                return None
            if isinstance(request, Logged):
                if self._closing:  # The next life of this server will be asked again.
                    return None
                for log in self._logs:
                    if log.broken:
                        return self._not_logged(log, log.broken, "nothing was changed")
            answers = self._store.handle(peer.name, (peer, call), request)
            self._changed = self._changed or not reads
            in_use = self._logs[-1] if self._logs and not reads else None
            position = in_use.written if in_use is not None else 0
        if in_use is not None:
            answers = self._synced(in_use, position, answers)
        reply = None
        for (to, number), answer in answers:
            if to is peer and number == call:
                reply = answer
            else:
                to.send(answer, number)
        return reply

    def disconnected(self, peer: Peer, died: bool) -> None:
        """Let others wait for a client no more, unless it is back already."""
        with self._lock:
            if self._peers.get(peer.name) is not peer:
                return
            del self._peers[peer.name]
            self._asked.pop(peer.name, None)
            self._changed = self._changed or peer.name in self._store.clients
            answers = self._store.left(peer.name)
        _send(answers)

    def close(self) -> None:
        """Write what changed since the last snapshot; a second call does nothing.

        From now on changes are left to the next life of this server.
        """
        with self._lock:
            self._closing = True
            self._wake.notify_all()
        if self._writer is None:
            return
        self._writer.join(timeout=_CLOSE_SECONDS)
        if self._writer.is_alive():
            self.failed_last_snapshot = True
            _log.error("%s still writes its last snapshot and is left to it", self._task)
            return
        for log in self._logs:
            log.close(covered=False)
        self._claim.close()

    def _keep_log(self) -> None:
        if not self._logs:
            self._logs = [UpdateLog(self._log_path(self._log_number))]
            self._store.log = self._append

    def _append(self, request: Logged) -> None:
        """Append what is about to be changed to the log, or refuse it."""
        log = self._logs[-1]
        try:
            log.append(request)
        except OSError as error:
            raise Refused(
                f"{self._task} can not write {log.path}: {error}; nothing was changed.", "full"
            ) from error
        if log.written > _LOG_BYTES:
            self._due = True
            self._wake.notify_all()

    def _synced(self, log: UpdateLog, position: int, answers: Answers) -> Answers:
        """Return the answers once what they acknowledge is on the disk, or failures."""
        try:
            log.sync(position)
            return answers
        except OSError as error:
            with self._lock:  # Only a snapshot can tell what the disk holds.
                self._due = True
                self._wake.notify_all()
            failure = self._not_logged(log, error, "what was changed may be lost")
            return [(call, failure) for call, _ in answers]

    def _not_logged(self, log: UpdateLog, error: OSError, consequence: str) -> Failure:
        return Failure(
            "full",
            f"{self._task} could not bring {log.path} to the disk ({error}): {consequence}. "
            "It takes changes again once it could write a snapshot.",
        )

    def _live(self, expires: float | None) -> None:
        """Write snapshots until the service is closed; the last one then."""
        closing = False
        while not closing:
            wait = self._seconds
            if expires is not None:
                wait = min(wait, max(0.0, expires - time.monotonic()))
            with self._lock:
                self._wake.wait_for(lambda: self._asked or self._due or self._closing, wait)
                closing, self._due = self._closing, False
                served, self._asked = self._asked, {}
                reply: Totals | Failure = self._totals()
                changed = self._changed
            if changed:
                reply = self._write_snapshot()
            for peer, call in served.values():
                peer.send(reply, call)
            if expires is not None and time.monotonic() >= expires:
                self._expire_clients()
                expires = None
        self.failed_last_snapshot = isinstance(reply, Failure)

    def _expire_clients(self) -> None:
        """Let those leave who died while this server was away: others may wait for them."""
        with self._lock:
            gone = self._store.clients - self._peers.keys()
            answers = [answer for client in gone for answer in self._store.left(client)]
        for client in sorted(gone):
            _log.warning(
                "%s counts as dead: %s was restarted, and it did not return", client, self._task
            )
        _send(answers)

    def _write_snapshot(self) -> Totals | Failure:
        directory = self._directory or Path()
        try:
            with self._lock:
                if self._logs and (self._logs[-1].written or self._logs[-1].broken):
                    self._logs.append(UpdateLog(self._log_path(self._log_number + 1)))
                    self._log_number += 1
                self._changed = False
                replaced, first = self._logs[:-1], self._log_number
                totals = self._totals()
                tensors, store = take(self._store)
            data = {"store": store, "log": first, "logged": bool(self._logs)}
            path = tensor_files.write(directory, self._stem, tensors, data)
        except Exception as error:  # The server is worth more than its snapshot: it goes on.
            with self._lock:
                self._changed = True
            known = isinstance(error, OSError | MemoryError)
            # As text: a log that keeps the error would keep the arrays of the snapshot.
            _log.error("%s wrote no snapshot: %s", self._task, f"{error}", exc_info=not known)
            return Failure("full", f"{self._task} could not write a snapshot: {error}")
        with self._lock:
            self._logs = self._logs[len(replaced) :]
        for log in replaced:
            log.close(covered=True)
        # The snapshot before this one is kept, and so are the logs that it goes on with.
        self._kept_from = [self._kept_from[-1], first]
        for number, old in self._log_paths(directory).items():
            if number < self._kept_from[0]:
                with contextlib.suppress(OSError):  # It goes with the next ones.
                    old.unlink()
        _log.info("%s wrote %s after %d transactions", self._task, path, totals.total)
        return totals

    def _totals(self) -> Totals:
        return Totals(self._store.total, self._store.began)

    def _resume(self, directory: Path) -> None:
        """Go on from the newest snapshot, and the logs since."""
        saved = tensor_files.newest(directory, self._stem)
        paths = self._log_paths(directory)
        if saved is None and not paths:
            return
        floor = int(time.time()) << _EPOCH_BITS
        self._store, first, logged = Store(floor), 1, bool(paths)
        if saved is not None:
            try:
                self._store = restore(saved.tensors, saved.data["store"], floor)
                first, logged = int(saved.data["log"]), bool(saved.data["logged"])
            except (CheckpointCorruptError, KeyError, TypeError, ValueError) as error:
                raise CheckpointCorruptError(
                    f"{saved.path} is whole, but not of this version of ndistribute: {error} Move "
                    "it away to start anew."
                ) from error
            _log.warning(
                "%s goes on from %s, which is %.1f s old: %d transactions are in it",
                self._task,
                saved.path,
                time.time() - saved.saved_at,
                self._store.total,
            )
        numbers = [number for number in sorted(paths) if number >= first]
        if numbers != [*range(first, first + len(numbers))] or (logged and not numbers):
            raise CheckpointCorruptError(
                f"{self._task} goes on with {self._log_path(first).name} and those after it, but "
                f"{directory} has {[paths[number].name for number in numbers]}: updates that were "
                "acknowledged are missing. Move its files away to start anew."
            )
        for number in numbers:
            self._replay(paths[number])
        self.resumed, self._store.began = True, self._store.total
        self._store.variables.adopts = True
        self._changed = bool(numbers)
        self._kept_log = logged
        self._log_number = first + len(numbers)
        self._kept_from = [first]

    def _replay(self, path: Path) -> None:
        before = self._store.total
        try:
            for request in read_log(path):
                for _, reply in self._store.handle("", 0, request):
                    if isinstance(reply, Failure):
                        raise MalformedError(reply.message)
        except MalformedError as error:
            raise CheckpointCorruptError(
                f"{path} does not fit the snapshot before it: {error} Move both away to start anew."
            ) from error
        _log.warning(
            "%s made %d transactions of %s again", self._task, self._store.total - before, path
        )

    def _log_path(self, number: int) -> Path:
        return (self._directory or Path()) / f"{self._stem}.{number:06d}.log"

    def _log_paths(self, directory: Path) -> dict[int, Path]:
        found = directory.glob(f"{self._stem}.*.log")
        return {int(n): path for path in found if (n := path.name.split(".")[-2]).isdecimal()}


def _send(answers: list[tuple[Any, Reply]]) -> None:
    for (peer, call), reply in answers:
        peer.send(reply, call)
