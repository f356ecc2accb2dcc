"""Steps take the batches of datasets, in this process and on servers of this process."""

from collections.abc import Iterator

import numpy as np
import pytest

import ndistribute as nd
from ndistribute import graph as g
from ndistribute.errors import OutOfRangeError

NUMBERS = nd.Dataset.from_tensor_slices({"x": np.arange(6.0), "y": np.arange(6) % 2})


@pytest.fixture(autouse=True)
def new_graph() -> Iterator[None]:
    with g.Graph().as_default():
        yield


def test_all_tensors_of_a_step_are_of_one_batch() -> None:
    batch = g.DatasetIterator(NUMBERS.batch(4)).get_next()
    assert (batch["x"].shape, batch["y"].dtype) == ((None,), np.int64)
    with g.Session() as session:
        found = session.run([batch, batch["x"] % 2 - batch["y"]])
        np.testing.assert_array_equal(found[0]["x"], [0, 1, 2, 3])
        np.testing.assert_array_equal(found[1], 0)
        assert session.run(batch["x"]).tolist() == [4, 5]
        with pytest.raises(OutOfRangeError, match="no more batches") as caught:
            session.run(batch)
    assert isinstance(caught.value, StopIteration)
    assert caught.value.op == "get_next"


def test_training_ends_with_the_dataset() -> None:
    x = g.DatasetIterator(NUMBERS.repeat(3).batch(2)).get_next()["x"]
    step = g.get_or_create_global_step()
    total = g.Variable(0.0, name="total", dtype=np.float64)
    update = [total.assign_add(np.sum(x)), step.assign_add(1)]
    last = g.FinalOpsHook([total.read_value(), step.read_value()])
    with g.MonitoredTrainingSession(hooks=[last]) as session:
        while not session.should_stop():
            session.run(update)
    assert last.final_ops_values == [45.0, 9]


def test_a_worker_takes_batches_beside_its_server() -> None:
    with nd.Server.create_local_server() as server:
        x = g.DatasetIterator(NUMBERS.batch(3)).get_next()["x"]
        total = g.Variable(0.0, name="total", dtype=np.float64)
        with g.device("/job:local/task:0"):
            doubled = g.py_function(lambda values: 2 * values, [x])
        update = total.assign_add(np.sum(doubled))
        with g.Session(server.target) as session:
            session.run(total.initializer)
            assert [float(session.run(update)) for _ in range(2)] == [6.0, 30.0]
            with pytest.raises(OutOfRangeError):
                session.run(update)


def test_each_session_and_initializer_begins_with_the_first_batch() -> None:
    iterator = g.DatasetIterator(NUMBERS.batch(4))
    x = iterator.get_next()["x"]

    class Again(g.SessionRunHook):
        def after_create_session(self, session: object, coord: object) -> None:
            session.run(iterator.initializer)  # type: ignore[attr-defined]

    for _ in range(2):
        with g.Session() as session:
            assert [session.run(x).tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5]]
            session.run(iterator.initializer)
            assert session.run(x).tolist() == [0, 1, 2, 3]
    g.get_or_create_global_step()
    with g.MonitoredTrainingSession(hooks=[Again()]) as monitored:
        assert monitored.run(x).tolist() == [0, 1, 2, 3]
