"""`Server`: one task of a cluster as a listening process, as `tf.distribute.Server`.

A task of the job ``ps`` holds variables; a worker of a chief runs what its coordinator sends.
Nobody tells a server that the job is over: it sees who comes and goes, and `ExitPolicy` says what
that means.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from ndistribute.cluster.resolvers import ClusterResolver, enter_task, seconds_of
from ndistribute.cluster.spec import ClusterSpec, only_task, task_names
from ndistribute.coordinator.worker import WorkerService
from ndistribute.errors import DistributeError, WorkerLostError
from ndistribute.parameter_server.server import StoreService
from ndistribute.timeline import identify
from ndistribute.transport.address import split_address
from ndistribute.transport.failure_detector import silence_seconds
from ndistribute.transport.rpc import Peer, RpcServer, Service
from ndistribute.transport.secret import credentials_of

_GRACE_SECONDS = 2.0  # A task that left cleanly may close one strategy for another.
CUT_SECONDS = 3.0
"""How long a server waits for a chief whose connection ended without good-bye.

A chief that is alive, and took this process for lost since it was stopped, comes again at once."""
_RETURN_SECONDS = 60.0  # A task that died may be started again.
_START_SECONDS = 600.0  # The first of those for whom a server was started have so long to come.
_FAREWELL_SECONDS = 1.0
# The C library keeps memory for use again up to twice the largest block that was freed. Before a
# worker has freed any, each step's arrays are new pages: a sixth of a step of an MLP went on them.
_FREED_BYTES = 24 << 20
_SAVE_SECONDS = 30.0
_log = logging.getLogger("ndistribute")


class Outlook(NamedTuple):
    """When a server's work ends, unless somebody comes before, and who died or never came."""

    at: float
    lost: str = ""


class ExitPolicy:
    """Conclude from the clients of a server when its work is over, without a clock of its own.

    A cluster lives as long as its chief, or, without one, until every worker has come and gone.
    Nobody may come for `start_seconds`, a worker that died be away for `return_seconds`.
    """

    def __init__(
        self, cluster: ClusterSpec, *, started: float, start_seconds: float, return_seconds: float
    ) -> None:
        self.resumed = False
        """Whether an earlier process of this server may have seen workers leave."""
        self._led = "chief" in cluster.jobs
        job = "chief" if self._led else "worker"
        indices = cluster.task_indices(job) if job in cluster.jobs else []
        # The processes of each task that matters, in the order in which they came; of each whether
        # it died, None while it is here. The last one that is gone speaks for its task.
        self._tasks: dict[str, dict[str, bool | None]] = {f"{job}:{i}": {} for i in indices}
        self._started, self._start_seconds = started, start_seconds
        self._return_seconds = return_seconds
        self._last_departure = 0.0

    def came(self, client: str) -> None:
        """Note that a client is here: ``job:index#random``, with another random part each start."""
        task = self._tasks.get(client.partition("#")[0], {})
        if task.get(client) is not None:
            del task[client]  # It lives: only its connection was cut.
        task.setdefault(client, None)

    def left(self, client: str, died: bool, now: float) -> None:
        """Note that a client said good-bye, or that its process died."""
        task = self._tasks.get(client.partition("#")[0])
        if task is not None:
            task[client] = died
            self._last_departure = now

    def outlook(self) -> Outlook | None:
        """Return when the work is over as things stand; None: not before somebody leaves."""
        tasks = self._tasks
        if self._led and any(True in task.values() for task in tasks.values()):
            # What it had sent to workers is under way still: only a fresh start is consistent.
            return Outlook(self._last_departure + CUT_SECONDS, "the chief died")
        if not tasks or any(None in task.values() for task in tasks.values()):
            return None
        died = [name for name, task in tasks.items() if task and list(task.values())[-1]]
        missing = [name for name, task in tasks.items() if not task]
        if len(missing) == len(tasks):
            lost = f"{', '.join(tasks)} did not come within {self._start_seconds:g} s of the start"
            return Outlook(self._started + self._start_seconds, lost)
        if not died and not missing:
            return Outlook(self._last_departure + _GRACE_SECONDS)
        at = self._last_departure + self._return_seconds
        if not died and self.resumed:
            return Outlook(at)  # They left before this process was started, most likely.
        parts = [f"{', '.join(died)} died and did not come back"] if died else []
        parts += [f"{', '.join(missing)} never came"] if missing else []
        within = f"within {self._return_seconds:g} s after all others left"
        return Outlook(at, f"{' and '.join(parts)} {within}")


