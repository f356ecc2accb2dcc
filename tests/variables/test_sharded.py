"""Sharded variables: what is read and sent, on any number of servers.

The contract tests of this folder have a row for them, so that they behave like the array they hold.
"""

import pickle
from contextlib import contextmanager

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.parameter_server.messages import Read, Transaction
from ndistribute.variables.partitioners import FixedShardsPartitioner
from ndistribute.variables.served import ServedVariable
from tests.strategies import on_servers

EVERY = [(1, 3), (2, 3), (3, 2)]  # Numbers of servers and of shards.
TABLE = np.arange(7000.0).reshape(700, 10)  # Too large to come whole for a few rows.


@contextmanager
def served(servers, shards=1, **options):
    """Yield a strategy on so many servers of this process, and its clients, which note requests."""
    partitioner = FixedShardsPartitioner(shards) if shards > 1 else None
    with on_servers.served(servers, variable_partitioner=partitioner, **options) as strategy:
        clients = strategy.servers._clients
        for client in clients:
            note_requests(client)
        yield strategy, clients


def note_requests(client):
    """Let a client remember what its server is asked."""
    client.asked, start = [], client.start

    def asking(request):
        client.asked.append(request)
        return start(request)

    client.start = asking


@pytest.fixture(params=EVERY, ids=lambda numbers: "{} servers, {} shards".format(*numbers))
def strategy(request):
    with served(*request.param) as (made, _):
        yield made


def make(strategy, initial=TABLE, **kwargs):
    with strategy.scope():
        return nd.Variable(initial, **kwargs)


def asked_for(clients, kind):
    return [one for client in clients for one in client.asked if isinstance(one, kind)]


def rows_sent(clients):
    """Return how many rows were asked for, and forget it."""
    items = [item for request in asked_for(clients, Read) for item in request.items]
    for client in clients:
        client.asked.clear()
    return sum(len(item.rows) for item in items)


def test_shards_are_named_after_the_variable_and_dealt_to_the_servers():
    with served(2, 3) as (strategy, _):
        v = make(strategy, np.arange(14.0).reshape(7, 2), name="table", aggregation="sum")
        assert isinstance(v, ServedVariable)
        assert isinstance(v, nd.Variable)
        assert [part.name for part in v.variables] == [f"table/part_{k}" for k in range(3)]
        assert [place.servers for place in v.places] == [(0,), (1,), (0,)]
        assert [part.shape for part in v.variables] == [(3, 2), (2, 2), (2, 2)]
        assert all(part.aggregation is v.aggregation for part in v.variables)
        assert (v.name, v.shape, v.dtype, len(v)) == ("table", (7, 2), np.float64, 7)


def test_what_can_not_be_cut_is_left_whole(strategy):
    for initial in (3.0, np.zeros((0, 4)), np.zeros((4, 0)), np.zeros((1, 4))):
        v = make(strategy, initial)
        assert len(v.places) == 1
        assert v.variables == (v,)
        assert np.array_equal(v.numpy(), initial)


def test_parts_are_read_as_of_an_array(strategy):
    v = make(strategy)
    for index in (
        -1,
        [699, 0, 350, 0, -700],
        np.array([3, 200], np.uint8),
        slice(230, 240),
        slice(5, 5),
        [],
        TABLE % 1000 == 7,
        ([[400], [2]], [1, 9]),
        (),
        None,
        slice(None, None, -1),
        (slice(200, 300, 50), None, 3),
        (Ellipsis, 2),
    ):
        got, expected = v[index], TABLE[index]
        assert np.array_equal(got, expected)
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    masks = [np.ones(shape, bool) for shape in (699, (700, 11), (700, 10, 1))]
    numbers = [700, -701, [0, -701], (700, 0), np.array([-701]), np.uint16(1000), (0, 10), 10**30]
    for index in (*masks, *numbers, 1.0, "a", [1.5], [None]):
        with pytest.raises(IndexError):
            v[index]


