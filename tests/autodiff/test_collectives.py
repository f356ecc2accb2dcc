"""Gradients of the collectives: the derivative of the sum of all replicas' targets."""

import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ndistribute.autodiff import GradientTape, Tracked, untrack
from ndistribute.collective.select import make_group
from ndistribute.context import current_frame
from ndistribute.devices import Device
from tests.autodiff.standin import StandInVariable

VALUES = {
    1: [np.array([2.0, -3.0])],
    2: [np.array([2.0, -3.0, 0.0, 5.0]), np.array([7.0, -3.0, 4.0, 0.0])],
    3: [np.array([1.0, 0.0, 2.0]), np.array([3.0, 0.0, 2.0]), np.array([2.0, 5.0, 1.0])],
}


def on_replicas(count, step):
    """Run ``step(communicator)`` on as many threads, and return what each returned."""
    group = make_group([Device(f"cpu:{k}") for k in range(count)])
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(step, group.communicators))


def all_reduce(communicator, op, value):
    """Reduce as `ReplicaContext.all_reduce` does."""
    return current_frame().recorder.all_reduce(communicator, op, value, None)


def all_gather(communicator, value, axis):
    return current_frame().recorder.all_gather(communicator, value, axis, None)


def weights(rank, length):
    """Return how a replica weighs the elements of the result; another way on each."""
    return np.arange(1.0, length + 1) * (rank + 1)


@pytest.mark.parametrize("count", VALUES)
@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "prod"])
def test_all_reduce(op, count):
    values = np.stack(VALUES[count])
    length = values.shape[1]
    reduced = getattr(np, op)(values, axis=0)

    def step(communicator):
        with GradientTape() as tape:
            x = tape.watch(values[communicator.rank].astype(np.float32))
            y = all_reduce(communicator, op, x)
            loss = np.sum(y * weights(communicator.rank, length))
        assert isinstance(y, Tracked)
        return untrack(y), tape.gradient(loss, x)

    total = sum(weights(rank, length) for rank in range(count))
    for rank, (y, gradient) in enumerate(on_replicas(count, step)):
        if op == "prod":
            factor = np.prod(np.delete(values, rank, 0), axis=0)
        elif op in ("min", "max"):  # At a tie, replicas share the gradient.
            factor = (values[rank] == reduced) / (values == reduced).sum(axis=0)
        else:
            factor = 1 if op == "sum" else 1 / count
        np.testing.assert_allclose(y, reduced)
        np.testing.assert_allclose(gradient, total * factor, rtol=1e-6)
        assert y.dtype == gradient.dtype == np.float32


def test_a_nest_is_one_call_in_each_direction():
    """Also where some results are not used on a replica, and others never."""

    def step(communicator):
        variable = StandInVariable(np.float64(communicator.rank))
        with GradientTape() as tape:
            x, unused = tape.watch((np.ones(2), np.ones(3)))
            nest = {"x": [x, 2.0], "plain": np.ones(2), "unused": unused, "v": variable}
            before = communicator.calls_made
            result = all_reduce(communicator, "sum", nest)
            loss = np.sum(result["x"][0]) if communicator.rank else result["v"] * 3
        forward = communicator.calls_made
        gradients = tape.gradient(loss, [x, unused, variable])
        tracked = [isinstance(one, Tracked) for one in (*result["x"], result["plain"], result["v"])]
        calls = forward - before, communicator.calls_made - forward
        return tracked, calls, result["x"][1], [g.tolist() for g in gradients]

    for result in on_replicas(2, step):
        assert result == ([True, False, False, True], (1, 1), 4, [[1, 1], [0, 0, 0], 3])


def test_untracked_values_make_no_entry_and_an_unknown_op_is_refused():
    def step(communicator):
        with GradientTape() as tape:
            x = tape.watch(1.0)
            total = all_reduce(communicator, "sum", {"a": np.ones(2), "b": communicator.rank})
            joined = all_gather(communicator, np.full(1, communicator.rank), 0)
            y = x * total["b"]
            with pytest.raises(ValueError, match="is not a reduction"):
                all_reduce(communicator, "average", x)
        assert not isinstance(total["a"], Tracked)
        assert not isinstance(joined, Tracked)
        made = communicator.calls_made
        tape.gradient(y, x)
        return communicator.calls_made - made

    assert on_replicas(2, step) == [0, 0]


@pytest.mark.parametrize("axis", [0, 1, -1, -2])
def test_all_gather_of_ragged_parts(axis):
    lengths, first = [2, 0, 3], axis in (0, -2)
    mark = np.arange(5.0).reshape((5, 1) if first else (1, 5))

    def step(communicator):
        rank = communicator.rank
        shape = (lengths[rank], 2) if first else (2, lengths[rank])
        with GradientTape() as tape:
            x = tape.watch(np.ones(shape, np.float32))
            y = all_gather(communicator, {"x": x * np.float32(rank + 1)}, axis)["x"]
            loss = np.sum(y * mark * (rank + 1))
        return untrack(y), tape.gradient(loss, x)

    ends = np.cumsum(lengths)
    for rank, (y, gradient) in enumerate(on_replicas(3, step)):
        assert y.shape == ((5, 2) if first else (2, 5))
        part = slice(ends[rank] - lengths[rank], ends[rank])
        whole = np.broadcast_to(mark * 6 * (rank + 1), y.shape)
        np.testing.assert_array_equal(gradient, whole[part] if first else whole[:, part])
        assert gradient.dtype == np.float32


@pytest.mark.parametrize("op", ["max", "prod"])
def test_the_gradient_needs_no_copy_of_all_replicas_arrays_on_each(op):
    count, array = 8, np.ones(50_000)

    def step(communicator):
        with GradientTape() as tape:
            x = tape.watch(array)
            y = all_reduce(communicator, op, x)
        return tape.gradient(y, x)

    tracemalloc.start()
    on_replicas(count, step)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10 * count * array.nbytes
