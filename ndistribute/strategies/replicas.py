"""The pool of replica threads, which run a step on every replica in parallel.

Replica 0 runs on the caller's thread, the others on threads that the pool keeps between steps. A
replica that fails releases the others; the pool is usable again when all have left the step.
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

from ndistribute.blas import StepThreads, core_numbers, cores, limited_blas, set_by_user
from ndistribute.collective.workers import ReplicaGroup
from ndistribute.context import Frame, ReplicaContext, chosen, frame_stack
from ndistribute.errors import WorkerLostError
from ndistribute.mistakes import explain_read_only
from ndistribute.timeline import span

Step = Callable[[int], Any]

# How long a failed or interrupted step waits for replicas that still compute. After this time it
# abandons them: their threads end when their functions return.
GRACE_SECONDS = 30.0


class _RunningReplicas:
    """A running step: its replicas' results and errors, and the threads that are in it."""

    def __init__(self, size: int) -> None:
        self.results: list[Any] = [None] * size
        self.errors: list[tuple[int, BaseException]] = []  # In the order in which they occurred.
        self.begun = 0
        self._deadline: float | None = None  # Set by a failure; interrupts do not extend it.
        self._ended: list[None] = []
        self._wake = threading.Lock()  # Held until a thread ends.
        self._wake.acquire()

    def end(self) -> None:
        """Record that a thread has left the step, and wake the waiting thread."""
        self._ended.append(None)
        try:  # noqa: SIM105 - it costs a microsecond.
            self._wake.release()
        except RuntimeError:
            pass  # Another thread released it; the waiter counts both.

    def wait(self) -> bool:
        """Return True once all threads have left, or False `GRACE_SECONDS` after a failure."""
        # This counts threads, because an interrupt may strike after the lock has been acquired.
        while len(self._ended) < self.begun:
            # The waits are short, because a replica may fail during one.
            if not self._wake.acquire(timeout=1.0) and self.errors:
                self._deadline = self._deadline or time.monotonic() + GRACE_SECONDS
                if time.monotonic() > self._deadline:
                    return False
        return True


Jobs = queue.SimpleQueue[Callable[[], None] | None]


def _serve(jobs: Jobs) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job


def _end(queues: list[Jobs]) -> None:
    """Make threads end after the jobs that are in their queues."""
    for jobs in queues:
        jobs.put(None)
    queues.clear()


class ReplicaPool:
    """The threads that run steps on all replicas of a group; garbage collection ends them."""

    def __init__(self, group: ReplicaGroup, contexts: Sequence[ReplicaContext], title: str) -> None:
        self.abandoned = False  # Once threads were abandoned, only `close` works.
        self._group = group
        self._contexts = contexts
        self._title = title
        self._threads: list[threading.Thread] = []
        self._queues: list[Jobs] = []
        self._limit_blas()
        weakref.finalize(self, _end, self._queues).atexit = False

    def run(self, step: Step) -> list[Any]:
        """Return the results of a step, called with each replica's number on its thread."""
        running = _RunningReplicas(len(self._contexts))
        begun = time.perf_counter()
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
        if self._step_threads is not None:
            now = time.perf_counter()
            self._step_threads.record(now - begun, now)
        return running.results

    def close(self) -> None:
        """End the threads and close the communicators."""
        self._end_threads()
        self._group.close(abandoned=self.abandoned)

    def refuse_in_fork(self, cause: BaseException) -> None:
        """In the child of a fork inside a step, raise an error where a replica would wait."""
        self._group.rendezvous.refuse_in_fork(cause)

    def _limit_blas(self) -> None:
        """Decide how many BLAS threads each replica has, and whether steps try fewer."""
        workers, size = self._group.workers, len(self._contexts)
        here = cores() if workers is None else workers.cores
        self._share = max(1, here // size)
        everything = len(core_numbers()) if workers is None else here
        # The BLAS threads without a limit, for a replica that is alone in its process.
        self._unlimited = (self._share if set_by_user() else everything) if size == 1 else None
        on_cpus = not any(stream.on_gpu for stream in self._group.streams)
        tries = self._share > 1 and on_cpus and not set_by_user()
        self._step_threads = StepThreads(self._share) if tries else None

    def _run_all(self, step: Step, running: _RunningReplicas) -> None:
        """Run every replica, and return when all have left the step or are abandoned."""
        size = len(self._contexts)
        if size > 1 and not self._threads:
            self._start_threads()
        threads = self._share if self._step_threads is None else self._step_threads.threads
        with limited_blas(None if threads == self._unlimited else threads):
            try:
                for rank in range(1, size):
                    # The copy passes on settings in context variables, such as np.errstate.
                    settings = contextvars.copy_context().run
                    job = functools.partial(settings, self._replica, rank, step, running)
                    # No call between these two, so an interrupt strikes before or after both.
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

    def _replica(self, rank: int, step: Step, running: _RunningReplicas) -> None:
        context, stream = self._contexts[rank], self._group.streams[rank]
        frames = frame_stack()
        depth = len(frames)
        outer = frames[-1].recorder  # Replica 0 runs on the thread whose tape may be open.
        try:
            inner = None if outer is None else outer.around_step()
            frames.append(Frame(chosen(context.strategy), context, inner))
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
            if not self.abandoned:  # Otherwise the abort could hit a later step.
                self._group.abort(error)
        finally:
            del frames[depth:]
            if rank:
                running.end()

    def _fail(self, running: _RunningReplicas, interrupt: BaseException) -> None:
        """Record an exception that hit the calling thread outside its replica; release the rest."""
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
            if thread.is_alive():  # False if it could not start.
                thread.join(GRACE_SECONDS)

    def _raise_first(self, running: _RunningReplicas) -> None:
        causes = [item for item in running.errors if not isinstance(item[1], WorkerLostError)]
        rank, error = (causes or running.errors)[0]
        running.errors = []  # The error's traceback refers to the step; avoid a cycle.
        replica = self._contexts[rank]
        explain_read_only(error)
        error.add_note(
            f"raised in replica {replica.replica_id_in_sync_group} of "
            f"{replica.num_replicas_in_sync} ({replica.device}), {self._title}.run"
        )
        if self.abandoned:
            error.add_note(
                f"a replica was still computing {GRACE_SECONDS:g} s later; its thread is abandoned."
            )
        try:
            raise error
        finally:
            del causes, error, running