class _Membership:
    """Wait until an exit policy says that the work is over; it is told whom a service serves."""

    requests: Any
    sealed: bool
    handle: Callable[..., Any]

    def __init__(self, policy: ExitPolicy) -> None:
        self.policy = policy
        self.released = False
        self._changed = threading.Condition()
        self._peers: dict[str, Peer] = {}

    def serve(self, service: Service) -> Self:
        """Answer as a service does from now on."""
        self._service, self.handle = service, service.handle
        self.requests, self.sealed = service.requests, service.sealed
        return self

    def connected(self, peer: Peer) -> None:
        with self._changed:
            self._peers[peer.name] = peer
            self.policy.came(peer.name)
            self._changed.notify_all()
        self._service.connected(peer)

    def disconnected(self, peer: Peer, died: bool) -> None:
        self._service.disconnected(peer, died)
        with self._changed:
            if self._peers.get(peer.name) is peer:  # Else its client has a newer connection.
                del self._peers[peer.name]
                self.policy.left(peer.name, died, time.monotonic())
                self._changed.notify_all()

    def release(self) -> None:
        """Let go who waits, from now on."""
        with self._changed:
            self.released = True
            self._changed.notify_all()

    def wait(self, timeout: float | None) -> Outlook | None:
        """Return how the work ended; None where it did not, and this was released or ran out."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self.released:
                now, outlook = time.monotonic(), self.policy.outlook()
                ends = math.inf if outlook is None else outlook.at
                if min(ends, deadline) <= now:
                    return outlook if ends <= now else None
                self._changed.wait(min(ends - now, deadline - now, threading.TIMEOUT_MAX))
        return None


class Server:
    """Serve one task of a cluster to its other tasks.

    Args:
        cluster: all tasks, or what makes a `ClusterSpec`.
        job_name: this task's job; may be left out where the cluster has one alone.
        task_index: its index in the job; may be left out where the job has one task.
        start: whether to listen at once.
        environ: where the secret and the TLS files are named, and how long a client may be silent.
        snapshot_directory: where a task of ``ps`` writes what it holds, and finds it at its next
            start; None: as `NDISTRIBUTE_SNAPSHOT_DIR` says, and without it nowhere.
        snapshot_seconds: how often it does; None: as `NDISTRIBUTE_SNAPSHOT_SECONDS` says, and
            without it every 30 s.
        durability: ``"snapshot"``, or ``"log"``: no update is acknowledged before it is on the
            disk; None: as `NDISTRIBUTE_DURABILITY` says, and without it ``"snapshot"``.

    Raises:
        AuthenticationError: there is no secret, or a TLS file is not what it should be.
        CheckpointCorruptError: there are snapshots, and none of them is whole.
        OSError: this process cannot listen there, or not use the snapshot directory.
        ValueError: the cluster has no such task, or a number of seconds is none.

    >>> server = Server({"ps": ["localhost:2222"]}, "ps", 0, start=False)
    >>> server.target
    'localhost:2222'
    """

    def __init__(
        self,
        cluster: ClusterSpec | Mapping[str, Sequence[str] | Mapping[int, str]],
        job_name: str | None = None,
        task_index: int | None = None,
        *,
        start: bool = True,
        environ: Mapping[str, str] | None = None,
        snapshot_directory: str | os.PathLike[str] | None = None,
        snapshot_seconds: float | None = None,
        durability: Literal["snapshot", "log"] | None = None,
    ) -> None:
        self._environ = environ = os.environ if environ is None else environ
        self.cluster_spec = ClusterSpec(cluster)
        """The whole cluster."""
        self._job, self._index = only_task(self.cluster_spec, job_name, task_index)
        self.name = f"{self._job}:{self._index}"
        """Which task this is, such as ``"ps:0"``."""
        self._address = self.cluster_spec.task_address(self._job, self._index)
        self.target = f"{self._address.rpartition(':')[0]}:{split_address(self._address)[1]}"
        """Where it listens, ``host:port``; once it listens, with the port that it got."""
        self._directory = snapshot_directory
        if snapshot_directory is None and self._job == "ps":
            self._directory = environ.get("NDISTRIBUTE_SNAPSHOT_DIR") or None
        every = seconds_of(environ, "NDISTRIBUTE_SNAPSHOT_SECONDS", _SAVE_SECONDS)
        self._save_seconds = snapshot_seconds or every
        self._durability = durability or environ.get("NDISTRIBUTE_DURABILITY") or "snapshot"
        if self._durability not in ("snapshot", "log"):
            raise ValueError(f'durability is "snapshot" or "log", got {self._durability!r}.')
        policy = ExitPolicy(
            self.cluster_spec,
            started=time.monotonic(),
            start_seconds=seconds_of(environ, "NDISTRIBUTE_START_SECONDS", _START_SECONDS),
            return_seconds=seconds_of(environ, "NDISTRIBUTE_RETURN_SECONDS", _RETURN_SECONDS),
        )
        self._membership = _Membership(policy)
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._rpc: RpcServer | None = None
        self._service: StoreService | WorkerService | None = None
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
        return Server({"local": ["localhost:0"]}, "local", 0, start=start, environ=environ)

    def start(self) -> None:
        """Listen; once it does so, or has stopped, this does nothing."""
        with self._lock:
            if self._rpc is not None or self._membership.released:
                return
            # The other tasks' addresses count too: where all are local, so is the secret.
            credentials = credentials_of(self.cluster_spec.addresses(), self._environ)
            services = self._services()
            identify(self.name, task_names(self.cluster_spec))
            try:
                self._rpc = RpcServer(
                    self._address, credentials, self.name, services, environ=self._environ
                )
            except BaseException:
                self._close_service()
                raise
            self.target = f"{self._address.rpartition(':')[0]}:{self._rpc.port}"
            _log.info("%s listens at %s", self.name, self.target)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the work is over, and say whether it is; the server is stopped then.

        It is over when somebody stops the server, when the chief has left, and, in a cluster that
        has no chief, when every worker has come and left. SIGTERM stops the server too, and is
        raised as `SystemExit` then, if this is the main thread and nobody else handles it.

        Args:
            timeout: seconds to wait; None: as long as it takes.

        Raises:
            DistributeError: the last snapshot could not be written.
            WorkerLostError: the chief died; or a worker did, and nobody else is there and it did
                not come back within `NDISTRIBUTE_RETURN_SECONDS`; or nobody came at all within
                `NDISTRIBUTE_START_SECONDS`.
        """
        over = True
        with _sigterm_as_exit() as disarm:
            try:
                outlook = self._membership.wait(timeout)
                over = outlook is not None
            finally:  # Also after SIGTERM or Ctrl-C.
                if over:
                    disarm()
                    self.stop(_FAREWELL_SECONDS)
        if outlook is None:
            return self._membership.released
        if outlook.lost:
            raise WorkerLostError(f"{self.name} ends: {outlook.lost}.")
        _log.info("%s ends: all who used it have left", self.name)
        return True

    def stop(self, timeout: float = 5.0) -> None:
        """End all connections, write a last snapshot, and give the port back.

        A second call does nothing, nor does one in a forked child: the server is its parent's.

        Args:
            timeout: seconds that connections have to end by themselves.

        Raises:
            DistributeError: the last snapshot could not be written.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            rpc, self._rpc = self._rpc, None
            try:
                if rpc is not None:
                    rpc.close(timeout)
                    self._close_service()
            finally:
                self._membership.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _services(self) -> dict[str, Service]:
        if self._job == "worker" and "chief" in self.cluster_spec.jobs:
            enter_task(ClusterResolver(self.cluster_spec, self._job, self._index))
            np.empty(_FREED_BYTES, np.uint8)  # Freed at once; its pages are never touched.
            self._service = worker = WorkerService(self.name)
            return {"coordinator": self._membership.serve(worker)}
        if self._job not in ("ps", "local"):
            return {}
        self._service = store = StoreService(
            self._directory,
            self.name,
            seconds=self._save_seconds,
            durability="log" if self._durability == "log" else "snapshot",
            return_seconds=silence_seconds(self._environ),
        )
        self._membership.policy.resumed = store.resumed
        return {"ps": self._membership.serve(store)}

    def _close_service(self) -> None:
        service, self._service = self._service, None  # What was served is not held any longer.
        if service is None:
            return
        service.close()
        if isinstance(service, StoreService) and service.failed_last_snapshot:
            raise DistributeError(
                f"{self.name} could not write its last snapshot to {self._directory}: what was "
                "changed since the one before is lost. Its log says why."
            )


@contextlib.contextmanager
def _sigterm_as_exit() -> Iterator[Callable[[], None]]:
    """Make SIGTERM a `SystemExit` in the block, unless the program handles it itself.

    After the first one, or once what this yields is called, SIGTERM changes nothing: what closes
    then is not to be broken off.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield lambda: None
        return

    def disarm() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def handle(signum: int, frame: object) -> None:
        disarm()
        raise SystemExit(128 + signum)

    try:
        signal.signal(signal.SIGTERM, handle)
        yield disarm
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
