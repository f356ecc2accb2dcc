"""Two copies of a shard, on two servers: one leads, and the other makes the same changes.

The leading copy executes requests, sends each change to the following copy, and replies when the
follower has made the change as well. In each epoch at most one copy leads. A copy leads the next
epoch alone if the other is proven dead or promises not to follow. It also leads alone if the other
is silent and the witness, a third task, agrees, which it does once per epoch. Otherwise the shard
stops, so the copies never diverge when the network is cut. A copy that returns receives the state
while the other one continues.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import defaultdict
from typing import Any, Literal

import msgspec

from ndistribute.cluster.spec import ClusterSpec
from ndistribute.errors import DistributeError
from ndistribute.parameter_server import messages as m
from ndistribute.parameter_server.snapshot import restore, take
from ndistribute.parameter_server.store_service import MISFIT, StoreService
from ndistribute.task.server import SERVICES, ServedTask, TaskService
from ndistribute.transport.failure_detector import silence_seconds
from ndistribute.transport.rpc import Client, RpcServer
from ndistribute.transport.secret import credentials_of

COPIES = ("first copy", "second copy")
"""The purposes of connections to the copies of a shard: on its server, and on the next one."""
WITNESS = "witness"
"""The purpose of connections to a witness."""
SILENCE_SECONDS = 0.5
"""The silence after which the other copy and the clients look for another leader."""
_LEASE_SECONDS = 0.3  # For reads, after the follower's last reply: it leads later than that.
_BEAT_SECONDS = 0.1
_ASK_SECONDS = 0.15  # For a reply to a beat or vote, also to connect.
_HOLD_SECONDS = 0.5  # How long a client may wait to learn whether this copy will lead,
_CONFIRM_SECONDS = 1.5  # and until the other copy has a change or counts as lost.
_REFILL_SECONDS = 5.0  # After a pause of this length, a copy asks again for the state.
_CALL_SECONDS = 600.0
_BATCH = 64  # Changes in one message.
_DOES = {
    "new": "waits for {}, which may have more updates",
    "joins": "copies the state of {}",
    "follows": "follows {}",
    "leads": "cannot reach {}, and nobody confirms that it has ended",
}
_log = logging.getLogger("ndistribute")

Role = Literal["new", "joins", "follows", "leads"]
Step = Literal["wait", "lead", "anew", "join", "leave", "dismiss", "vote", "fill"]
_VOTED: tuple[Step, ...] = ("wait", "lead", "leave")  # By the number that the witness replies.


def homes(cluster: ClusterSpec, shard: int) -> tuple[int, int]:
    """Return the servers with the two copies of a server's shard: itself and the next one.

    >>> homes(ClusterSpec({"ps": ["a:1", "b:1", "c:1"]}), 2)
    (2, 0)
    """
    servers = cluster.task_indices("ps")
    return shard, servers[(servers.index(shard) + 1) % len(servers)]


def witness_of(cluster: ClusterSpec, shard: int) -> tuple[str, int] | None:
    """Return the task that votes about a shard: a third server, or else the first worker.

    >>> witness_of(ClusterSpec({"ps": ["a:1", "b:1"], "worker": ["c:1"]}), 0)
    ('worker', 0)
    """
    others = [("ps", i) for i in cluster.task_indices("ps") if i not in homes(cluster, shard)]
    workers = cluster.task_indices("worker") if "worker" in cluster.jobs else []
    return next(iter([*others, *(("worker", i) for i in workers)]), None)


class Witness(TaskService):
    """Lets a copy of a shard lead the next epoch alone, but never both copies.

    It forgets all votes when it restarts. It agrees only if both copies have told it their epochs,
    and the other copy is not ahead.
    """

    requests = m.Vote
    macs = False

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._epochs: defaultdict[int, dict[int, int]] = defaultdict(dict)
        self._votes: dict[int, tuple[int, int]] = {}  # By shard: epoch and copy of the last vote.

    def handle(self, peer: Any, call: int, request: m.Vote) -> m.Number:
        """Return 1 if the copy may lead the next epoch, or could if it asked; 2: the other may."""
        epoch, copy, other = request.epoch, request.copy, 1 - request.copy
        with self._lock:
            epochs = self._epochs[request.shard]
            epochs[copy] = epoch
            last = self._votes.get(request.shard, (-1, -1))
            late = epochs.get(other, -1) > epoch or last == (epoch, other)
            agrees = other in epochs and not late and last[0] <= epoch
            if agrees and request.asks:
                self._votes[request.shard] = epoch, copy
        return m.Number(2 if late else int(agrees))


def next_step(mine: m.Beat, other: m.Beat, copy: int, *, dead: bool, silent: bool) -> Step:
    """Return the next step of a copy, computed from the states of both copies.

    Args:
        mine: the state of this copy.
        other: the state of the other copy, without a role if it did not answer.
        copy: the number of this copy.
        dead: whether the other process is proven to have ended.
        silent: whether the other copy was silent so long that the witness may let it lead.
    """
    if other.role == "leads" and (mine.role in ("new", "joins") or other.epoch > mine.epoch):
        return "join"
    if mine.role == "new":
        # After both restart from their disks, the copy with more changes sends its state.
        first = (mine.epoch, mine.total, -copy) > (other.epoch, other.total, copy - 1)
        return "lead" if other.role == "joins" or (other.role == "new" and first) else "wait"
    if mine.role == "follows" or mine.whole:
        if silent:  # The witness may have let the other copy lead before it died.
            return "vote"
        if other.role == "new" and other.epoch > mine.epoch:
            return "leave"
        if dead or other.role == "new":
            return "lead"
        return "dismiss" if mine.whole and other.role == "joins" else "wait"
    if mine.role == "leads" and other.role == "joins" and other.epoch == mine.epoch:
        return "fill"
    return "wait"


class ShardCopy(StoreService):
    """One of the two copies of a shard, with a thread that asks for the other one's state."""

    requests = m.Request | m.Beat | m.Replicate | m.Join

    def __init__(self, task: ServedTask, shard: int, copy: int) -> None:
        self._title = f"{task.name}, copy {copy} of the shard of ps:{shard},"
        self._shard, self._copy = shard, copy
        # Beats do not wait for the lock of the store, which a large change holds for long.
        self._said, self._news = m.Beat("new"), threading.Condition()
        self._sent = 0  # The number of changes that the other copy has, or no longer needs.
        self._made = 0  # The number of the leading copy's changes that were made here.
        self._filled = -1.0  # When the other copy last sent state that this copy lacks.
        # A copy that answers the other within their epoch waits 0.5 s before it may lead alone.
        self._heard = 0.0  # When this copy sent the last message that was answered so,
        self._promised = 0.0  # and when this copy last answered so.
        self._suspects = self._refused = False
        self._mute_until = 0.0  # When to tell the witness the epoch again.
        self._sending = threading.Lock()
        self._single: Any = task.services.get("ps")  # This server's service for `replicas=1`.
        self._refusal = ""  # The reason why this copy does not begin.
        other, witness = homes(task.cluster, shard)[1 - copy], witness_of(task.cluster, shard)
        self._other = _client(task, "ps", other, COPIES[1 - copy])
        self._witness = None if witness is None else _client(task, *witness, WITNESS)
        self._keeper: threading.Thread | None = None
        saving = {"seconds": task.snapshot_seconds, "durability": task.durability}
        name, silence = f"copy-{copy}-of-ps:{shard}", silence_seconds(task.environ)
        super().__init__(task.snapshot_directory, name, return_seconds=silence, **saving)  # type: ignore[arg-type]

    def _open(self) -> None:
        """Wait for the first connection, because most jobs keep one copy and never connect."""

    def _begin(self) -> None:
        super()._open()
        self._turn("new")
        self._keeper = threading.Thread(target=self._keep, name="ndistribute copy", daemon=True)
        self._keeper.start()

    def connected(self, peer: Any) -> None:
        with self._lock:
            self._refusal = "" if self._keeper is not None else self._misfit()
            if self._keeper is None and not self._refusal:
                self._begin()
        super().connected(peer)

    def handle(self, peer: Any, call: Any, request: Any) -> Any:
        """Execute a request; refuse those of clients unless this copy leads."""
        if self._refusal:
            return m.Failure("mismatch", self._refusal)
        match request:
            case m.Beat():
                return self._answer(request)
            case m.Replicate():
                return self._follow(request)
            case m.Join():
                return self._share()
            case m.Status() if self._said.role != "leads":
                return self._moved()
            case m.Status("log" | "snapshot") if self._disk is None:
                return self.store.handle("", 0, request)[0][1]
        return super().handle(peer, call, request)

    def disconnected(self, peer: Any, died: bool) -> None:
        super().disconnected(peer, died)
        if peer.name.startswith(f"{self._other.title.partition(' ')[0]}#"):
            self._suspect()

    def close(self) -> None:
        with self._lock:
            self._closing = True
        self._suspect()
        if self._keeper is not None:
            self._keeper.join(timeout=_CALL_SECONDS)
        self._other.close()
        if self._witness is not None:
            self._witness.close()
        super().close()

    # Requests of clients to the leading copy.

    def _misfit(self) -> str:
        name = self._single and next(iter(self._single.store.variables.cells), "")
        return MISFIT.format(f"variable {name!r}", 1, 2) if name else ""

    def _broken(self) -> m.Failure | None:
        return super()._broken() if self._said.role == "leads" else self._moved()

    def _moved(self) -> m.Failure:
        return m.Failure("moved", self._said.why)

    def _logs(self, reads: bool = False) -> list[tuple[Any, int]]:
        # Readers wait too, because changes that they see must not be lost.
        return [*super()._logs(reads), (self, self._sent + len(self.store.pending))]

    def _sync(self, logs: list[tuple[Any, int]]) -> m.Failure | None:
        """Wait until the disk and, unless it is out of sync, the other copy have all changes."""
        if (failure := super()._sync(logs[:-1])) is not None:
            return failure
        position, until = logs[-1][1], time.monotonic() + _CONFIRM_SECONDS
        while self._needs(position) and time.monotonic() < until:
            if self._suspects:
                with self._news:
                    self._news.wait_for(lambda: not self._suspects, _BEAT_SECONDS)
            elif self._sending.acquire(timeout=_BEAT_SECONDS):
                try:
                    _ = self._needs(position) and self._send()
                finally:
                    self._sending.release()
        serves = self._said.role == "leads" and not self._needs(position)
        return None if serves else self._moved()

    def _needs(self, position: int) -> bool:
        late = self._sent < position or time.monotonic() > self._heard + _LEASE_SECONDS
        return late and self._said.whole

    def _send(self) -> bool:
        """Send changes, or nothing, and return whether the other copy has made them.

        The caller holds `_sending`.
        """
        with self._lock:
            pending, epoch, now = self.store.pending, self.store.epoch, time.monotonic()
            # A copy may lead once it has all changes that were acknowledged without it.
            whole = self._said.whole
            changes = tuple(pending if whole else pending[:_BATCH])
            logs = self._disk is not None and bool(self._disk.logs)
            request = m.Replicate(epoch, self._sent, changes, whole, logs)
        try:
            sent = self._other.call(request, _CALL_SECONDS)
        except DistributeError as error:
            sent = error
        with self._lock:
            if not isinstance(sent, m.Number):
                self._suspect()
            elif pending is self.store.pending:
                del pending[: len(changes)]
                self._sent += len(changes)
                self._heard = max(self._heard, now)
        return isinstance(sent, m.Number)

    # Requests of the other copy.

    def _turn(self, role: Role, *, whole: bool = False) -> None:
        """Take a role; the caller holds the lock."""
        lacks = role == "joins" and self._filled < 0
        has = (0, 0) if lacks else (self.store.epoch, self.store.kept)
        why = f"{self._title} {_DOES[role].format(self._other.title)}"
        self._said = m.Beat(role, whole, *has, self.store.start, why)
        with self._news:
            self._news.notify_all()

    def _answer(self, request: m.Beat) -> m.Beat:
        with self._news:  # `_step` decides under the same lock whether this copy leads.
            mine, same = self._said, bool(request.role) and request.epoch == self._said.epoch
            if same and mine.role == "leads" and self._is_silent():
                return m.Beat()  # This copy may soon lead alone, so it promises nothing.
            if same and mine.role in ("follows", "leads"):
                self._promised = time.monotonic()
        if request.leave and same and mine.role in ("follows", "joins"):
            with self._lock:
                if self._said is mine:
                    self._forget()
        elif (mine.role == "follows" and not (same and request.role == "leads")) or (
            mine.whole and request.role in ("new", "joins")
        ):
            self._suspect()
        if not request.role:
            with self._news:
                self._news.wait_for(lambda: not self._doubts(), _HOLD_SECONDS)
        return self._said

    def _is_silent(self) -> bool:
        """Return whether the other copy may lead alone by now, which only the witness allows."""
        return self._witness is not None and time.monotonic() > self._heard + SILENCE_SECONDS

    def _keeps_word(self) -> bool:
        return time.monotonic() <= self._promised + SILENCE_SECONDS

    def _doubts(self) -> bool:
        last = max(self._heard, self._promised)
        late = self._suspects or time.monotonic() > last + 2 * _BEAT_SECONDS
        return self._said.role == "new" or (self._said.role == "follows" and late)

    def _follow(self, request: m.Replicate) -> m.Number | m.Failure:
        """Make the leading copy's changes, except those that were made before."""
        with self._lock:
            again = self._made - request.first
            role = self._said.role
            ready = role == "follows" or (role == "joins" and self._filled >= 0)
            if not ready or request.epoch != self.store.epoch or again < 0:
                return self._moved()
            if request.logs and not (self._disk and self._disk.logs):
                self._forget()  # This copy receives the state again, with a log.
                return self._moved()
            failures = [self._make(change) for change in request.changes[again:]]
            self._made = max(self._made, request.first + len(request.changes))
            self._promised = self._filled = time.monotonic()
            self._changed = True
            if request.whole and role == "joins":
                self._turn("follows")
                what = "%s has the state, and follows %s after %d transactions"
                _log.warning(what, self._title, self._other.title, self.store.total)
            logs = super()._logs()
        failures.append(super()._sync(logs))
        if any(failures):
            self._forget()
        return next(filter(None, failures), m.Number(self._made))

    def _make(self, change: m.Logged) -> m.Failure | None:
        try:
            reply = self.store.handle("", 0, change)[0][1]
        except Exception as error:  # A user's rule, which raised on the other copy as well.
            _log.error("%s: a change raised %s", self._title, f"{type(error).__name__}: {error}")
            return None
        return reply if isinstance(reply, m.Failure) else None

    def _share(self) -> m.CopyState | m.Failure:
        """Return the state, and keep all later changes for the other copy."""
        with self._lock:
            if self._said.role != "leads" or self._said.whole:
                return self._moved()
            tensors, data = take(self.store)
            self._drop()
            self.store.keeps_pending, self._heard = True, time.monotonic()
            # A kept array would change before the other copy gets it.
            self.store.variables.may_keep_arrays = False
            rest = self._sent, self.store.variables.floor, self.store.totals
            logs = self._disk is not None and bool(self._disk.logs)
        arrays = tuple(tensors.values())
        return m.CopyState(tuple(tensors), arrays, msgspec.json.encode(data), *rest, logs)

    # The thread.

    def _suspect(self) -> None:
        """Let the thread ask the other copy at once."""
        self._suspects = True
        with self._news:
            self._news.notify_all()

    def _keep(self) -> None:
        while not self._closing:
            self._suspects = False
            try:
                self._step()
                self._tell("agree with the other copy")
            except Exception as error:
                self._tell("agree with the other copy", error)
            with self._news:
                self._news.notify_all()
                self._news.wait_for(lambda: self._suspects or self._closing, _BEAT_SECONDS)

    def _step(self) -> None:
        """Compare with the other copy, and act."""
        mine = self._said
        other, now = self._ask(mine), time.monotonic()
        # Only its earlier messages tell what a copy knew before it restarted.
        if now > self._mute_until and mine.role in ("follows", "leads"):
            self._vote(asks=False)
            # A witness that is out of reach must not delay the beats.
            self._mute_until = 2 * time.monotonic() - now
        if mine.role == "joins" and now < self._filled + _REFILL_SECONDS:
            return  # The other copy sends what is missing.
        dead = not other.role and self._refused
        step = next_step(mine, other, self._copy, dead=dead, silent=self._is_silent())
        if votes := step == "vote":
            step = "wait" if self._keeps_word() else self._elect(mine, other)
        if step == "dismiss":
            other = self._ask(msgspec.structs.replace(mine, leave=True))
            step = "lead" if other.role in ("new", "joins") else "wait"
        filling = self.store.keeps_pending and not mine.whole
        drops = filling and (dead or now > self._heard + _REFILL_SECONDS)
        if drops or step in ("lead", "anew", "join", "leave"):
            with self._lock, self._news:
                # The other copy may just have changed the role or received a promise.
                if self._said is not mine or (votes and self._keeps_word()):
                    return
                if step in ("lead", "anew"):
                    self._lead(anew=step == "anew" or mine.role == "new")
                elif step in ("join", "leave"):
                    self._forget()
                else:
                    self._drop()  # Changes kept for the other copy would fill the memory.
        if step == "join":
            self._join()
        elif step == "fill":
            self._fill()

    def _elect(self, mine: m.Beat, other: m.Beat) -> Step:
        step = _VOTED[self._vote(asks=True)]
        if step == "wait" and other.role:  # No witness answers; the other copy is back.
            step = next_step(mine, other, self._copy, dead=False, silent=False)
            return "anew" if step == "lead" else step  # Updates of the other copy may be lost.
        return step

    def _ask(self, beat: m.Beat) -> m.Beat:
        """Return the state that the other copy reports; without a role if it does not answer."""
        sent, self._refused = time.monotonic(), False
        try:
            call = self._other.start(beat, _ASK_SECONDS)
            reply = call.result(sent + _ASK_SECONDS)
        except DistributeError as error:
            cause = error.__cause__ and error.__cause__.__cause__
            self._refused = isinstance(cause, ConnectionRefusedError)
            return m.Beat()
        if not isinstance(reply, m.Beat):
            call.cancel()
            return m.Beat()
        fills = reply.role == "joins" and not beat.whole
        if fills or (reply.epoch == beat.epoch and reply.role in ("follows", "leads")):
            self._heard = max(self._heard, sent)
        return reply

    def _vote(self, *, asks: bool) -> int:
        """Tell the witness the epoch, and return its reply; 0 if it does not answer."""
        vote = m.Vote(self._shard, self._copy, self._said.epoch, asks)
        with contextlib.suppress(DistributeError):
            return 0 if self._witness is None else int(self._witness.call(vote, _ASK_SECONDS).value)
        return 0

    def _lead(self, *, anew: bool) -> None:
        """Lead the next epoch alone, as another instance if `anew`; the caller holds the lock."""
        new = self._said.role == "new"
        epoch = max(self.store.epoch, int(time.time()) if anew else 0) + 1
        reply = self.store.handle("", 0, m.NewEpoch(epoch))[0][1]
        if isinstance(reply, m.Failure):
            self._tell("lead", DistributeError(reply.message))
            return
        self._drop()
        self._changed = True
        if anew:
            self.store.start, self.store.began = epoch, self.store.total
        self._turn("leads")
        if not new:
            what = "%s continues alone after %d transactions: %s is gone"
            _log.warning(what, self._title, self.store.total, self._other.title)

    def _drop(self) -> None:
        """Keep no changes for the other copy."""
        # One more, so that a copy with an earlier state does not accept later changes.
        self._sent += len(self.store.pending) + 1
        self.store.pending, self.store.keeps_pending = [], False
        self.store.variables.may_keep_arrays = True

    def _forget(self) -> None:
        """Require a new state before this copy follows."""
        with self._lock:
            if self._said.role == "leads":
                _log.warning("%s was silent: %s leads now", self._title, self._other.title)
            self._filled = -1.0
            self._drop()
            self._turn("joins")

    def _fill(self) -> None:
        """Send the other copy the changes that it lacks; then let changes wait for it."""
        with self._sending:
            while self._send():
                if len(self.store.pending) < _BATCH:
                    with self._lock:
                        self._turn("leads", whole=self.store.keeps_pending)
                    self._send()
                    return

    def _join(self) -> None:
        """Get the state from the other copy, which leads."""
        try:
            state = self._other.call(m.Join(), _CALL_SECONDS)
            if isinstance(state, m.CopyState):
                self._become(state)
                self._tell("be filled")
        except DistributeError as error:
            self._tell("be filled", error)
            with self._news:
                self._news.wait_for(lambda: self._closing, _REFILL_SECONDS)

    def _become(self, state: m.CopyState) -> None:
        tensors = dict(zip(state.names, state.arrays, strict=True))
        store = restore(tensors, msgspec.json.decode(state.data))
        store.start, store.began = state.totals.start, state.totals.began
        store.variables.floor, store.variables.may_keep_arrays = state.floor, True
        if state.logs and self._disk is None:
            raise DistributeError("it has no snapshot directory for its log: pass one.")
        with self._lock:
            self.store, self._changed = store, True
            if self._disk is not None:
                self._disk.store = store
                if state.logs or self._disk.logs:
                    self._disk.begin_log()
        saved = None if self._disk is None else self._save(self._disk)
        if isinstance(saved, m.Failure):
            raise DistributeError(saved.message)
        with self._lock:
            self._made, self._filled, self.resumed = state.position, time.monotonic(), True
            self._turn("joins")


