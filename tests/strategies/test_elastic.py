"""Elastic strategies of one process: what they refuse, and what becomes of a unit and input."""

import json
import signal
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ndistribute as nd
from ndistribute.collective.membership import WorkerReport
from ndistribute.data import Topology
from ndistribute.devices import Device
from ndistribute.errors import WorkerLostError
from ndistribute.strategies.elastic_input import ElasticBatches
from ndistribute.strategies.elastic_results import outcome_of
from ndistribute.variables.mirrored import sharded_variable
from tests.processes import free_addresses

LOSSES = st.booleans()


@pytest.fixture
def alone(monkeypatch):
    """The only worker of an elastic job."""
    (address,) = free_addresses({"worker": 1})["worker"]
    config = {"cluster": {"worker": [address]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    monkeypatch.setenv("NDISTRIBUTE_SECRET", "the secret of this test")
    with nd.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"], elastic=nd.Elastic()) as made:
        yield made


@pytest.mark.parametrize("implementation", ["nccl", "mpi"])
def test_groups_that_cannot_lose_a_member_are_refused_by_name(implementation):
    options = nd.CommunicationOptions(implementation=implementation)
    with pytest.raises(ValueError, match=f"'{implementation}'.*Leave the implementation out"):
        nd.MultiWorkerMirroredStrategy(communication_options=options, elastic=nd.Elastic())


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
    ],
    ids=["torchrun", "MPI"],
)
def test_a_job_whose_addresses_nobody_tells_is_refused(environ, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"ndistribute run --elastic.*TF_CONFIG"):
        nd.MultiWorkerMirroredStrategy(elastic=nd.Elastic())


def test_other_limits_than_elastic_are_refused():
    with pytest.raises(TypeError, match=r"nd.Elastic\(...\)"):
        nd.MultiWorkerMirroredStrategy(elastic=True)


def test_a_shard_is_refused_by_name(alone):
    with alone.scope(), pytest.raises(ValueError, match=r"'table'.*lost worker would lose"):
        sharded_variable(np.zeros((4, 2)), axis=0, name="table")


def test_a_newcomer_that_hands_over_says_nothing_more_at_its_end(alone):
    alone.session.is_newcomer = True
    with pytest.raises(SystemExit):
        signal.raise_signal(signal.SIGTERM)
    alone.close()


def test_a_newcomer_that_failed_says_nothing_more_at_its_end(alone, monkeypatch):
    alone.session.is_newcomer = True
    monkeypatch.setattr(sys, "last_value", KeyError("user"), raising=False)
    alone.close()


def test_input_that_cannot_go_back_is_refused_at_the_start(alone):
    class Loader:
        def __iter__(self):
            yield np.zeros(4)

    with pytest.raises(ValueError, match="an elastic loop: the input contains a Loader, whose"):
        iter(alone.elastic(Loader()))


def test_a_loop_alone_takes_each_batch_once(alone):
    rows = nd.Dataset.range(10).batch(4)
    seen = [np.concatenate(batch.values).tolist() for batch in alone.elastic(rows)]
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_what_a_unit_raises_reaches_the_caller_and_the_next_one_runs(alone):
    with alone.scope():
        total = nd.Variable(0.0, aggregation="sum", synchronization="on_read")

    def step(fails):
        total.assign_add(1.0)
        if fails:
            raise KeyError("a bad batch")

    with pytest.raises(KeyError, match="a bad batch"):
        alone.run(step, args=(True,))
    alone.run(step, args=(False,))
    assert float(total) == 4.0  # As without elastic workers, what was written stays.


# The outcome of a unit.


@st.composite
def reports(draw):
    """Draw what members report of one unit: each is a unit behind others or not, clean or not."""
    ahead = draw(st.lists(st.booleans(), min_size=1, max_size=5))
    kept = draw(st.booleans())
    everybody = []
    for is_ahead in ahead:
        clean = draw(st.booleans())
        # Whoever passed the commit knows that all others are prepared.
        prepared = (any(ahead) and not is_ahead) or draw(st.booleans())
        everybody.append(WorkerReport(4 + is_ahead, prepared, clean, kept and draw(st.booleans())))
    newcomers = draw(st.lists(st.integers(0, len(everybody)), max_size=2))
    for place in newcomers:
        everybody.insert(place, WorkerReport(newcomer=True))
    return everybody


