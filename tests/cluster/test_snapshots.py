"""Snapshots on disk: whole ones are found again, others never taken for one."""

from __future__ import annotations

import errno
import logging
import os
from hashlib import sha256

import numpy as np
import pytest

from ndistribute.cluster.serving.snapshots import Snapshots
from ndistribute.errors import CheckpointCorruptError
from tests.cluster.desks import start_python

ENDLESS = """
import itertools, sys
import numpy as np
from ndistribute.cluster.serving.snapshots import Snapshots
files = Snapshots(sys.argv[1], "ps:0")
for step in itertools.count(1):
    files.write({"step": step}, [np.full(200_000, step), np.full(7, step)])
    print(step, flush=True)
"""


@pytest.fixture
def files(tmp_path):
    with Snapshots(tmp_path, "ps:0") as files:
        yield files


def write(files, step: int):
    return files.write({"step": step}, [np.full((2, 3), step, np.float32), np.array(step)])


def names(directory) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.suffix != ".lock")


def flip(path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_nothing_is_found_where_nothing_was_written(files):
    assert files.newest() is None


def test_the_newest_is_found_and_the_last_two_are_kept(tmp_path, files):
    for step in range(1, 5):
        write(files, step)
    assert names(tmp_path) == ["ps-0.000003.snapshot", "ps-0.000004.snapshot"]
    files.close()
    with Snapshots(tmp_path, "ps:0") as again:
        snapshot = again.newest()
    assert snapshot.head == {"step": 4}
    assert [tensor.dtype for tensor in snapshot.tensors] == [np.float32, np.int64]
    np.testing.assert_array_equal(snapshot.tensors[0], np.full((2, 3), 4))


def test_tasks_share_a_directory(tmp_path, files):
    with Snapshots(tmp_path, "ps:1") as others:
        write(files, 1)
        write(others, 2)
        assert (files.newest().head, others.newest().head) == ({"step": 1}, {"step": 2})


@pytest.mark.parametrize("harm", ["first", "middle", "last", "cut", "empty", "longer"])
def test_a_broken_one_is_set_aside_and_the_one_before_taken(tmp_path, files, caplog, harm):
    write(files, 1)
    path = write(files, 2)
    size = path.stat().st_size
    match harm:
        case "first" | "middle" | "last":
            flip(path, {"first": 0, "middle": size // 2, "last": size - 1}[harm])
        case "cut" | "empty":
            os.truncate(path, size // 2 if harm == "cut" else 0)
        case "longer":
            path.write_bytes(path.read_bytes() + b"x")
    with caplog.at_level(logging.WARNING, "ndistribute"):
        assert files.newest().head == {"step": 1}
    assert "ps-0.000002.snapshot is set aside" in caplog.text
    write(files, 3)
    assert names(tmp_path)[0] == "ps-0.000001.snapshot"  # It counts, the broken one does not.
    assert files.newest().head == {"step": 3}


def test_a_server_with_broken_ones_alone_does_not_start_from_nothing(tmp_path, files):
    for step in (1, 2):
        flip(write(files, step), 100)
    for _ in range(2):
        with pytest.raises(CheckpointCorruptError, match=r"000002\.snapshot.*start anew"):
            files.newest()


def test_bytes_that_are_whole_but_no_snapshot_are_refused(tmp_path, files):
    write(files, 1)
    path = files.write({"step": 2}, [])
    text = path.read_bytes()[:-32].replace(b"saved_at", b"saved_by")
    path.write_bytes(text + sha256(text).digest())
    assert files.newest().head == {"step": 1}


def test_a_full_disk_harms_no_earlier_snapshot(tmp_path, files, monkeypatch):
    write(files, 1)

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write(files, 2)
    assert names(tmp_path) == ["ps-0.000001.snapshot"]
    assert files.newest().head == {"step": 1}


def test_a_second_process_of_the_same_task_is_told_so(tmp_path, files):
    with pytest.raises(OSError, match=r"ps:0.*directory of its own"):
        Snapshots(tmp_path, "ps:0", claim_seconds=0.1)
    files.close()
    Snapshots(tmp_path, "ps:0", claim_seconds=0.1).close()


def test_a_process_that_is_killed_while_it_writes_leaves_a_whole_one(tmp_path):
    process = start_python(ENDLESS, str(tmp_path))
    try:
        for _ in range(5):
            written = int(process.stdout.readline())
    finally:
        process.kill()
        process.wait(timeout=10)
        process.stdout.close()
    with Snapshots(tmp_path, "ps:0", claim_seconds=5.0) as files:
        snapshot = files.newest()
        assert len(names(tmp_path)) <= 3  # A third may have been complete, and one not yet gone.
        assert not list(tmp_path.glob("*.writing"))
    step = snapshot.head["step"]
    assert step >= written
    assert all((tensor == step).all() for tensor in snapshot.tensors)