def serve_witness(cluster: ClusterSpec, job: str, index: int) -> RpcServer | None:
    """Serve as the witness of shards; None if this task is the witness of no shard."""
    if (job, index) not in [witness_of(cluster, shard) for shard in cluster.task_indices("ps")]:
        return None
    address, credentials = cluster.task_address(job, index), credentials_of(cluster.addresses())
    try:
        return RpcServer(address, credentials, f"{job}:{index}", {WITNESS: Witness()})
    except OSError as error:
        _log.warning("%s:%d does not vote about shards: %s", job, index, error)
        return None


def _client(task: ServedTask, job: str, index: int, purpose: str) -> Client:
    return Client(
        task.cluster.task_address(job, index),
        task.credentials,
        name=task.name,
        purpose=purpose,
        audience=f"{job}:{index}",
        replies=m.Number | m.Beat | m.CopyState,
        repeats=False,
        silence=SILENCE_SECONDS,
    )


def _serve(number: int, task: ServedTask) -> ShardCopy | None:
    servers = task.cluster.task_indices("ps") if task.job == "ps" else []
    if len(servers) < len(COPIES):
        return None
    return ShardCopy(task, servers[servers.index(task.index) - number], number)


for _number, _purpose in enumerate(COPIES):
    SERVICES[_purpose] = functools.partial(_serve, _number)
SERVICES[WITNESS] = lambda task: Witness() if task.job in ("ps", "worker") else None
