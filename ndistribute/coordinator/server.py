"""`Server`: one task of a cluster as a listening process, as `tf.distribute.Server`.

A task of the job ``ps`` holds variables; a worker of a chief runs what its coordinator sends.
Nobody tells a server that the job is over: it sees who comes and goes, and `ExitPolicy` says what
that means.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Literal, Self

from ndistribute.cluster.resolvers import ClusterResolver, enter_task, seconds_of
from ndistribute.cluster.spec import ClusterSpec, only_task
from ndistribute.coordinator.worker import WorkerService
from ndistribute.errors import DistributeError, WorkerLostError
from ndistribute.parameter_server.server import StoreService
from ndistribute.transport.address import split_address
from ndistribute.transport.failure_detector import silence_seconds
from ndistribute.transport.rpc import Peer, RpcServer, Service
from ndistribute.transport.secret import credentials_of

__all__ = ["ExitPolicy", "Outlook", "Server"]

GRACE_SECONDS = 2.0
"""How long a server waits for a task that left cleanly: it may close one strategy for another."""
CUT_SECONDS = 3.0
"""How long it waits for a chief whose connection ended without good-bye.

A chief that is alive, and took this process for lost since it was stopped, comes again at once."""
RETURN_SECONDS = 60.0
"""How long it waits for a task that died, which somebody may start again."""
START_SECONDS = 600.0
"""How long it waits for the first of those for whom it was started."""
_HOLDING = ("ps", "local")
_FAREWELL_SECONDS = 1.0
_SNAPSHOT_SECONDS = 30.0
_log = logging.getLogger("ndistribute")


@dataclass(frozen=True)
class Outlook:
    """Say when a server's work ends, unless somebody comes before.

    Args:
        at: the time.
        lost: who died or never came; empty where all went well.
    """

    at: float
    lost: str = ""


@dataclass
class _Task:
    """A task whose end matters; of its processes, the one that came last speaks for it."""

    present: dict[str, int] = field(default_factory=dict)
    last: tuple[int, bool] | None = None  # Which one left, by its arrival, and whether it died.
    cut: str = ""  # The process that died last, as far as is known.

    @property
    def died(self) -> bool:
        return self.last is not None and self.last[1]


class ExitPolicy:
    """Conclude from the clients of a server when its work is over, without a clock of its own.

    A cluster with a chief lives as long as the chief; one without lives until every worker has
    come and gone. All other clients, such as evaluators, come and go as they like.

    Args:
        cluster: all tasks.
        started: when the server was started.
        start_seconds: how long nobody may come.
        return_seconds: how long a worker may be away, once all others are gone too.
        grace_seconds: how long after the last one left cleanly the work is over.

    Attributes:
        resumed: whether an earlier process of this server may have seen workers leave.

    >>> policy = ExitPolicy(ClusterSpec({"worker": ["a:1", "b:1"], "ps": ["c:1"]}), started=0.0)
    >>> for name in ("worker:0#f00", "worker:1#ba4"):
    ...     policy.came(name)
    >>> policy.left("worker:0#f00", died=False, now=10.0)
    >>> policy.outlook()
    >>> policy.left("worker:1#ba4", died=False, now=11.0)
    >>> policy.outlook()
    Outlook(at=13.0, lost='')
    """

    def __init__(
        self,
        cluster: ClusterSpec,
        *,
        started: float,
        start_seconds: float = START_SECONDS,
        return_seconds: float = RETURN_SECONDS,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        self.resumed = False
        self._led = "chief" in cluster.jobs
        job = "chief" if self._led else "worker"
        indices = cluster.task_indices(job) if job in cluster.jobs else []
        self._tasks = {f"{job}:{index}": _Task() for index in indices}
        self._started, self._start_seconds = started, start_seconds
        self._return_seconds = return_seconds
        self._grace_seconds = grace_seconds
        self._arrivals = itertools.count(1)
        self._last_departure = 0.0

    def came(self, client: str) -> None:
        """Note that a client is here; it may have been for long.

        Args:
            client: its name, ``job:index#random``; the random part is another one after a restart.
        """
        task = self._tasks.get(client.partition("#")[0])
        if task is None or client in task.present:
            return
        if task.cut == client:  # It lives: only its connection was cut.
            task.last, task.cut = None, ""
        task.present[client] = next(self._arrivals)

    def left(self, client: str, died: bool, now: float) -> None:
        """Note that a client said good-bye, or that its process died."""
        task = self._tasks.get(client.partition("#")[0])
        if task is None:
            return
        arrival = task.present.pop(client, 0) or next(self._arrivals)
        if task.last is None or arrival > task.last[0] or (self._led and died):
            task.last, task.cut = (arrival, died), client if died else ""
        self._last_departure = now

    def outlook(self) -> Outlook | None:
        """Return when the work is over as things stand; None: not before somebody leaves."""
        tasks = self._tasks
        if self._led and any(task.died for task in tasks.values()):
            # What it had sent to workers is under way still: only a fresh start is consistent.
            return Outlook(self._last_departure + CUT_SECONDS, "the chief died")
        if not tasks or any(task.present for task in tasks.values()):
            return None
        if not any(task.last for task in tasks.values()):
            names = ", ".join(tasks)
            lost = f"{names} did not come within {self._start_seconds:g} s of the start"
            return Outlook(self._started + self._start_seconds, lost)
        missing = [name for name, task in tasks.items() if task.last is None]
        died = [name for name, task in tasks.items() if task.died]
        if not died and not missing:
            return Outlook(self._last_departure + self._grace_seconds)
        at = self._last_departure + self._return_seconds
        if not died and self.resumed:
            return Outlook(at)  # They left before this process was started, most likely.
        parts = [f"{', '.join(died)} died and did not come back"] if died else []
        parts += [f"{', '.join(missing)} never came"] if missing else []
        within = f"within {self._return_seconds:g} s after all others left"
        return Outlook(at, f"{' and '.join(parts)} {within}")


class _Attendance:
    """Tell an exit policy who comes and goes, and wait until it says that the work is over."""

    def __init__(self, policy: ExitPolicy) -> None:
        self.policy = policy
        self._changed = threading.Condition()
        self._peers: dict[str, Peer] = {}
        self._released = False

    def came(self, peer: Peer) -> None:
        with self._changed:
            self._peers[peer.name] = peer
            self.policy.came(peer.name)
            self._changed.notify_all()

    def left(self, peer: Peer, died: bool) -> None:
        """Note the end of a connection, unless its client has a newer one."""
        with self._changed:
            if self._peers.get(peer.name) is not peer:
                return
            del self._peers[peer.name]
            self.policy.left(peer.name, died, time.monotonic())
            self._changed.notify_all()

    def release(self) -> None:
        """Let go who waits, from now on."""
        with self._changed:
            self._released = True
            self._changed.notify_all()

    def wait(self, timeout: float | None) -> Outlook | None:
        """Return how the work ended; None where it did not, and this was released or ran out."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self._released:
                now = time.monotonic()
                outlook = self.policy.outlook()
                if outlook is not None and outlook.at <= now:
                    return outlook
                if deadline is not None and deadline <= now:
                    return None
                ends = None if outlook is None else outlook.at
                times = [at for at in (deadline, ends) if at is not None]
                self._changed.wait(timeout=min(times) - now if times else None)
        return None


