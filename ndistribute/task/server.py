"""`Server`: one task of a cluster as a listening process, like `tf.distribute.Server`.

The table `SERVICES` lists what a task serves; each folder that implements a service adds a row. No
message tells a server that the job has ended: `ExitPolicy` concludes it from the connections.
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
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Self

from ndistribute.blas import shared_blas
from ndistribute.cluster.resolvers import seconds_of
from ndistribute.cluster.spec import ClusterSpec, num_sharing_host, only_task, task_names
from ndistribute.errors import WorkerLostError
from ndistribute.timeline import identify
from ndistribute.transport.address import split_address
from ndistribute.transport.rpc import ClientCount, Peer, RpcServer, Service
from ndistribute.transport.secret import Credentials, credentials_of
from ndistribute.transport.waiting import WaitReport, shortened

_GRACE_SECONDS = 2.0  # A task may close one strategy and open another.
CUT_SECONDS = 3.0
"""How long a server waits for a chief whose connection ended without a good-bye.

A living chief that counted this process as lost while it was stopped reconnects at once."""
_TOGETHER_SECONDS = 15.0  # A chief that was cut off restores all its connections within this.
_RETURN_SECONDS = 60.0  # The time for a restart of a task that died.
_START_SECONDS = 600.0  # The time for the first client to connect.
_SHUTDOWN_SECONDS = 1.0
_SAVE_SECONDS = 30.0
_log = logging.getLogger("ndistribute")


@dataclass(frozen=True)
class ServedTask:
    """The facts that a service may use about the task that it belongs to."""

    job: str
    index: int
    cluster: ClusterSpec
    environ: Mapping[str, str]
    credentials: Credentials
    snapshot_directory: str | os.PathLike[str] | None
    snapshot_seconds: float
    durability: Literal["snapshot", "log"]
    services: dict[str, TaskService] = field(default_factory=dict)
    """The task's other services, by purpose, in the order of the table."""

    @property
    def name(self) -> str:
        """Return the name of the task, such as ``"ps:0"``."""
        return f"{self.job}:{self.index}"


class TaskService(Service):
    """A service of a task; it learns where its server listens, and when it ends."""

    resumed = False
    """Whether the service continues from the saved state of an earlier instance of the server."""
    clients_may_restart = False
    """Whether a chief that is a client of only this service may die and be restarted."""

    def connected(self, peer: Peer) -> None:
        """Called when a client has connected."""

    def disconnected(self, peer: Peer, died: bool) -> None:
        """Called when a connection has ended."""

    def listens_at(self, address: str) -> None:
        """Called when the server listens."""

    def end(self) -> None:
        """Called when the server ends, while clients are still connected."""

    def close(self) -> None:
        """Called when all connections have ended."""


SERVICES: dict[str, Callable[[ServedTask], TaskService | None]] = {}
"""By purpose, a function that returns the service of a task, or None for tasks without it."""


class PlannedExit(NamedTuple):
    """When the work of a server ends unless a client connects, and which tasks were lost."""

    at: float
    lost: str = ""


