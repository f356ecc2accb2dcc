"""A supervisor initialises, restores, saves and reports from threads, which stop together."""

from __future__ import annotations

import queue
from typing import Any

import pytest

from ndistribute import errors
from ndistribute import graph as g
from ndistribute.compat import tf
from tests.graph.test_monitored import Writer, model
from tests.processes import HANG_SECONDS, wait_until


def test_a_supervisor_saves_at_the_end_and_stops_its_threads(tmp_path):
    for expected in (1.0, 0.25):
        with g.Graph().as_default():
            step, loss = model()
            supervisor = tf.train.Supervisor(logdir=tmp_path, save_model_secs=1000)
            with supervisor.managed_session() as session:
                assert session.run(loss) == expected
                session.run(step)
                assert not supervisor.should_stop()
            assert supervisor.should_stop()
    with g.Graph().as_default():
        bad = g.constant([1.0, 2.0]) + g.constant([1.0, 2.0, 3.0])
        failing = pytest.raises(errors.InvalidArgumentError, match=r"numpy\.add")
        with failing, tf.train.Supervisor().managed_session() as session:
            session.run(bad)


def test_a_supervisor_calls_functions_until_it_stops():
    called: queue.Queue[Any] = queue.Queue()
    with g.Graph().as_default():
        g.Variable(0.0)
        supervisor = tf.train.Supervisor()
        with supervisor.managed_session():
            thread = supervisor.loop(None, lambda *a, **k: called.put((a, k)), (1,), {"b": 2})
            assert [called.get(timeout=HANG_SECONDS) for _ in range(3)] == 3 * [((1,), {"b": 2})]
            supervisor.loop(0.001, lambda: called.put("no arguments"))
            while called.get(timeout=HANG_SECONDS) != "no arguments":
                pass
        assert not thread.is_alive()


def test_a_supervisor_counts_steps_and_saves_at_the_end_of_the_input(tmp_path):
    writer: Any = Writer()
    with g.Graph().as_default():
        step, _ = model()
        options: Any = {"summary_op": None, "summary_writer": writer}
        supervisor = tf.train.Supervisor(logdir=tmp_path, save_summaries_secs=0.01, **options)
        with supervisor.managed_session() as session:
            session.run(step)
            wait_until(lambda: any(step > 0 for step in writer.steps))
            raise StopIteration  # As next(batches) does.
    assert all(b"global_step/sec" in value for value in writer.values)
    assert str(g.latest_checkpoint(tmp_path)).endswith("model.ckpt-1")


def test_a_supervisor_that_cannot_begin_closes_its_file(tmp_path):
    with g.Graph().as_default():
        model()
        bad = g.constant([1.0, 2.0]) + [1.0, 2.0, 3.0]
        supervisor = tf.train.Supervisor(logdir=tmp_path, init_op=bad)
        with pytest.raises(errors.InvalidArgumentError), supervisor.managed_session():
            pass
    assert supervisor.summary_writer is None
