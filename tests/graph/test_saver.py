"""Savers of graphs write checkpoints whole, keep the newest, and read those of `nd.Checkpoint`."""

import os
import shutil
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute import errors, models, tensor_files
from ndistribute import graph as g


@pytest.fixture
def program() -> Any:
    """Make a graph with two variables, and a session in which they have values."""
    with g.Graph().as_default(), g.Session() as session:
        w, count = g.Variable(np.arange(3.0), name="layer/w"), g.Variable(np.int64(7), name="count")
        saver = g.Saver(max_to_keep=2)
        session.run(g.global_variables_initializer())
        yield session, saver, w, count


def test_what_was_saved_comes_back_and_the_newest_are_kept(program, tmp_path):
    session, saver, w, count = program
    paths = [saver.save(session, tmp_path / "model.ckpt", step) for step in (1, 2)]
    w.load(np.zeros(3))
    paths.append(saver.save(session, str(tmp_path / "model.ckpt"), count))
    assert paths[2].endswith("model.ckpt-7")
    assert g.latest_checkpoint(tmp_path) == paths[2]
    assert g.get_checkpoint_state(tmp_path) == (paths[2], paths[1:])
    saver.restore(session, paths[1])
    np.testing.assert_array_equal(session.run(w), [0.0, 1.0, 2.0])
    next(tmp_path.glob("model.ckpt-7.*/*tensors*")).write_bytes(b"")
    with pytest.raises(nd.CheckpointCorruptError):
        saver.restore(session, paths[2])
    assert saver.restore_latest(session, tmp_path) == g.latest_checkpoint(tmp_path) == paths[1]
    assert saver.save(session, tmp_path / "again", session.run(count)).endswith("again-7")
    with pytest.raises(errors.NotFoundError, match=r"there is no checkpoint .*ckpt-1"):
        saver.restore(session, paths[0])


def test_the_last_that_was_written_is_the_latest_whatever_the_times_of_its_folder(
    program, tmp_path, monkeypatch
):
    session, *_ = program
    saver, now = g.Saver(), time.time()
    for step, clock in (9, now), (10, now), (11, now - 100.0):
        monkeypatch.setattr(time, "time", lambda clock=clock: clock)
        saver.save(session, tmp_path / "a" / "model", step)
    checkpoint = nd.Checkpoint(w=nd.Variable(1.0))
    first = checkpoint.save(tmp_path / "a" / "other")
    assert g.latest_checkpoint(tmp_path / "a") == str(first.with_suffix(""))
    last = saver.save(session, tmp_path / "a" / "model", 12)
    assert g.latest_checkpoint(tmp_path / "a") == last
    for folder in sorted((tmp_path / "a").iterdir()):
        shutil.copytree(folder, tmp_path / "b" / folder.name)
        os.utime(tmp_path / "b" / folder.name, (len(folder.name), 2.0 ** (10 - len(folder.name))))
    assert g.latest_checkpoint(tmp_path / "b") == str(tmp_path / "b" / "model-12")
    assert models.latest_checkpoint(tmp_path / "b") == tmp_path / "b" / "model-12.000001"
    _, paths = g.get_checkpoint_state(tmp_path / "b")  # type: ignore[misc]
    names = [Path(path).name for path in paths]
    assert names == ["model-9", "model-10", "model-11", "other", "model-12"]


def test_a_variable_whose_dtype_only_a_run_can_tell_keeps_it(session, tmp_path):
    w = g.Variable(g.py_function(lambda: np.ones(3, np.float32), []), name="w")
    saver = g.Saver()
    session.run(g.global_variables_initializer())
    saver.restore(session, saver.save(session, tmp_path / "model"))
    assert w.dtype is None
    assert session.run(w).dtype == np.float32


def test_one_checkpoint_is_kept_every_so_many_hours(program, tmp_path, monkeypatch):
    session, *_ = program
    start, saver = time.monotonic(), g.Saver(max_to_keep=1, keep_checkpoint_every_n_hours=1.0)
    for hour in range(5):
        monkeypatch.setattr(time, "monotonic", lambda hour=hour: start + 1800.0 * hour + 1.0)
        paths = [saver.save(session, tmp_path / "model", hour), str(tmp_path / "absent")]
        saver.recover_last_checkpoints(paths)
        assert saver.last_checkpoints == paths[:1]
    _, kept = g.get_checkpoint_state(tmp_path)  # type: ignore[misc]
    assert [path[-2:] for path in kept] == ["-2", "-4"]


