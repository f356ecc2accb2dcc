"""What a cluster lacks is told: a chief, room on the disk, descriptors, memory, threads.

Servers and workers are real processes with low limits of their own. None of them waits for ever.
"""

import contextlib
import json
import os
import resource
import signal
import socket

import numpy as np
import pytest

import ndistribute as nd
from ndistribute import tensor_files
from ndistribute.transport.address import split_address, unix_name
from tests.jobs.clusters import DEADLINE, commanded, meet_workers, training
from tests.processes import Tasks

STRANGERS = 1200
NOBODY = 65534


def limits(**values):
    """Return what sets the limits of a task."""
    return {"TASK_LIMITS": json.dumps({f"RLIMIT_{name}": n for name, n in values.items()})}


def strangers(address, count):
    """Yield connections that say nothing."""
    for number in range(count):
        sock = socket.socket(socket.AF_UNIX if number % 2 else socket.AF_INET)
        sock.settimeout(30)
        with contextlib.suppress(OSError):  # It is shut out, as is right.
            sock.connect(unix_name(address) if number % 2 else split_address(address))
        yield sock


@pytest.mark.slow
def test_silent_strangers_keep_nobody_out_and_snapshots_are_written(tmp_path):
    """They held all descriptors: no snapshot could be written, and no worker came back."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, before[1]), before[1]))
    settings = {"NDISTRIBUTE_SNAPSHOT_DIR": str(tmp_path), **limits(NOFILE=1024)}
    try:
        with (
            training(**settings) as (tasks, strategy, coordinator),
            contextlib.ExitStack() as opened,
        ):
            with strategy.scope():
                total = nd.Variable(np.int64(0))
            for job in ("ps", "worker"):
                for sock in strangers(tasks.cluster[job][0], STRANGERS):
                    opened.enter_context(sock)
            tasks.kill("worker", 0)
            tasks.start("worker", 0)
            coordinator.schedule(lambda: total.assign_add(1))
            assert meet_workers(coordinator, tmp_path / "fifo") == [0, 1]
            strategy.save_snapshots()
            assert tensor_files.newest(tmp_path, "ps-0") is not None
            assert int(total) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("end", ["the chief leaves", "SIGTERM"])
def test_a_server_whose_disk_is_full_at_its_end_says_so(tmp_path, end):
    """Its status was 0, and what it had learned since the last snapshot was gone."""
    settings = {"NDISTRIBUTE_SNAPSHOT_DIR": str(tmp_path), "NDISTRIBUTE_SNAPSHOT_SECONDS": "3600"}
    with Tasks(workers=1, **settings, **limits(FSIZE=100_000)) as tasks:
        tasks.start_all()
        with commanded(tasks) as (strategy, _), strategy.scope():
            nd.Variable(np.zeros(100_000))
            if end == "SIGTERM":
                tasks.send("ps", 0, signal.SIGTERM)
                assert tasks.code("ps", 0) == 1
        assert tasks.code("ps", 0) == 1
        assert f"ps:0 could not write its last snapshot to {tmp_path}" in tasks.said()
        assert "File too large" in tasks.said()


LACKING = {
    "descriptors": (limits(NOFILE=7), ("Too many open files", "ulimit -n")),
    "threads": ({"TASK_USER": str(NOBODY), **limits(NPROC=1)}, ("can't start new thread",)),
}


@pytest.mark.parametrize("job", ["ps", "worker"])
@pytest.mark.parametrize("what", LACKING)
def test_a_task_that_lacks_what_it_needs_ends_with_an_error(what, job):
    """It went on without its listener, or hung, and everybody waited for it."""
    if what == "threads" and os.geteuid() != 0:
        pytest.skip("only root's processes can become others'")
    settings, texts = LACKING[what]
    with Tasks(workers=1) as tasks:
        tasks.start(job, 0, **settings)
        assert tasks.code(job, 0) == 1
        assert any(text in tasks.said() for text in texts), tasks.said()


def test_what_needs_too_much_memory_fails_and_everything_goes_on():
    """The server ended, and with it what all had learned."""
    with training(workers=1, **limits(AS=2 << 30)) as (_, strategy, coordinator):
        with strategy.scope():
            small = nd.Variable(np.zeros(10))
            with pytest.raises(nd.DistributeError, match=r"ps:0.*(MemoryError|allocate)"):
                nd.Variable(np.broadcast_to(np.float64(1), (1 << 30,)))
        coordinator.schedule(np.ones, (1 << 30,))
        with pytest.raises(MemoryError):
            coordinator.join(timeout=DEADLINE)
        coordinator.schedule(lambda: small.assign_add(np.ones(10)))
        coordinator.join(timeout=DEADLINE)
        assert small.numpy().tolist() == [1] * 10
