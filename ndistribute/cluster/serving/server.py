"""`Server`: one task of a cluster as a listening process, as `tf.distribute.Server`.

A task of the job ``ps`` holds variables in a store and serves it. A server listens where the
cluster says that its task is, and nowhere else. Nobody has to tell it that the job is over: it
sees who comes and goes.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from ndistribute.cluster.coordination import this_task
from ndistribute.cluster.coordination.worker_desk import WorkerDesk
from ndistribute.cluster.seconds import seconds_of
from ndistribute.cluster.serving.attendance import GRACE_SECONDS, RETURN_SECONDS, Attendance
from ndistribute.cluster.serving.desk import EmptyDesk, StoreDesk
from ndistribute.cluster.serving.inherited import release_inherited
from ndistribute.cluster.serving.saving import SavingDesk
from ndistribute.cluster.serving.vigil import AttendedDesk, Sigterm, Vigil
from ndistribute.cluster.shelf.shelf import Shelf, make_shelf
from ndistribute.cluster.spec import ClusterSpec, only_task
from ndistribute.cluster.store import Store
from ndistribute.cluster.wire.guard import Guard
from ndistribute.cluster.wire.near import near_wanted
from ndistribute.cluster.wire.rpc import GrpcServer
from ndistribute.cluster.wire.service import Desk, Service
from ndistribute.cluster.wire.transfers import Limits
from ndistribute.errors import WorkerLostError
from ndistribute.transport.address import split_address
from ndistribute.transport.secret import find_secret
from ndistribute.transport.tls import tls_files

__all__ = ["Server"]

_HOLDING = ("ps", "local")
_FAREWELL_SECONDS = 1.0
_SNAPSHOT_SECONDS = 30.0
_log = logging.getLogger("ndistribute")


class Server:
    """Serve one task of a cluster to its other tasks.

    Args:
        cluster: all tasks, or what makes a ``ClusterSpec``.
        job_name: this task's job; may be left out where the cluster has one alone.
        task_index: its index in the job; may be left out where the job has one task.
        start: whether to listen at once.
        desk: what answers; None: a store for a task of ``ps``.
        limits: what clients can make the server hold.
        environ: where the secret and the TLS files are named, and how long a client may be silent.
        snapshot_directory: where a task of ``ps`` writes what it holds, and finds it at its next
            start; None: as ``NDISTRIBUTE_SNAPSHOT_DIR`` says, and without it nowhere.
        snapshot_seconds: how often it does; None: as ``NDISTRIBUTE_SNAPSHOT_SECONDS`` says, and
            without it every 30 s.

    Raises:
        AuthenticationError: there is no secret, or a TLS file is not what it should be.
        CheckpointCorruptError: there are snapshots, and none of them is whole.
        MissingDependencyError: gRPC is not installed.
        OSError: this process cannot listen there, or not use the snapshot directory.
        ValueError: the cluster has no such task, or a number of seconds is none.

    >>> server = Server({"ps": ["localhost:2222"]}, "ps", 0, start=False)
    >>> server.target
    'grpc://localhost:2222'
    """

    def __init__(
        self,
        cluster: ClusterSpec | Mapping[str, Sequence[str] | Mapping[int, str]],
        job_name: str | None = None,
        task_index: int | None = None,
        *,
        start: bool = True,
        desk: Desk | None = None,
        limits: Limits | None = None,
        environ: Mapping[str, str] | None = None,
        snapshot_directory: str | os.PathLike[str] | None = None,
        snapshot_seconds: float | None = None,
    ) -> None:
        environ = os.environ if environ is None else environ
        self._cluster = ClusterSpec(cluster)
        self._job, self._index = only_task(self._cluster, job_name, task_index)
        self._address = self._cluster.task_address(self._job, self._index)
        self._limits = limits or Limits()
        self._environ = environ
        self._given_desk = desk
        self._directory = snapshot_directory
        if snapshot_directory is None and self._job == "ps":
            self._directory = environ.get("NDISTRIBUTE_SNAPSHOT_DIR") or None
        self._seconds = snapshot_seconds or seconds_of(
            environ, "NDISTRIBUTE_SNAPSHOT_SECONDS", _SNAPSHOT_SECONDS
        )
        patience = seconds_of(environ, "NDISTRIBUTE_RETURN_SECONDS", RETURN_SECONDS)
        self._attendance = Attendance(
            self._cluster, return_seconds=patience, grace_seconds=GRACE_SECONDS
        )
        self._vigil = Vigil(self._attendance)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._server: GrpcServer | None = None
        self._port = 0
        if start:
            self.start()

    @staticmethod
    def create_local_server(
        start: bool = True, *, environ: Mapping[str, str] | None = None
    ) -> Server:
        """Return a server for this host alone, at any free port.

        Args:
            start: whether to listen at once.
            environ: where the secret is named.
        """
        environ = os.environ if environ is None else environ
        return Server({"local": ["localhost:0"]}, "local", 0, start=start, environ=environ)

    @property
    def cluster_spec(self) -> ClusterSpec:
        """Return the whole cluster."""
        return self._cluster

    @property
    def name(self) -> str:
        """Return which task this is, such as ``"ps:0"``."""
        return f"{self._job}:{self._index}"

    @property
    def address(self) -> str:
        """Return where it listens, with the port that it got."""
        host = self._address.rpartition(":")[0]
        return f"{host}:{self._port or split_address(self._address)[1]}"

    @property
    def target(self) -> str:
        """Return where it listens, as TensorFlow writes it."""
        return f"grpc://{self.address}"

    def start(self) -> None:
        """Listen; once it does so, or has stopped, this does nothing."""
        with self._lock:
            if self._server is not None or self._ended.is_set():
                return
            # The other tasks' addresses count too: where all are local, so is the secret.
            jobs = (self._cluster.job_tasks(job) for job in self._cluster.jobs)
            addresses = [address for job in jobs for address in job if address is not None]
            guard = Guard(find_secret(addresses, self._environ), self.name)
            tls = tls_files(self._environ)
            silence = seconds_of(self._environ, "NDISTRIBUTE_HEARTBEAT_SECONDS", 10.0)
            release_inherited(self._address, self._environ)
            desk = AttendedDesk(self._given_desk or self._usual_desk(guard, silence), self._vigil)
            service = Service(guard, desk, self._limits, silence_seconds=silence)
            try:
                near = near_wanted(self._environ)
                self._server = GrpcServer(service, self._address, tls, near=near)
                self._port = self._server.port
            except BaseException:
                service.close()
                raise
            _log.info("%s listens at %s", self.name, self.address)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the work is over, and say whether it is; the server is stopped then.

        It is over when somebody stops the server, when the chief has left, and, in a cluster that
        has no chief, when every worker has come and left. SIGTERM stops the server too, and is
        raised as ``SystemExit`` then, if this is the main thread and nobody else handles it.

        Args:
            timeout: seconds to wait; None: as long as it takes.

        Raises:
            WorkerLostError: the chief died; or a worker did, and nobody else is there and it did
                not come back within ``NDISTRIBUTE_RETURN_SECONDS``.
        """
        with Sigterm() as sigterm:
            try:
                outlook = self._vigil.wait(timeout)
            except BaseException:  # SIGTERM or Ctrl-C.
                sigterm.disarm()
                self.stop(_FAREWELL_SECONDS)
                raise
            if outlook is None:
                return self._ended.is_set()
            sigterm.disarm()
            self.stop(_FAREWELL_SECONDS)
        if outlook.lost:
            raise WorkerLostError(f"{self.name} ends: {outlook.lost}.")
        _log.info("%s ends: all who used it have left", self.name)
        return True

    def stop(self, timeout: float = 5.0) -> None:
        """Send away who waits, write a last snapshot, and give the port back.

        A second call does nothing.

        Args:
            timeout: seconds that calls have to end by themselves.
        """
        with self._lock:
            self._ended.set()
            server, self._server = self._server, None  # What was served is not held any longer.
            try:
                if server is not None:
                    server.close(timeout)
            finally:
                self._vigil.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _usual_desk(self, guard: Guard, silence: float) -> Desk:
        if self._job == "worker" and "chief" in self._cluster.jobs:
            this_task.enter(this_task.Task(self._cluster, self._job, self._index))
            return WorkerDesk(self.name, self._limits.message_bytes)
        if self._job not in _HOLDING:
            return EmptyDesk(self.name)
        shelf = make_shelf() if near_wanted(self._environ) else None
        try:
            return self._holding_desk(shelf, guard, silence)
        except BaseException:
            if shelf is not None:
                shelf.close()
            raise

    def _holding_desk(self, shelf: Shelf | None, guard: Guard, silence: float) -> Desk:
        if self._directory is None:
            return StoreDesk(Store(shelf=shelf), self._limits.message_bytes)
        desk = SavingDesk(
            self._directory,
            self.name,
            seconds=self._seconds,
            limit_bytes=self._limits.message_bytes,
            shelf=shelf,
            is_here=guard.has,
            return_seconds=silence,
        )
        self._attendance.resumed = desk.resumed
        return desk