class ExitPolicy:
    """Decides from the clients of a server when its work ends; callers pass it the time.

    The work ends when the chief leaves or, without a chief, when every worker has connected and
    left. A process without a task that coordinates the workers also counts as the chief. The server
    waits `start_seconds` for the first client, and `return_seconds` for a worker that died.
    """

    def __init__(
        self, cluster: ClusterSpec, *, started: float, start_seconds: float, return_seconds: float
    ) -> None:
        self.resumed = False
        """Whether workers may have left an earlier instance of this server."""
        self._led = "chief" in cluster.jobs
        job = "chief" if self._led else "worker"
        indices = cluster.task_indices(job) if job in cluster.jobs else []
        # The processes of each relevant task, in the order of arrival: whether it died, or None
        # while it is connected. The last process decides for its task.
        self._tasks: dict[str, dict[str, bool | None]] = {f"{job}:{i}": {} for i in indices}
        self._started, self._start_seconds = started, start_seconds
        self._return_seconds = return_seconds
        self._last_departure = 0.0
        self._chief_exit = PlannedExit(math.inf)  # When the chief counts as dead, and why.
        self._restartable: set[str] = set()  # Clients that may die without consequences.

    def came(self, client: str, may_restart: bool = False, now: float = math.inf) -> None:
        """Record a connected client: ``job:index#random``, with a new random part per start."""
        if may_restart:
            self._restartable.add(client)
        name = client.partition("#")[0]
        if name == "chief:0" and not self._led:
            self._led, self._tasks = True, {name: {}}
        if not self._led and self._tasks and name.startswith("worker:"):
            self._tasks.setdefault(name, {})  # The task was added to the running job.
        task = self._tasks.get(name, {})
        if task:  # A chief that was cut off is back, or another was started in its place.
            at, lost = self._chief_exit
            self._chief_exit = PlannedExit(min(at, now + _TOGETHER_SECONDS), lost)
        if task.get(client) is not None:
            del task[client]  # It is alive; only its connection was lost.
        task.setdefault(client, None)

    def left(self, client: str, died: bool, now: float, patience: float = 0.0) -> None:
        """Record that a client said good-bye, died, or is out of reach for up to `patience`."""
        task = self._tasks.get(client.partition("#")[0])
        if task is not None:
            task[client] = died
            self._last_departure = now
        if task is not None and died:
            what = "was out of reach and did not come back" if patience else "died"
            self._chief_exit = PlannedExit(now + max(patience, CUT_SECONDS), f"the chief {what}")

    @property
    def missing(self) -> list[str]:
        """Return the relevant tasks that have not connected yet."""
        return [name for name, task in self._tasks.items() if not task]

    def planned_exit(self) -> PlannedExit | None:
        """Return when the work ends if nothing changes; None while a client is connected."""
        tasks = self._tasks
        clients = (client for task in tasks.values() for client in task.items())
        if self._led and any(died and name not in self._restartable for name, died in clients):
            # The dead chief's closures may still run on workers: only a new job is consistent.
            return self._chief_exit
        if not tasks or any(None in task.values() for task in tasks.values()):
            return None
        died = [name for name, task in tasks.items() if task and list(task.values())[-1]]
        missing = self.missing
        if len(missing) == len(tasks):
            lost = f"{', '.join(tasks)} did not come within {self._start_seconds:g} s of the start"
            return PlannedExit(self._started + self._start_seconds, lost)
        if not died and not missing:
            return PlannedExit(self._last_departure + _GRACE_SECONDS)
        at = self._last_departure + self._return_seconds
        if not died and self.resumed:
            return PlannedExit(at)  # The missing tasks probably left before this instance started.
        parts = [f"{', '.join(died)} died and did not come back"] if died else []
        parts += [f"{', '.join(missing)} never came"] if missing else []
        within = f"within {self._return_seconds:g} s after all others left"
        return PlannedExit(at, f"{' and '.join(parts)} {within}")


