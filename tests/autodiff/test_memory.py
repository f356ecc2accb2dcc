"""What was recorded goes away with the gradient, so that variables can be updated in place."""

from __future__ import annotations

import gc
import sys
import weakref

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


def references(v):
    """Count here and not in an assert, whose rewriting holds a reference of its own."""
    return sys.getrefcount(v.array)


def network(v, x):
    h = np.maximum(x @ v + v[0], 0.1)
    h = np.concatenate([h, h * v], axis=0).reshape(-1, 2).T
    parts = np.split(h, 2, axis=1)
    return np.log(np.sum(np.exp(parts[0] @ v), axis=1)).mean() + np.linalg.norm(v.tracked_value())


def test_after_the_gradient_no_snapshot_is_held():
    v = Reader(np.array([[1.0, 2.0], [3.0, 4.0]]))
    before = references(v)
    with GradientTape() as tape:
        loss = network(v, np.ones((2, 2)))
    during = references(v)
    gradient = tape.gradient(loss, v)
    assert during > before
    assert references(v) == before
    assert gradient.shape == (2, 2)
    assert loss.shape == ()


def test_results_that_the_user_keeps_hold_no_snapshot():
    v = Reader(np.ones((2, 2)))
    before = references(v)
    with GradientTape() as tape:
        kept = np.exp(v * 2)
        loss = np.sum(kept * v)
    tape.gradient(loss, v)
    assert references(v) == before
    assert kept.shape == (2, 2)


def test_a_persistent_tape_holds_on_until_it_goes():
    v = Reader(np.ones((2, 2)))
    before = references(v)
    with GradientTape(persistent=True) as tape:
        loss = np.sum(v * v)
    tape.gradient(loss, v)
    assert references(v) > before
    del tape
    assert references(v) == before
    assert loss.shape == ()


def test_a_tape_that_was_never_asked_lets_go():
    v = Reader(np.ones((2, 2)))
    before = references(v)
    with GradientTape() as tape:
        loss = np.sum(v * v)
    del tape
    assert references(v) == before
    assert loss.shape == ()


def test_of_two_tapes_the_last_one_lets_go():
    v = Reader(np.ones((2, 2)))
    before = references(v)
    with GradientTape() as first, GradientTape() as second:
        loss = np.sum(v * v)
    first.gradient(loss, v)
    assert references(v) > before
    second.gradient(loss, v)
    assert references(v) == before


def test_variables_are_not_kept_alive():
    v = StandInVariable(np.ones(2))
    gone = weakref.ref(v)
    with GradientTape() as tape:
        loss = np.sum(v * v)
    tape.gradient(loss, v)
    del v, tape
    assert gone() is None
    assert loss.shape == ()


def test_an_error_in_a_rule_does_not_hold_snapshots():
    v = Reader(np.ones((2, 2)))
    before = references(v)
    with GradientTape() as tape:
        loss = np.sum(np.unique(v * v))
    with pytest.raises(TypeError, match="unique"):
        tape.gradient(loss, v)
    del tape
    assert references(v) == before


def test_entries_are_freed_while_the_walk_goes_on():
    alive = []

    @custom_gradient
    def watched(x):
        def backward(gradient):
            alive.append(gone())
            return 2.0 * gradient

        return x * 2.0, [backward]

    v = StandInVariable(np.ones(2))
    w = StandInVariable(np.ones(2))
    with GradientTape() as tape:
        h = watched(v)
        intermediate = (h * w).value
        loss = np.sum(np.exp(h * w) * 1.0)
    gone = weakref.ref(intermediate)
    del intermediate, h
    tape.gradient(loss, [v, w])
    assert alive == [None]


def test_a_graph_that_is_closed_does_not_grow():
    with GradientTape() as tape:
        x = tape.watch(np.ones(2))
        y = x * 2
    for _ in range(10):
        y = y * 2
    assert type(y) is np.ndarray


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
def test_a_fresh_gradient_is_handed_over_without_a_copy(joint):
    made = []

    @custom_gradient
    def double(x):
        def rule(g):
            fresh = g * 2
            made.append(fresh.ctypes.data)
            return fresh

        return x * 2, (lambda g: [rule(g)]) if joint else [rule]

    with GradientTape() as tape:
        x = tape.watch(np.ones(2))
        y = double(x)
    assert tape.gradient(y, x).ctypes.data == made[0]


def test_contributions_are_added_in_place():
    made = []

    @custom_gradient
    def double(x):
        def rule(g):
            fresh = g * 2
            made.append(fresh.ctypes.data)
            return fresh

        return x * 2, [rule]

    with GradientTape() as tape:
        x = tape.watch(np.ones(2))
        y = double(x) + double(x) + x[:1] + double(x)
    gradient = tape.gradient(y, x)
    assert gradient.tolist() == [8, 6]
    assert gradient.ctypes.data == made[0]
