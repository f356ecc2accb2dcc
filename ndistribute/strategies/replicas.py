"""The pool of replica threads: one step on every replica at once.

Replica 0 runs on the caller's thread, the others on threads that are kept between steps. Whoever
fails releases the rest; the pool is usable again when all are out.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ndistribute.blas import cores, limited_blas
from ndistribute.collective.replica_group import ReplicaGroup
from ndistribute.context import Frame, chosen, frame_stack
from ndistribute.errors import WorkerLostError
from ndistribute.replica_context import ReplicaContext
from ndistribute.timeline import span

__all__ = ["ReplicaPool"]

Step = Callable[[int], Any]

# How long a failed or interrupted step waits for replicas that still compute. One that does not
# end in this time is given up: its thread ends when its function returns.
GRACE_SECONDS = 30.0


class _Outcome:
    """What the replicas of one step returned and raised, errors in the order of time."""

    def __init__(self, size: int) -> None:
        self.results: list[Any] = [None] * size
        self.errors: list[tuple[int, BaseException]] = []
        self._deadline: float | None = None

    def given_up(self, grace: float) -> bool:
        """Say whether so many seconds have passed since this was first asked."""
        if self._deadline is None:
            self._deadline = time.monotonic() + grace
        return time.monotonic() > self._deadline


class _Job:
    """What one thread does in a step, and whether it is over."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.given = False
        self._work = work
        self._over = False
        self._token = threading.Lock()  # Held until it is over.
        self._token.acquire()

    def do(self) -> None:
        """Do it, on the thread that it was given to."""
        try:
            self._work()
        finally:
            self._over = True
            self._token.release()

    def wait(self, timeout: float) -> bool:
        """Wait until it is over, and say whether it is; one that was never given is."""
        # An interrupt may come when the token is taken already: the flag has the last word.
        return self._over or not self.given or self._token.acquire(timeout=timeout)


class _ReplicaThread:
    """A thread that waits for a job, does it, and waits for the next."""

    def __init__(self, name: str) -> None:
        self._job: _Job | None = None
        self._start = threading.Lock()  # A token: held until there is a job.
        self._start.acquire()
        # Where nobody is left to give jobs, the thread ends.
        owner = weakref.ref(self, functools.partial(_wake, self._start))
        self._thread = threading.Thread(
            target=_serve, args=(owner, self._start), name=name, daemon=True
        )
        self._thread.start()

    def post(self, job: _Job) -> None:
        """Give the thread a job."""
        self._job = job
        job.given = True
        self._start.release()

    def take(self) -> _Job | None:
        """Return the job that was posted; None tells the thread to end."""
        job, self._job = self._job, None
        return job

    def end(self) -> None:
        """End the thread; it must have no job."""
        self._start.release()
        self._thread.join(GRACE_SECONDS)


def _wake(start: threading.Lock, _: object) -> None:
    with contextlib.suppress(RuntimeError):  # It is on its way already.
        start.release()


def _serve(owner: weakref.ref[_ReplicaThread], start: threading.Lock) -> None:
    """Do jobs until told to end, or until nobody is left to give one."""
    while True:
        start.acquire()
        thread = owner()
        job = None if thread is None else thread.take()
        del thread
        if job is None:
            return
        job.do()
        del job


class ReplicaPool:
    """Run steps on all replicas of a group.

    Args:
        group: the communicators and streams.
        contexts: one for each replica.
        title: the strategy, as messages name it.
    """

    def __init__(self, group: ReplicaGroup, contexts: Sequence[ReplicaContext], title: str) -> None:
        self._group = group
        self._contexts = contexts
        self._title = title
        self._threads: list[_ReplicaThread] = []
        self.abandoned = False

    def run(self, step: Step) -> list[Any]:
        """Run a step on every replica and return the results in replica order.

        Args:
            step: called with the replica's number, on the replica's thread.

        Raises:
            BaseException: what a replica raised, the first of them, with a note naming it.
        """
        size = len(self._contexts)
        outcome = _Outcome(size)
        begun = False
        try:
            self._group.begin()
            begun = True
            self._run_all(step, outcome, size)
        except BaseException as interrupt:
            self._group.abort(interrupt)  # Other processes may be in the step already.
            raise
        finally:
            if begun:
                self._group.end()
        if outcome.errors:
            self._raise_first(outcome)
        return outcome.results

    def _run_all(self, step: Step, outcome: _Outcome, size: int) -> None:
        """Run every replica, and come back when all are out or given up."""
        if size > 1 and not self._threads:
            self._threads = [_ReplicaThread(f"{self._title}:{i}") for i in range(1, size)]
        workers = self._group.workers
        part = cores() if workers is None else workers.cores
        with limited_blas(max(1, part // size) if size > 1 else None):
            posted: list[_Job] = []
            try:
                for rank in range(1, size):
                    posted.append(self._job(rank, step, outcome))
                    self._threads[rank - 1].post(posted[-1])
                self._replica(0, step, outcome)
            except BaseException as interrupt:
                self._fail(outcome, interrupt)
            while posted:
                try:
                    self._wait_for(posted, outcome)
                except KeyboardInterrupt as interrupt:
                    self._fail(outcome, interrupt)

    def close(self) -> None:
        """End the threads."""
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.end()
        self._group.close()

    def _replica(self, rank: int, step: Step, outcome: _Outcome) -> None:
        context, stream = self._contexts[rank], self._group.streams[rank]
        frames = frame_stack()
        depth = len(frames)
        try:
            frames.append(Frame(chosen(context.strategy), context))
            with span("compute"):
                if stream.on_gpu:
                    with stream.use():
                        stream.begin()
                        outcome.results[rank] = step(rank)
                        stream.synchronize()
                else:
                    outcome.results[rank] = step(rank)
            self._group.leave(rank)
        except BaseException as error:
            outcome.errors.append((rank, error))
            self._group.abort(error)
        finally:
            del frames[depth:]

    def _job(self, rank: int, step: Step, outcome: _Outcome) -> _Job:
        # Settings that live in context variables, np.errstate among them, go along.
        settings = contextvars.copy_context()
        return _Job(lambda: settings.run(self._replica, rank, step, outcome))

    def _fail(self, outcome: _Outcome, interrupt: BaseException) -> None:
        """Note what reached the calling thread from outside its replica, and release the others."""
        outcome.errors.insert(0, (0, interrupt))
        self._group.abort(interrupt)

    def _wait_for(self, waiting: list[_Job], outcome: _Outcome) -> None:
        """Wait for jobs: as long as they compute, but after a failure only for a while."""
        while waiting:
            # In short waits, for a failure may come while this thread sleeps.
            if waiting[-1].wait(timeout=1.0):
                waiting.pop()
            elif outcome.errors and outcome.given_up(GRACE_SECONDS):
                self.abandoned = True
                self._threads = []
                waiting.clear()

    def _raise_first(self, outcome: _Outcome) -> None:
        own = [item for item in outcome.errors if not isinstance(item[1], WorkerLostError)]
        rank, error = (own or outcome.errors)[0]
        outcome.errors = []  # The error's traceback holds the outcome: no cycle, please.
        replica = self._contexts[rank]
        error.add_note(
            f"raised in replica {replica.replica_id_in_sync_group} of "
            f"{replica.num_replicas_in_sync} ({replica.device}), {self._title}.run"
        )
        if self.abandoned:
            error.add_note(
                f"a replica was still computing {GRACE_SECONDS:g} s later; its thread was given up."
            )
        try:
            raise error
        finally:
            del own, error, outcome