class _Membership:
    """Tells an exit policy about the clients of a server, and waits for its decision."""

    def __init__(self, name: str, policy: ExitPolicy) -> None:
        self.policy = policy
        self._report = WaitReport(name)
        self.released = False
        self._changed = threading.Condition()
        self._clients = ClientCount()

    def connected(self, peer: Peer, may_restart: bool = False) -> None:
        with self._changed:
            self._clients.add(peer)
            self.policy.came(peer.name, may_restart, time.monotonic())
            self._changed.notify_all()

    def disconnected(self, peer: Peer, died: bool) -> None:
        with self._changed:
            if self._clients.remove(peer, died):
                self.policy.left(peer.name, died, time.monotonic(), peer.patience)
                self._changed.notify_all()

    def release(self) -> None:
        with self._changed:
            self.released = True
            self._changed.notify_all()

    def wait(self, timeout: float | None) -> PlannedExit | None:
        """Return how the work ended, or None after the timeout or `release`."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self.released:
                now, planned = time.monotonic(), self.policy.planned_exit()
                ends = math.inf if planned is None else planned.at
                if min(ends, deadline) <= now:
                    return planned if ends <= now else None
                look = math.inf
                # After a restart, a missing task may have left before.
                if not self.policy.resumed and (missing := self.policy.missing):
                    self._report.tell(f"a connection from {shortened(missing)}")
                    look = self._report.due
                wake = min(ends, deadline, look, now + threading.TIMEOUT_MAX)
                self._changed.wait(wake - now)
        return None


class Server:
    """Serve one task of a cluster to its other tasks.

    Args:
        cluster: the addresses of all tasks, as a `ClusterSpec` or an argument for one.
        job_name: the job of this task; optional if the cluster has one job.
        task_index: the index of this task in its job; optional if the job has one task.
        start: whether to listen at once.
        environ: environment variables: the secret, TLS files, the heartbeat timeout. None: those of
            the process.
        snapshot_directory: the folder in which a task of ``ps`` saves snapshots, and from which it
            restores them; None: `NDISTRIBUTE_SNAPSHOT_DIR`, or no snapshots.
        snapshot_seconds: the time between snapshots; None: `NDISTRIBUTE_SNAPSHOT_SECONDS`, or 30.
        durability: ``"snapshot"``, or ``"log"`` to acknowledge updates only when they are on the
            disk; None: `NDISTRIBUTE_DURABILITY`, or ``"snapshot"``.

    Raises:
        AuthenticationError: there is no secret, or a TLS file cannot be used.
        CheckpointCorruptError: there are snapshots, but none of them can be read, or a log of
            updates is damaged.
        OSError: this process cannot listen at its address, or cannot use the snapshot folder.
        ValueError: the cluster has no such task, or a number of seconds is invalid.

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
        """All tasks of the cluster."""
        self._job, self._index = only_task(self.cluster_spec, job_name, task_index)
        self.name = f"{self._job}:{self._index}"
        """The task, such as ``"ps:0"``."""
        self._address = self.cluster_spec.task_address(self._job, self._index)
        self.target = f"{self._address.rpartition(':')[0]}:{split_address(self._address)[1]}"
        """The server's address, ``host:port``; after `start`, with the actual port."""
        if snapshot_directory is None and self._job == "ps":
            snapshot_directory = environ.get("NDISTRIBUTE_SNAPSHOT_DIR") or None
        every = seconds_of(environ, "NDISTRIBUTE_SNAPSHOT_SECONDS", _SAVE_SECONDS)
        durable: Any = durability or environ.get("NDISTRIBUTE_DURABILITY") or "snapshot"
        if durable not in ("snapshot", "log"):
            raise ValueError(f'durability must be "snapshot" or "log", got {durable!r}.')
        self._saving = snapshot_directory, snapshot_seconds or every, durable
        # Other tasks serve graphs, whose clients may come again until `stop`.
        ends = self._job == "ps" or "chief" in self.cluster_spec.jobs
        policy = ExitPolicy(
            self.cluster_spec if ends else ClusterSpec({}),
            started=time.monotonic(),
            start_seconds=seconds_of(environ, "NDISTRIBUTE_START_SECONDS", _START_SECONDS),
            return_seconds=seconds_of(environ, "NDISTRIBUTE_RETURN_SECONDS", _RETURN_SECONDS),
        )
        self._membership = _Membership(f"{self.name} at {self._address}", policy)
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._rpc: RpcServer | None = None
        self._services: dict[str, TaskService] = {}
        self._held = contextlib.ExitStack()
        if start:
            self.start()

    @staticmethod
    def create_local_server(
        start: bool = True, *, environ: Mapping[str, str] | None = None
    ) -> Server:
        """Return a server that listens on this host only, at any free port.

        Args:
            start: whether to listen at once.
            environ: environment variables, which may name the secret; None: those of the process.
        """
        return Server({"local": ["localhost:0"]}, "local", 0, start=start, environ=environ)

    def start(self) -> None:
        """Listen; a call on a listening or stopped server does nothing."""
        with self._lock:
            if self._rpc is not None or self._membership.released:
                return
            # All addresses count: if all tasks are local, the secret is local too.
            credentials = credentials_of(self.cluster_spec.addresses(), self._environ)
            identify(self.name, task_names(self.cluster_spec))
            try:
                self._make_services(credentials)
                self._rpc = RpcServer(
                    self._address,
                    credentials,
                    self.name,
                    self._services,
                    environ=self._environ,
                    connected=self._connected,
                    disconnected=self._disconnected,
                )
            except BaseException:
                self._close_services()
                raise
            self.target = f"{self._address.rpartition(':')[0]}:{self._rpc.port}"
            for service in self._services.values():
                service.listens_at(self.target)
            sharing = num_sharing_host(self.cluster_spec, self._job, self._index)
            self._held.enter_context(shared_blas(sharing, self._environ))
            _log.info("%s listens at %s", self.name, self.target)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the work has ended, and stop the server.

        The work ends when `stop` is called, when the chief has left or, for a task of ``ps``
        without a chief, when every worker has connected and left. SIGTERM also stops the server
        and raises `SystemExit`, if this is the main thread and the program does not handle SIGTERM.

        Args:
            timeout: seconds to wait; None: no limit.

        Returns:
            True if the work has ended, False after `timeout`.

        Raises:
            DistributeError: the last snapshot could not be written.
            WorkerLostError: the chief died, or was out of reach for its `timeout_seconds`; or a
                worker died and did not come back within `NDISTRIBUTE_RETURN_SECONDS` after the
                others left; or no client connected within `NDISTRIBUTE_START_SECONDS`.
        """
        over = True
        with _sigterm_as_exit() as disarm:
            try:
                planned = self._membership.wait(timeout)
                over = planned is not None
            finally:  # Also after SIGTERM or Ctrl-C.
                if over:
                    disarm()
                    self.stop(_SHUTDOWN_SECONDS)
        if planned is None:
            return self._membership.released
        if planned.lost:
            raise WorkerLostError(f"{self.name} ends: {planned.lost}.")
        _log.info("%s ends: all its clients have left", self.name)
        return True

    def stop(self, timeout: float = 5.0) -> None:
        """End all connections, write a last snapshot, and close the port.

        A second call does nothing, and neither does a call in a forked child, which does not own
        the server.

        Args:
            timeout: seconds to wait for the connections to end.

        Raises:
            DistributeError: the last snapshot could not be written.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            rpc, self._rpc = self._rpc, None
            try:
                self._held.close()
                if rpc is not None:
                    for service in self._services.values():
                        service.end()
                    rpc.close(timeout)
                    self._close_services()
            finally:
                self._membership.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _make_services(self, credentials: Credentials) -> None:
        where = self._job, self._index, self.cluster_spec, self._environ
        task = ServedTask(*where, credentials, *self._saving, self._services)
        for purpose, make in SERVICES.items():
            service = make(task)
            if service is not None:
                self._services[purpose] = service
                self._membership.policy.resumed |= service.resumed

    def _connected(self, peer: Peer) -> None:
        service = self._services[peer.purpose]
        self._membership.connected(peer, service.clients_may_restart)

    def _disconnected(self, peer: Peer, died: bool) -> None:
        self._membership.policy.resumed |= self._services[peer.purpose].resumed  # It may change.
        self._membership.disconnected(peer, died)

    def _close_services(self) -> None:
        with contextlib.ExitStack() as closing:
            for service in self._services.values():
                closing.callback(service.close)
            self._services = {}  # Release the store's memory.


@contextlib.contextmanager
def _sigterm_as_exit() -> Iterator[Callable[[], None]]:
    """Raise `SystemExit` on SIGTERM in the block, unless the program handles SIGTERM itself.

    After the first signal, or after a call of the yielded function, SIGTERM is ignored, so that it
    cannot interrupt the shutdown.
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
