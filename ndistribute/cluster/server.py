"""`Server`: one task of a cluster as a listening process, as `tf.distribute.Server`.

A task of the job ``ps`` holds variables in a store and serves it. A server listens where the
cluster says that its task is, and nowhere else.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from ndistribute.cluster.desk import EmptyDesk, StoreDesk
from ndistribute.cluster.guard import Guard
from ndistribute.cluster.rpc import GrpcServer
from ndistribute.cluster.service import Desk, Service
from ndistribute.cluster.spec import ClusterSpec
from ndistribute.cluster.store import Store
from ndistribute.cluster.transfers import Limits
from ndistribute.trust.address import split_address
from ndistribute.trust.secret import find_secret
from ndistribute.trust.tls import tls_files

__all__ = ["Server"]

_LISTEN_FD = "NDISTRIBUTE_LISTEN_FD"
_HOLDING = ("ps", "local")
_LOOK_SECONDS = 3600.0
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

    Raises:
        AuthenticationError: there is no secret, or a TLS file is not what it should be.
        MissingDependencyError: gRPC is not installed.
        OSError: this process cannot listen there.
        ValueError: the cluster has no such task.

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
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._cluster = ClusterSpec(cluster)
        self._job, self._index = _task(self._cluster, job_name, task_index)
        self._address = self._cluster.task_address(self._job, self._index)
        self._limits = limits or Limits()
        self._environ = environ
        self._desk = desk or self._usual_desk()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._server: GrpcServer | None = None
        if start:
            self.start()

    @staticmethod
    def create_local_server(
        start: bool = True, *, environ: Mapping[str, str] = os.environ
    ) -> Server:
        """Return a server for this host alone, at any free port.

        Args:
            start: whether to listen at once.
            environ: where the secret is named.
        """
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
        port = self._server.port if self._server else split_address(self._address)[1]
        return f"{host}:{port}"

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
            silence = float(self._environ.get("NDISTRIBUTE_HEARTBEAT_SECONDS", "10"))
            _release_inherited(self._address, self._environ)
            service = Service(guard, self._desk, self._limits, silence_seconds=silence)
            try:
                self._server = GrpcServer(service, self._address, tls)
            except BaseException:
                service.close()
                raise
            _log.info("%s listens at %s", self.name, self.address)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the server is stopped, for ever if need be, and say whether it is.

        Args:
            timeout: seconds to wait; None: as long as it takes.
        """
        if timeout is not None:
            return self._ended.wait(timeout=timeout)
        while not self._ended.wait(timeout=_LOOK_SECONDS):
            pass
        return True

    def stop(self, timeout: float = 5.0) -> None:
        """Send away who waits and give the port back; a second call does nothing.

        Args:
            timeout: seconds that calls have to end by themselves.
        """
        with self._lock:
            self._ended.set()
            if self._server is not None:
                self._server.close(timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _usual_desk(self) -> Desk:
        if self._job in _HOLDING:
            return StoreDesk(Store(), self._limits.message_bytes)
        return EmptyDesk(self.name)


def _task(cluster: ClusterSpec, job: str | None, index: int | None) -> tuple[str, int]:
    """Return this process's task; what was not said is known where there is only one.

    Raises:
        ValueError: there are several, or it is not there.
    """
    if job is None:
        if len(cluster.jobs) != 1:
            raise ValueError(f"The cluster has the jobs {cluster.jobs}: say which by job_name.")
        (job,) = cluster.jobs
    indices = cluster.task_indices(job)
    if index is None:
        if len(indices) != 1:
            raise ValueError(f"The job {job!r} has the tasks {indices}: say which by task_index.")
        (index,) = indices
    cluster.task_address(job, index)
    return job, index


def _release_inherited(address: str, environ: Mapping[str, str]) -> None:
    """Close the socket by which a launcher kept this task's port free until now.

    gRPC opens sockets of its own only, and two cannot listen at one port.
    """
    number = environ.get(_LISTEN_FD, "")
    if not number.isdigit():
        return
    try:
        held = socket.socket(fileno=os.dup(int(number)))
    except OSError:
        return  # It was used and closed before.
    with held:
        ours = held.getsockname()[1:2] == (split_address(address)[1],)
    if ours:
        os.close(int(number))
