"""What is MPI's alone: coming together over it, and ending when a process fails."""

import contextlib
import gc
import os
import subprocess
import sys
import textwrap
import time
import types
import weakref
from pathlib import Path

import numpy as np
import pytest

from ndistribute.collective import mpi
from ndistribute.collective.mpi import exchange_over_mpi
from ndistribute.collective.reduce_op import ReduceOp
from ndistribute.errors import CollectiveTimeoutError, DistributeError
from ndistribute.transport import waiting
from tests.jobs import backend_calls
from tests.jobs.backend_calls import joined_peers
from tests.processes import ROOT, Ranks, find_mpiexec

pytest.importorskip("mpi4py")
pytestmark = pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec is installed")


@pytest.fixture(autouse=True)
def what_mpich_leaves():
    """Remove the segment of MPICH's own that it forgets where a process is killed."""
    segments = Path("/dev/shm")
    before = set(segments.glob("mpich_shm_*"))
    yield
    for path in set(segments.glob("mpich_shm_*")) - before:
        if not any(path.name in maps for maps in _mappings()):
            path.unlink(missing_ok=True)


def _mappings():
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            yield path.read_text()


@pytest.fixture(scope="module")
def three():
    with Ranks(3, "mpi") as ranks:
        yield ranks


def exchanged(rank, size):
    exchange_over_mpi(b"")
    here = mpi._world()
    return exchange_over_mpi(f"rank {rank}".encode() * rank), (here.rank, here.size)


def test_an_exchange_gives_everyone_all_blobs_in_rank_order(three):
    outcomes = three.results(exchanged)
    blobs = [b"", b"rank 1", b"rank 2rank 2"]
    assert outcomes == [(blobs, (rank, 3)) for rank in range(3)]


def test_a_warning_names_the_ranks_that_have_not_come(monkeypatch, caplog):
    monkeypatch.setattr(waiting, "FIRST_SECONDS", 0.01)
    mpi._finish(types.SimpleNamespace(Test=lambda: caplog.messages), seconds=20.0)
    assert "waited 0 s for other ranks of MPI, which have not made" in caplog.messages[0]
    caplog.clear()
    with pytest.raises(CollectiveTimeoutError):  # At the end of the program, others may work on.
        mpi._finish(types.SimpleNamespace(Test=lambda: False), 0.05, "")
    assert not caplog.messages


def sums_after_lost_messages(rank, size):
    """Leave messages that nobody receives, with a tag that comes again; return what comes later."""
    mpi._GENERATIONS = 2
    peers, backend = joined_peers(), backend_calls.group_backend()
    seen = []
    with contextlib.suppress(DistributeError):
        if rank == 1:
            backend_calls.all_reduced(backend, [np.full(10, 100.0)], ReduceOp.SUM)
        deadline = time.monotonic() + 20.0
        while not mpi._world().comm.Iprobe():  # Until what rank 1 sends is there.
            assert time.monotonic() < deadline
        peers.abort(ValueError("left out"))
    for _ in range(3):
        peers.recover(backend.reset, timeout=40.0)
        with contextlib.suppress(DistributeError):
            (total,) = backend_calls.all_reduced(backend, [np.full(10, 1.0)], ReduceOp.SUM)
            seen.append(float(total.max()))
    return seen


def test_a_message_of_a_failed_call_is_never_taken_for_one_of_a_later_call():
    with Ranks(2, "mpi") as two:
        for outcome in two.run(sums_after_lost_messages):
            assert set(outcome.result()) == {2.0}


def freed_after_a_failure(rank, size):
    """Fail in a call and recover; return True if nothing holds any more what was sent."""
    backend, sent = backend_calls.group_backend(), np.ones(10)
    held = weakref.ref(sent)
    with contextlib.suppress(DistributeError):
        backend_calls.all_reduced(backend, [sent], ReduceOp.MAX if rank else ReduceOp.SUM)
    joined_peers().recover(backend.reset, timeout=40.0)
    del sent
    gc.collect()
    return held() is None


def test_what_a_failed_call_sent_is_freed(three):
    assert three.results(freed_after_a_failure) == [True] * 3