def test_threads_save_one_after_the_other(program, tmp_path, monkeypatch):
    session, saver, *_ = program
    active, most, write = [0], [0], tensor_files.write

    def slowly(*args: Any, **kwargs: Any) -> Path:
        active[0] += 1
        most[0] = max(most[0], active[0])
        threading.Event().wait(0.02)
        path = write(*args, **kwargs)
        active[0] -= 1
        return path

    monkeypatch.setattr(tensor_files, "write", slowly)
    with ThreadPoolExecutor(3) as threads:
        paths = set(threads.map(lambda _: saver.save(session, tmp_path / "model", 1), range(3)))
    assert (most, paths) == ([1], {str(tmp_path / "model-1")})


def test_graphs_and_strategies_read_each_others_checkpoints(program, tmp_path):
    session, saver, w, _ = program
    path = saver.save(session, tmp_path / "graph")
    with nd.MirroredStrategy(["cpu:0", "cpu:1"]):
        ours = {"layer/w": nd.Variable(np.zeros(3)), "count": nd.Variable(np.int64(0))}
        checkpoint = nd.Checkpoint(**ours)
        checkpoint.restore(path)
        np.testing.assert_array_equal(ours["layer/w"].numpy(), [0.0, 1.0, 2.0])
        ours["layer/w"].assign(np.full(3, 5.0))
        folder = checkpoint.save(tmp_path / "strategy")
    for path in (tmp_path / "strategy", folder):
        session.run(w.assign(np.zeros(3)).op)
        saver.restore(session, path)
        np.testing.assert_array_equal(session.run(w), [5.0, 5.0, 5.0])


def test_a_coordinator_stops_all_threads_and_raises_the_first_failure():
    coordinator = g.Coordinator()

    def work(fails: bool) -> None:
        with coordinator.stop_on_exception():
            if fails:
                raise ValueError("broken")
            assert coordinator.wait_for_stop(30)

    threads = [threading.Thread(target=work, args=(fails,)) for fails in (False, True)]
    for thread in threads:
        thread.start()
    with pytest.raises(ValueError, match="broken"):
        coordinator.join(threads)
    assert coordinator.should_stop()


def test_the_end_of_the_input_is_no_failure_but_what_exc_info_tells_is():
    coordinator = g.Coordinator()
    with coordinator.stop_on_exception():
        raise StopIteration
    coordinator.join()
    try:
        raise ValueError("broken")
    except ValueError:
        coordinator.request_stop(sys.exc_info())
    with pytest.raises(ValueError, match="broken"):
        coordinator.join()


def test_a_saver_that_goes_on_removes_no_checkpoints_of_other_names(program, tmp_path):
    session, saver, *_ = program
    best = g.Saver(max_to_keep=1).save(session, tmp_path / "best", 1)
    saver.save(session, tmp_path / "model", 1)
    again = g.Saver(max_to_keep=2)
    again.restore_latest(session, tmp_path)
    for step in (2, 3, 4):
        again.save(session, tmp_path / "model", step)
    assert set(g.get_checkpoint_state(tmp_path)[1]) == {  # type: ignore[index]
        best,
        *(str(tmp_path / f"model-{step}") for step in (3, 4)),
    }


def test_values_that_a_variable_would_cut_are_not_restored(program, tmp_path):
    session, saver, *_ = program
    path = saver.save(session, tmp_path / "model")
    with g.Graph().as_default(), g.Session() as other:
        w = g.Variable(np.zeros(3, np.int64), name="layer/w")
        wide = g.Variable(np.float32(0.0), name="count")
        g.Saver([wide]).restore(other, path)
        assert other.run(wide) == 7.0
        with pytest.raises(
            ValueError, match=r"'layer/w' has dtype float64 in .*int64, cannot hold"
        ):
            g.Saver([w]).restore(other, path)