@given(reports())
def test_all_members_end_with_the_same_unit_and_the_state_of_one_that_has_it(everybody):
    present = [k for k, report in enumerate(everybody) if not report.newcomer]
    last = max(everybody[k].unit for k in present)
    try:
        outcome = outcome_of(everybody)
    except WorkerLostError:
        # Nobody has the state before the unit, and not all have completed it.
        assert all(everybody[k].unit == last for k in present)
        assert not any(everybody[k].clean or everybody[k].kept for k in present)
        assert not all(everybody[k].prepared for k in present)
        return
    completed = {everybody[k].unit + outcome.commits[k] for k in present}
    assert len(completed) == 1
    assert outcome.source in present
    assert not outcome.lacks[outcome.source]
    assert all(outcome.lacks[k] for k, report in enumerate(everybody) if report.newcomer)
    assert not any(outcome.commits[k] for k, report in enumerate(everybody) if report.newcomer)
    for k in present:
        if outcome.commits[k]:
            assert everybody[k].prepared
        elif not outcome.lacks[k] and completed == {4}:
            assert everybody[k].clean or everybody[k].kept


# The input.


class Session:
    """What an iterator needs of a session, for a worker of some."""

    batch_scale, limits = 1, nd.Elastic()

    def __init__(self, rank, size):
        self.changes = self.inputs = 0
        self.input, self.at_batch, self.in_loop = None, False, True
        self.regroup(rank, size)

    def regroup(self, rank, size):
        self.rank, self.size = rank, size

    def topology(self):
        return Topology((Device("cpu:0"),), (1,) * self.size, self.rank)

    def use(self, iterator):
        self.input = iterator

    def collect(self, call):
        return call()

    attempt = collect


@given(
    size=st.integers(1, 4),
    left=st.integers(1, 3),
    rows=st.integers(1, 30),
    size_of_batch=st.integers(1, 8),
    taken=st.integers(0, 5),
    ahead=st.booleans(),
)
def test_each_row_is_in_one_part_although_members_change(
    size, left, rows, size_of_batch, taken, ahead
):
    """Some workers remain after some batches; one of them may have completed the last of these."""
    left = min(size, left)

    def data():
        rows_in_order = nd.Dataset.range(rows).shuffle(rows, seed=1).batch(size_of_batch)
        return nd.get_strategy().distribute_dataset(rows_in_order)

    whole = [np.concatenate(batch.values) for batch in data()]
    sessions = [Session(rank, size) for rank in range(size)]
    iterators = [iter(ElasticBatches(e, data().divided_among(e.topology()))) for e in sessions]
    last = None
    for _ in range(taken):
        last = [next(iterator, None) for iterator in iterators]
    if taken and last[0] is None:
        return
    fast = next(iterators[0], None) if ahead and taken else None
    if ahead and taken and fast is None:
        return
    state = iterators[left - 1].state() if left > 1 or fast is None else None
    if state is None and fast is not None:
        return  # Nobody is behind.
    number = iterators[left - 1].wanted
    for rank in range(left):
        sessions[rank].regroup(rank, left)
        sessions[rank].changes += 1
        iterators[rank].cut_anew(number, state)
    parts = []
    if taken:
        behind = last[1:left] if fast is not None else last[:left]
        if fast is None:
            assert np.array_equal(np.concatenate([b.values[0] for b in behind]), whole[taken - 1])
        else:
            second = [next(iterator) for iterator in iterators[1:left]]
            both = np.concatenate([each.values[0] for each in [fast, *second]])
            assert np.array_equal(both, whole[taken])
    done = taken + (fast is not None)
    for batch in whole[done:]:
        parts = [next(iterator).values[0] for iterator in iterators[:left]]
        assert np.array_equal(np.concatenate(parts), batch)
    assert [next(iterator, None) for iterator in iterators[:left]] == [None] * left
    for iterator in iterators:
        iterator.close()