class _Attended:
    """Let a service answer, and note who comes and goes."""

    def __init__(self, service: Service, attendance: _Attendance) -> None:
        self.requests = service.requests
        self.sealed = service.sealed
        self.handle = service.handle
        self._service = service
        self._attendance = attendance

    def connected(self, peer: Peer) -> None:
        self._attendance.came(peer)
        self._service.connected(peer)

    def disconnected(self, peer: Peer, died: bool) -> None:
        self._service.disconnected(peer, died)
        self._attendance.left(peer, died)


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
        self._cluster = ClusterSpec(cluster)
        self._job, self._index = only_task(self._cluster, job_name, task_index)
        self._address = self._cluster.task_address(self._job, self._index)
        self._directory = snapshot_directory
        if snapshot_directory is None and self._job == "ps":
            self._directory = environ.get("NDISTRIBUTE_SNAPSHOT_DIR") or None
        self._seconds = snapshot_seconds or seconds_of(
            environ, "NDISTRIBUTE_SNAPSHOT_SECONDS", _SNAPSHOT_SECONDS
        )
        self._durability = durability or environ.get("NDISTRIBUTE_DURABILITY") or "snapshot"
        if self._durability not in ("snapshot", "log"):
            raise ValueError(f'durability is "snapshot" or "log", got {self._durability!r}.')
        policy = ExitPolicy(
            self._cluster,
            started=time.monotonic(),
            start_seconds=seconds_of(environ, "NDISTRIBUTE_START_SECONDS", START_SECONDS),
            return_seconds=seconds_of(environ, "NDISTRIBUTE_RETURN_SECONDS", RETURN_SECONDS),
        )
        self._attendance = _Attendance(policy)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._process = os.getpid()
        self._rpc: RpcServer | None = None
        self._service: StoreService | WorkerService | None = None
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
    def target(self) -> str:
        """Return where it listens, ``host:port``, with the port that it got."""
        host, port = self._address.rpartition(":")[0], split_address(self._address)[1]
        return f"{host}:{self._port or port}"

    def start(self) -> None:
        """Listen; once it does so, or has stopped, this does nothing."""
        with self._lock:
            if self._rpc is not None or self._ended.is_set():
                return
            # The other tasks' addresses count too: where all are local, so is the secret.
            jobs = (self._cluster.job_tasks(job) for job in sorted(self._cluster.jobs))
            addresses = [address for job in jobs for address in job if address is not None]
            credentials = credentials_of(addresses, self._environ)
            services = self._services()
            try:
                self._rpc = RpcServer(
                    self._address, credentials, self.name, services, environ=self._environ
                )
            except BaseException:
                self._close_service()
                raise
            self._port = self._rpc.port
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
        with _Sigterm() as sigterm:
            try:
                outlook = self._attendance.wait(timeout)
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
            self._ended.set()
            rpc, self._rpc = self._rpc, None
            try:
                if rpc is not None:
                    rpc.close(timeout)
                    self._close_service()
            finally:
                self._attendance.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _services(self) -> dict[str, Service]:
        silence = silence_seconds(self._environ)
        if self._job == "worker" and "chief" in self._cluster.jobs:
            enter_task(ClusterResolver(self._cluster, self._job, self._index))
            self._service = worker = WorkerService(self.name)
            return {"coordinator": _Attended(worker, self._attendance)}
        if self._job not in _HOLDING:
            return {}
        self._service = store = StoreService(
            self._directory,
            self.name,
            seconds=self._seconds,
            durability="log" if self._durability == "log" else "snapshot",
            return_seconds=silence,
        )
        self._attendance.policy.resumed = store.resumed
        return {"ps": _Attended(store, self._attendance)}

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


class _Sigterm:
    """Make SIGTERM a `SystemExit` in the block, so that what is open can be closed in order.

    Once it is disarmed, by the first signal for one, further ones change nothing: what closes then
    is not to be broken off. Where the program handles the signal itself, or in another thread than
    the main one, this does nothing.
    """

    def __init__(self) -> None:
        self._armed = True
        self._handling = False

    def disarm(self) -> None:
        """Let signals change nothing, up to the end of the block."""
        self._armed = False

    def __enter__(self) -> Self:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handle)
            self._handling = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._handling:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._armed:
            self._armed = False
            raise SystemExit(128 + signum)