@pytest.mark.parametrize("shards", [1, 3])
def test_only_what_is_asked_for_is_read_in_one_message_to_each_server(shards):
    with served(2, shards) as (strategy, clients):
        v = make(strategy, name="table")
        assert (len(v), v.size, v.ndim) == (700, 7000, 2)
        assert "'table' float64(700, 10)" in repr(v)
        assert rows_sent(clients) == 0
        for index, rows in (([3, 699, 3, -1], 2), (slice(100, 110), 10), ((5, 2), 1)):
            v[index]
            assert rows_sent(clients) == rows
        with nd.GradientTape():
            v[[7, 300, 699]]
        assert len(asked_for(clients, Read)) == min(shards, 2)
        assert rows_sent(clients) == 3
        strategy.run(lambda: v[[7, 8]])
        assert rows_sent(clients) == 2
        assert "[0. 1.]" in repr(make(strategy, [0.0, 1.0]))
        with pytest.raises(TypeError, match="has no len"):
            len(make(strategy, 1.0))


def test_what_a_write_changes_on_one_server_changes_together_and_others_are_not_asked():
    with served(3, 4) as (strategy, clients):
        v = make(strategy)
        v.assign_add(TABLE)
        v.scatter_add([0, 699, 300, 400], np.ones((4, 10)))
        assert [len(asked_for([client], Transaction)) for client in clients] == [2] * 3
        v.scatter_add([300, 301], np.ones((2, 10)))
        assert [len(asked_for([client], Transaction)) for client in clients] == [2, 3, 2]


def test_a_variable_that_was_sent_reads_and_changes_the_same_rows():
    with served(2, 3) as (strategy, _):
        v = make(strategy, name="table", aggregation="sum")
        sent = pickle.dumps(v)
        strategy.handles.clear()  # As in another process.
        handle = pickle.loads(sent)
        assert handle is not v
        assert (handle.name, handle.aggregation) == (v.name, v.aggregation)
        handle.scatter_add([699, 0], np.ones((2, 10)))
        assert np.array_equal(v[[0, 699]], TABLE[[0, 699]] + 1)
        assert np.array_equal(handle, v)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("index", [[3, 699, 3], np.array([[0], [-1]])], ids=str)
def test_rows_looked_up_under_a_tape_give_rows_as_gradient(shards, index):
    with served(2, shards) as (strategy, _):
        v = make(strategy)

        def step():
            with nd.GradientTape() as tape:
                loss = np.sum(v[index] ** 2)
            return tape.gradient(loss, v)

        expected = np.zeros_like(TABLE)
        np.add.at(expected, index, 2 * TABLE[index])
        for gradient in (step(), strategy.run(step).values[0]):
            assert isinstance(gradient, nd.IndexedSlices)
            assert len(gradient.indices) == np.size(index)
            assert np.array_equal(gradient.to_dense(), expected)


def test_gradients_of_parts_and_of_the_whole_add_up(strategy):
    v = make(strategy)
    with nd.GradientTape() as tape:
        loss = np.sum(v[[3, 3]]) + np.sum(v[600:]) + np.sum(v * 2)
    expected = np.full_like(TABLE, 2.0)
    expected[3] += 2
    expected[600:] += 1
    assert np.array_equal(tape.gradient(loss, v), expected)


def test_what_an_optimizer_keeps_is_sharded_like_the_variable():
    with served(2, 3) as (strategy, _):
        v = make(strategy)
        optimizer = nd.optimizers.Adagrad(0.1, initial_accumulator_value=0.5)
        optimizer.apply_gradients([(np.full_like(TABLE, 2.0), v)])
        count, slot = optimizer.variables
        assert int(count) == 1
        assert [place.servers for place in slot.places] == [place.servers for place in v.places]
        assert np.array_equal(slot, np.full_like(TABLE, 4.5))


@pytest.mark.parametrize("shards", [1, 3])
def test_updates_between_a_read_of_rows_and_its_gradient_are_counted(shards):
    with served(2, shards) as (strategy, _):
        v = make(strategy)
        optimizer = nd.optimizers.SGD(0.1)
        with nd.GradientTape() as tape:
            loss = np.sum(v[[0, 699]])
        v.scatter_add([0, 699], np.ones((2, 10)))
        v.scatter_add([0], np.ones((1, 10)))
        optimizer.apply_gradients([(tape.gradient(loss, v), v)])
        assert strategy.staleness() == {2: 1}
