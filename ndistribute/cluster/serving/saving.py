"""A store that outlives its process: restored at the start, written to disk every so often.

The store is locked while its arrays are lent to a snapshot (those that lie on a shelf are copied),
not while they are written: meanwhile it answers, and what is being written does not change.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from ndistribute.cluster.protocol.replies import Failure, Reply, Saved
from ndistribute.cluster.protocol.requests import Batch, Reading, Request, SaveSnapshot
from ndistribute.cluster.serving.desk import StoreDesk
from ndistribute.cluster.serving.snapshots import Snapshots
from ndistribute.cluster.shelf.shelf import Shelf
from ndistribute.cluster.store import Store
from ndistribute.cluster.wire.tensors import MalformedError
from ndistribute.cluster.wire.waiting_room import Replies
from ndistribute.errors import CheckpointCorruptError

__all__ = ["SavingDesk"]

_CLOSE_SECONDS = 600.0
_log = logging.getLogger("ndistribute")


class SavingDesk(StoreDesk):
    """Answer by a store, and write snapshots of it: every so often, when asked, and at the end.

    Args:
        directory: where snapshots are, and go.
        task: how this server is called.
        seconds: after so long something that changed is written.
        limit_bytes: the longest message.
        shelf: where the variables lie, if other processes read them there.
        is_here: whether a client has a session now.
        return_seconds: so long after a restart, clients of before that have none count as dead.

    Raises:
        CheckpointCorruptError: there are snapshots, and none can be used.
        OSError: the directory can not be used.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        task: str,
        *,
        seconds: float = 30.0,
        limit_bytes: int = 4 << 30,
        shelf: Shelf | None = None,
        is_here: Callable[[str], bool] = lambda client: True,
        return_seconds: float = 10.0,
    ) -> None:
        self._files = Snapshots(directory, task)
        try:
            store = _restored(self._files, task, shelf)
        except BaseException:
            self._files.close()
            raise
        self.resumed = store is not None
        super().__init__(store or Store(shelf=shelf), limit_bytes)
        self._task = task
        self._seconds = seconds
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._changed = False
        self._asked: dict[str, int] = {}  # The tickets of those who wait, by client,
        self._served: dict[str, int] = {}  # and of those for whom a snapshot is being written.
        self._closing = False
        self._deliver: Callable[[Replies], None] = lambda replies: None
        self._writer = threading.Thread(target=self._live, name="ndistribute snap", daemon=True)
        self._writer.start()
        self._is_here = is_here
        self._roll_call = threading.Timer(return_seconds, self._call_roll)
        self._roll_call.daemon = True
        if self.store.clients:
            self._roll_call.start()

    def bind(self, deliver: Callable[[Replies], None]) -> None:
        """Take what late answers are given to."""
        self._deliver = deliver

    def handle(self, client: str, ticket: int, request: Request) -> list[tuple[int, Reply]]:
        """Do what a request asks; a snapshot is answered once it is written."""
        with self._lock:
            if isinstance(request, SaveSnapshot):
                # Who asks again, since writing takes long, is to get what is being written.
                line = self._served if client in self._served else self._asked
                line[client] = ticket
                self._wake.notify_all()
                return []
            self._changed = self._changed or _changes(request)
            return super().handle(client, ticket, request)

    def close(self) -> None:
        """Write what changed since the last snapshot; a second call does nothing."""
        with self._lock:
            self._closing = True
            self._wake.notify_all()
        self._roll_call.cancel()
        self._writer.join(timeout=_CLOSE_SECONDS)
        if self._writer.is_alive():
            _log.error("%s still writes its last snapshot and is left to it", self._task)
            return
        self._files.close()
        super().close()

    def _live(self) -> None:
        """Write snapshots until the desk is closed; the last one then."""
        closing = False
        while not closing:
            with self._lock:
                self._wake.wait_for(lambda: self._asked or self._closing, timeout=self._seconds)
                closing = self._closing
                self._served, self._asked = self._asked, {}
                changed = self._changed
            reply = self._saved() if changed else Saved(self.store.total)
            with self._lock:
                served, self._served = self._served, {}
            self._deliver([(ticket, reply) for ticket in served.values()])

    def _call_roll(self) -> None:
        """Let those leave who died while this server was away: others may wait for them."""
        with self._lock:
            gone = [client for client in self.store.clients if not self._is_here(client)]
        for client in gone:
            _log.warning(
                "%s counts as dead: %s was restarted, and it did not return", client, self._task
            )
            self._deliver(self.leave(client, died=True))

    def _saved(self) -> Saved | Failure:
        try:
            with self._lock:
                self._changed = False
                total = self.store.total
                head, tensors = self.store.snapshot()
            path = self._files.write(head, tensors)
        except Exception as error:  # The server is worth more than its snapshot: it goes on.
            with self._lock:
                self._changed = True
            known = isinstance(error, OSError | MemoryError)
            # As text: a log that keeps the error would keep the arrays.
            _log.error("%s wrote no snapshot: %s", self._task, f"{error}", exc_info=not known)
            return Failure("full", f"{self._task} could not write a snapshot: {error}")
        _log.info("%s wrote %s after %d transactions", self._task, path, total)
        return Saved(total)


def _changes(request: Request) -> bool:
    if isinstance(request, Batch):
        return any(_changes(single) for single in request.requests)
    return not isinstance(request, Reading)


def _restored(files: Snapshots, task: str, shelf: Shelf | None) -> Store | None:
    """Return a store as the newest whole snapshot holds it, None where there is none."""
    snapshot = files.newest()
    if snapshot is None:
        return None
    now = time.time()
    try:
        store = Store.restore(snapshot.head, snapshot.tensors, epoch=int(now), shelf=shelf)
    except MalformedError as error:
        raise CheckpointCorruptError(
            f"{snapshot.path} is whole, but not of this version of ndistribute: {error} Move it "
            "away to start anew."
        ) from error
    _log.warning(
        "%s goes on from %s, which is %.1f s old: %d transactions are in it",
        task,
        snapshot.path,
        now - snapshot.saved_at,
        store.total,
    )
    return store