def run_script(tmp_path, body, size=2):
    """Run a script under mpiexec; return its exit code and its output."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(body))
    command = [find_mpiexec() or "mpiexec", "-n", str(size), sys.executable, str(script)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    environ.pop("TF_CONFIG", None)
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(
        command, env=environ, cwd=tmp_path, text=True, timeout=110, check=False, **pipes
    )
    return done.returncode, done.stdout


START = """
    import itertools, os, signal, sys, time
    import numpy as np
    from tests.jobs import backend_calls
    from ndistribute.collective import mpi
    from ndistribute.collective.reduce_op import ReduceOp

    peers = backend_calls.joined_peers()
    rank, size = peers.rank, peers.size
    calls = itertools.count(1)

    def total(length=1000):
        ones = np.ones(length)
        backend = backend_calls.group_backend()
        return backend_calls.all_reduced(backend, [ones], ReduceOp.SUM, next(calls))[0]

    first = total()
"""

ENDINGS = {
    "a rank raises, and all show its error": (
        """
    if rank == 1:
        error = ValueError("bad batch")
        backend_calls.group_backend().abort(error)
        raise error
    while True:
        total(200_000)
    """,
        lambda code: code == 1,
        ["ValueError: bad batch", "WorkerLostError: worker 1 failed: ValueError: bad batch"],
    ),
    "a rank raises while another computes": (
        """
    mpi._LEAVE_SECONDS = 0.5
    if rank == 1:
        raise ValueError("bad batch")
    time.sleep(1000)  # It is not in a collective, and would not be for long.
    """,
        lambda code: code != 0,
        ["ValueError: bad batch"],
    ),
    "a rank exits with a code of its own": (
        """
    if rank == 1:
        sys.exit(5)
    while True:
        total()
    """,
        lambda code: code == 5,
        ["has finished, and worker 0 waits for it"],
    ),
    "a rank ends early and all is well": (
        """
    if rank == 0:
        time.sleep(0.5)  # It works on.
    sys.stdout.write(f"rank {rank} has {first[0]}")  # At once, unlike print's parts.
    """,
        lambda code: code == 0,
        ["rank 0 has 2.0", "rank 1 has 2.0"],
    ),
    "a rank never leaves MPI": (
        """
    mpi._FINALIZE_SECONDS = 2.0
    if rank == 1:
        mpi._mpi().Finalize = lambda: time.sleep(1000)
    sys.stdout.write("last words")
    """,
        lambda code: code != 0,
        ["last words"],
    ),
    "a rank is killed": (
        """
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        total(200_000)
    """,
        lambda code: code != 0,
        [],
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_job_ends_whatever_its_ranks_do(tmp_path, ending):
    body, is_right, texts = ENDINGS[ending]
    code, output = run_script(tmp_path, START + body)
    assert is_right(code), output
    assert all(text in output for text in texts), output


def test_a_job_whose_last_calls_failed_ends_well(tmp_path):
    body = """
    import numpy as np
    import ndistribute as nd
    options = nd.CommunicationOptions(implementation="mpi")
    strategy = nd.MultiWorkerMirroredStrategy(communication_options=options)
    def step(number):
        if strategy.cluster_resolver.task_id == 1 and number % 2:
            raise ValueError("a bad batch")
        nd.get_replica_context().all_reduce("sum", np.ones(500_000))
    failed = 0
    for number in range(8):
        try:
            strategy.run(step, args=(number,))
        except (ValueError, nd.WorkerLostError):
            failed += 1
    print(f"{failed} failed")
    """
    code, output = run_script(tmp_path, body)
    assert (code, output.count("4 failed")) == (0, 2), output
    assert "MPI routine" not in output


def test_without_mpi4py_the_error_names_the_extra(tmp_path):
    body = """
    import sys
    sys.modules["mpi4py"] = None
    from ndistribute.collective.mpi import exchange_over_mpi
    from ndistribute.errors import MissingDependencyError
    try:
        exchange_over_mpi(b"")
    except MissingDependencyError as error:
        print(error)
    """
    code, output = run_script(tmp_path, body, size=1)
    assert code == 0
    assert "pip install 'ndistribute[mpi]'" in output
