"""What was recorded goes away with the gradient, so that variables can be updated in place."""

import gc
import sys
import tracemalloc
import weakref
from contextlib import contextmanager

import numpy as np
import pytest

from ndistribute.autodiff import GradientTape, custom_gradient
from ndistribute.context import current_frame
from tests.autodiff.standin import StandInVariable


@pytest.fixture(autouse=True)
def without_collector():
    """References must go by counting; a cycle would keep snapshots until the collector runs."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Reader(StandInVariable):
    """Hand out the array itself, so that its references count the reads that are kept."""

    def tracked_value(self):
        recorder = current_frame().recorder
        return self.array if recorder is None else recorder.read(self, self.array)


@pytest.fixture
def v():
    return Reader(np.array([[1.0, 2.0], [3.0, 4.0]]))


def references(v):
    """Count here and not in an assert, whose rewriting holds a reference of its own."""
    return sys.getrefcount(v.array)


@contextmanager
def unchanged_references(v):
    before = references(v)
    yield before
    assert references(v) == before


def network(v, x):
    h = np.maximum(x @ v + v[0], 0.1)
    h = np.concatenate([h, h * v], axis=0).reshape(-1, 2).T
    parts = np.split(h, 2, axis=1)
    return np.log(np.sum(np.exp(parts[0] @ v), axis=1)).mean() + np.linalg.norm(v.tracked_value())


def test_after_the_gradient_no_snapshot_is_held(v):
    with unchanged_references(v) as before:
        with GradientTape() as tape:
            kept = np.exp(v * 2)
            loss = network(v, np.ones((2, 2))) + np.sum(kept * v)
        assert references(v) > before
        gradient = tape.gradient(loss, v)
    assert gradient.shape == kept.shape == (2, 2)


@pytest.mark.parametrize("asked", [True, False])
def test_a_deleted_tape_releases_the_variable(v, asked):
    with unchanged_references(v) as before:
        with GradientTape(persistent=True) as tape:
            loss = np.sum(v * v)
        if asked:
            tape.gradient(loss, v)
        assert references(v) > before
        del tape
    assert loss.shape == ()


def test_the_last_of_two_tapes_releases_the_variable(v):
    with unchanged_references(v) as before:
        with GradientTape() as first, GradientTape() as second:
            loss = np.sum(v * v)
        first.gradient(loss, v)
        assert references(v) > before
        second.gradient(loss, v)


def test_variables_are_not_kept_alive():
    v = StandInVariable(np.ones(2))
    gone = weakref.ref(v)
    with GradientTape() as tape:
        loss = np.sum(v * v)
    tape.gradient(loss, v)
    del v, tape
    assert gone() is None
    assert loss.shape == ()


def test_an_error_in_a_rule_does_not_hold_snapshots(v):
    with unchanged_references(v):
        with GradientTape() as tape:
            loss = np.sum(np.unique(v * v))
        with pytest.raises(TypeError, match="unique"):
            tape.gradient(loss, v)
        del tape


def test_entries_are_freed_while_the_walk_goes_on():
    alive = []

    @custom_gradient
    def watched(x):
        def backward(gradient):
            alive.append(gone())
            return 2.0 * gradient

        return x * 2.0, [backward]

    v, w = StandInVariable(np.ones(2)), StandInVariable(np.ones(2))
    with GradientTape() as tape:
        h = watched(v)
        intermediate = (h * w).value
        loss = np.sum(np.exp(h * w) * 1.0)
    gone = weakref.ref(intermediate)
    del intermediate, h
    tape.gradient(loss, [v, w])
    assert alive == [None]


def test_a_rule_may_keep_what_it_returns():
    """A fused loss computes its gradient on the way forward."""
    kept = np.array([2.0, 3.0])

    @custom_gradient
    def loss_of(x):
        return np.sum(kept * x), [lambda g: kept]

    with GradientTape(persistent=True) as tape:
        x = tape.watch(np.ones(2))
        loss = loss_of(x) + loss_of(x) + loss_of(x)
        once = loss_of(x)
    for _ in range(2):
        assert tape.gradient(loss, x).tolist() == [6, 9]
        gradient = tape.gradient(once, x)
        gradient += 1
        assert kept.tolist() == [2, 3]


@pytest.mark.parametrize("joint", [True, False])
def test_fresh_gradients_are_handed_over_and_added_without_a_copy(joint):
    made = []

    @custom_gradient
    def double(x):
        def rule(g):
            fresh = g * 2
            made.append(fresh.ctypes.data)
            return fresh

        return x * 2, (lambda g: [rule(g)]) if joint else [rule]

    with GradientTape(persistent=True) as tape:
        x = tape.watch(np.ones(2))
        y = double(x)
        total = double(x) + double(x) + x[:1] + double(x)
    assert tape.gradient(y, x).ctypes.data == made.pop()
    gradient = tape.gradient(total, x)
    assert gradient.tolist() == [8, 6]
    assert gradient.ctypes.data == made[0]


@pytest.mark.parametrize(
    ("function", "shape"), [(np.trace, (400, 400)), (np.diagonal, (400, 400)), (np.diag, (400,))]
)
def test_the_gradient_of_a_diagonal_makes_no_index_of_the_whole_matrix(function, shape):
    with GradientTape() as tape:
        x = tape.watch(np.ones(shape, np.float32))
        result = function(x)
    tracemalloc.start()
    tape.gradient(result, x)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.5 * 400 * 400 * 4  # One matrix of float32, of the gradient.
