"""The pool of replica threads: one step on every replica at once.

Replica 0 runs on the caller's thread, the others on threads that are kept between steps. Whoever
fails releases the rest; the pool is usable again when all are out.
"""

from __future__ import annotations

import contextvars
import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ndistribute.blas import cores, limited_blas
from ndistribute.collective.workers import ReplicaGroup
from ndistribute.context import Frame, ReplicaContext, chosen, frame_stack
from ndistribute.errors import WorkerLostError
from ndistribute.timeline import span

__all__ = ["ReplicaPool"]

Step = Callable[[int], Any]

# How long a failed or interrupted step waits for replicas that still compute. One that does not
# end in this time is given up: its thread ends when its function returns.
GRACE_SECONDS = 30.0


class _Running:
    """A step under way: what its replicas returned and raised, and how many threads are in it."""

    def __init__(self, size: int) -> None:
        self.results: list[Any] = [None] * size
        self.errors: list[tuple[int, BaseException]] = []  # In the order of time.
        self.begun = 0
        self._deadline: float | None = None  # After a failure; it holds on through interrupts.
        self._ended: list[None] = []
        self._wake = threading.Lock()  # Held until a thread ends.
        self._wake.acquire()

    def end(self) -> None:
        """Say that a thread is out of the step."""
        self._ended.append(None)
        try:  # noqa: SIM105 - it costs a microsecond.
            self._wake.release()
        except RuntimeError:
            pass  # Another one has, and the waiter will count both.

    def wait(self) -> bool:
        """Wait until all threads are out, or after a failure for a while; return True if they are.

        Those that ended are counted: an interrupt may strike when a wake-up was taken already.
        """
        while len(self._ended) < self.begun:
            # In short waits, for a failure may come while this thread sleeps.
            if not self._wake.acquire(timeout=1.0) and self.errors:
                self._deadline = self._deadline or time.monotonic() + GRACE_SECONDS
                if time.monotonic() > self._deadline:
                    return False
        return True


Jobs = queue.SimpleQueue[Callable[[], None] | None]


def _serve(jobs: Jobs) -> None:
    """Do what a replica's thread is given, until it is told to end."""
    while (job := jobs.get()) is not None:
        job()
        del job


def _end(queues: list[Jobs]) -> None:
    """Tell threads to end when they have done what they were given."""
    for jobs in queues:
        jobs.put(None)
    queues.clear()


class ReplicaPool:
    """Run steps on all replicas of a group.

    Where nobody holds the pool any more, its threads end.

    Args:
        group: the communicators and streams.
        contexts: one for each replica.
        title: the strategy, as messages name it.
    """

    def __init__(self, group: ReplicaGroup, contexts: Sequence[ReplicaContext], title: str) -> None:
        self.abandoned = False  # After threads were given up it can only be closed.
        self._group = group
        self._contexts = contexts
        self._title = title
        self._threads: list[threading.Thread] = []
        self._queues: list[Jobs] = []
        weakref.finalize(self, _end, self._queues).atexit = False

    def run(self, step: Step) -> list[Any]:
        """Call a step with the number of each replica, on its thread; return the results in order.

        Raises:
            BaseException: what a replica raised, the first of them, with a note naming it.
        """
        running = _Running(len(self._contexts))
        try:
            self._group.begin()
            self._run_all(step, running)
        except BaseException as interrupt:
            self._group.abort(interrupt)  # Other processes may be in the step already.
            raise
        finally:
            self._group.end()
        if running.errors:
            self._raise_first(running)
        return running.results

    def close(self) -> None:
        """End the threads, and what the communicators hold."""
        self._end_threads()
        self._group.close(abandoned=self.abandoned)

    def refuse_in_fork(self, cause: BaseException) -> None:
        """Let a replica that has forked inside a step wait for no other one in the child."""
        self._group.rendezvous.refuse_in_fork(cause)

    def _run_all(self, step: Step, running: _Running) -> None:
        """Run every replica, and come back when all are out or given up."""
        size, threads = len(self._contexts), None
        if size > 1:
            if not self._threads:
                self._start_threads()
            workers = self._group.workers
            threads = max(1, (cores() if workers is None else workers.cores) // size)
        with limited_blas(threads):
            try:
                for rank in range(1, size):
                    # Settings that live in context variables, np.errstate among them, go along.
                    settings = contextvars.copy_context().run
                    job = functools.partial(settings, self._replica, rank, step, running)
                    # No call stands between these two: an interrupt strikes before or after both.
                    running.begun += 1
                    self._queues[rank - 1].put(job)
                self._replica(0, step, running)
            except BaseException as interrupt:
                self._fail(running, interrupt)
            while True:
                try:
                    self.abandoned = not running.wait()
                    return
                except BaseException as interrupt:  # Whatever a signal handler raises.
                    self._fail(running, interrupt)

    def _replica(self, rank: int, step: Step, running: _Running) -> None:
        context, stream = self._contexts[rank], self._group.streams[rank]
        frames = frame_stack()
        depth = len(frames)
        try:
            frames.append(Frame(chosen(context.strategy), context))
            with span("compute"):
                if stream.on_gpu:
                    with stream.use():
                        stream.begin()
                        running.results[rank] = step(rank)
                        stream.synchronize()
                else:
                    running.results[rank] = step(rank)
            self._group.leave(rank)
        except BaseException as error:
            running.errors.append((rank, error))
            if not self.abandoned:  # Else another step may be under way, which it has no part in.
                self._group.abort(error)
        finally:
            del frames[depth:]
            if rank:
                running.end()

    def _fail(self, running: _Running, interrupt: BaseException) -> None:
        """Note what reached the calling thread from outside its replica, and release the others."""
        running.errors.insert(0, (0, interrupt))
        self._group.abort(interrupt)

    def _start_threads(self) -> None:
        try:
            for rank in range(1, len(self._contexts)):
                jobs: Jobs = queue.SimpleQueue()
                name = f"{self._title}:{rank}"
                thread = threading.Thread(target=_serve, args=(jobs,), name=name, daemon=True)
                self._queues.append(jobs)
                self._threads.append(thread)
                thread.start()
        except BaseException:  # The system has no thread left, or an interrupt came.
            self._end_threads()
            raise

    def _end_threads(self) -> None:
        threads, self._threads = self._threads, []
        _end(self._queues)
        for thread in [] if self.abandoned else threads:
            if thread.is_alive():  # One that could not start is not.
                thread.join(GRACE_SECONDS)

    def _raise_first(self, running: _Running) -> None:
        own = [item for item in running.errors if not isinstance(item[1], WorkerLostError)]
        rank, error = (own or running.errors)[0]
        running.errors = []  # The error's traceback holds the step: no cycle, please.
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
            del own, error, running
