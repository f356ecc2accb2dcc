"""A read is a snapshot that never changes; an update is in place when nobody holds one."""

import gc
import re
import tracemalloc
import warnings

import numpy as np
import pytest

import ndistribute as nd
from ndistribute import ownership
from ndistribute.collective.communicator import SMALL_BYTES, Outputs
from ndistribute.parameter_server.stored_variables import Cell
from ndistribute.variables.served import ServedVariable
from tests.kinds import host_memory, mirrored, plain_step, rank

START = np.arange(12.0).reshape(3, 4)
UPDATES = {
    "assign": lambda v: v.assign(np.full(v.shape, 9.0)),
    "assign_add": lambda v: v.assign_add(np.ones(v.shape)),
    "assign_sub": lambda v: v.assign_sub(np.ones(v.shape)),
    "scatter_add": lambda v: v.scatter_add([0, 1], np.ones((2, *v.shape[1:]))),
    "scatter_update": lambda v: v.scatter_update([1], np.ones((1, *v.shape[1:]))),
}
VIEWS = """
v.read_value(); np.asarray(v); v[0]; v.T; np.broadcast_to(v, (3, *v.shape)); v.view(np.int64)
np.lib.stride_tricks.as_strided(v.read_value(), (2,), (8,)); np.asarray(memoryview(v.read_value()))
np.frombuffer(v.read_value()); next(iter(v)); list(v)
"""


def make(strategy, initial=START, **kwargs):
    with strategy.scope():
        return nd.Variable(initial, **kwargs)


def is_at(v, place):
    """Say whether a variable is where it was; one of a server comes from there anew."""
    return isinstance(v, ServedVariable) or address(v) == place


def address(v):
    """Return where the first component is; a read outside replicas may be computed from several."""
    return v.distribute_strategy.local_results(v)[0].__array_interface__["data"][0]


@pytest.mark.parametrize("how", ["on_write", "on_read"])
@host_memory("it compares addresses")
def test_a_held_read_never_changes_and_without_one_updates_are_in_place(strategy, how):
    v = make(strategy, synchronization=how, aggregation="only_first_replica")
    place = address(v)
    float(np.sum(v) + v[0, 0])
    for update in [*UPDATES.values()] * 2:
        update(v)
        assert is_at(v, place)
    held = []
    for update in [*UPDATES.values()] * 2:
        held.append((v.read_value(), strategy.local_results(v), v.numpy()))
        update(v)
    for snapshot, components, then in held:
        assert all(np.array_equal(part, then) for part in (snapshot, *components))
        assert not any(part.flags.writeable for part in (snapshot, *components))


@pytest.mark.parametrize("view", re.split(r"; |\n", VIEWS.strip()))
def test_a_held_view_of_a_read_never_changes_and_is_read_only(view):
    for update in UPDATES.values():
        v = make(nd.get_strategy())
        snapshot = eval(view, {"np": np, "v": v})
        then = np.array(snapshot)
        for _ in range(2):
            update(v)
            assert np.array_equal(snapshot, then)
        assert not np.array_equal(v, START)
        if view != "list(v)":
            with pytest.raises(ValueError, match="read-only"):
                snapshot[...] = 0


def test_a_reader_can_not_spoil_it_for_others():
    v = make(nd.get_strategy())
    mine, theirs = v.read_value(), v.read_value()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy is about to take this away.
        mine.shape = (12,)
    assert theirs.shape == v.read_value().shape == (3, 4)
    mine.setflags(write=True)
    assert not theirs.flags.writeable
    assert not v.read_value().flags.writeable


def test_an_update_goes_elsewhere_while_a_read_is_held_and_stays_there():
    v = make(nd.get_strategy())
    place = address(v)
    held = v[1:]
    v.assign_add(np.ones((3, 4)))
    moved = address(v)
    assert moved != place
    v.assign_add(np.ones((3, 4)))
    assert address(v) == moved  # The read holds the array that was left, not this one.
    del held
    held = v[1:]
    v.scatter_update([1], np.zeros((1, 4)))
    assert np.array_equal(v[[0, 2]], START[[0, 2]] + 2)
    assert held.all()


@host_memory("it compares addresses")
@plain_step("it compares addresses")
def test_updates_in_replicas_are_in_place_but_for_who_holds_a_read(strategy):
    def step(v):
        float(np.sum(v * v))
        v.assign_sub(0.1 * np.ones(v.shape))
        v.scatter_add([rank() % 3], np.ones((1, 4)))
        v.assign(START)

    def hold(v):
        held = v.read_value() if rank() == strategy.num_replicas_in_sync - 1 else None
        v.assign_add(np.ones(v.shape))
        return held is None or bool(np.array_equal(held, START))

    for aggregation in ("sum", "mean", "only_first_replica"):
        v = make(strategy, aggregation=aggregation)
        place = address(v)
        for _ in range(3):
            strategy.run(step, (v,))
            assert is_at(v, place)
        v.assign(START)
        assert all(strategy.run(hold, (v,)).values)


@host_memory("it compares addresses")
def test_numpy_is_a_copy_that_the_caller_owns(strategy):
    for how in ("on_write", "on_read"):
        v = make(strategy, [1.0, 2.0], synchronization=how, aggregation="mean")
        place = address(v)
        own = v.numpy()
        assert np.array(v).flags.owndata
        assert own.flags.writeable
        assert own.flags.owndata
        own[:] = 7
        assert np.array_equal(v, [1, 2])
        v.assign_add([1.0, 1.0])
        assert own.tolist() == [7, 7]
        if how == "on_write":
            assert is_at(v, place)


@host_memory("it computes with what lies on another GPU than the current one")
def test_a_variable_may_be_assigned_its_own_parts(strategy):
    v = make(strategy, [1.0, 2.0, 3.0])
    v.assign(v[::-1])
    assert v.numpy().tolist() == [3, 2, 1]
    v.assign_add(v.read_value()[::-1])
    assert v.numpy().tolist() == [4, 4, 4]
    v.scatter_update([0, 1], v[1:] * 2)
    assert v.numpy().tolist() == [8, 8, 4]


def test_a_training_step_allocates_nothing_for_its_variables():
    size = 400_000  # 3.2 MB each; reductions work in blocks of 128 KiB.
    with mirrored(2) as strategy:
        weights = [make(strategy, np.zeros(size)) for _ in range(3)]
        optimizer = nd.optimizers.SGD(0.1, momentum=0.9)
        gradients = [np.ones(size) for _ in weights]

        def step():
            optimizer.apply_gradients(zip(gradients, weights, strict=True))

        strategy.run(step)
        places = [address(w) for w in weights]
        gc.collect()
        tracemalloc.start()
        try:
            for _ in range(3):
                strategy.run(step)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert [address(w) for w in weights] == places
        assert peak < 8 * size


LARGE = np.zeros(SMALL_BYTES)


def test_this_interpreter_counts_references():
    assert ownership._UNSHARED is not None


def test_where_references_are_not_counted_everything_is_copied(monkeypatch):
    monkeypatch.setattr(ownership, "_UNSHARED", None)
    mirrored, outputs, served = nd.Variable([1.0, 2.0]), Outputs(), Cell(np.zeros(2), 1)

    def arrays():
        return mirrored._cells[0].array, outputs.like([LARGE])[0], served.array

    before = arrays()
    mirrored.assign_add([1.0, 1.0])
    served.open()
    assert all(a is not b for a, b in zip(before, arrays(), strict=True))
    assert mirrored.numpy().tolist() == [2, 3]
