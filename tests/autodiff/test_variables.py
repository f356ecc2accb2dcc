"""Variables as sources: watching, snapshots, and updates between reads."""

from __future__ import annotations

import numpy as np
import pytest

from ndistribute.autodiff import GradientTape, Tracked
from ndistribute.context import current_frame
from tests.autodiff.standin import StandInVariable, dense


@pytest.fixture
def v():
    return StandInVariable(np.array([1.0, 2.0], np.float32))


def test_a_trainable_variable_is_watched_when_it_is_read(v):
    with GradientTape() as tape:
        y = np.sum(v * v) + v[0]
    assert tape.watched_variables() == [v]
    gradient = tape.gradient(y, v)
    assert gradient.tolist() == [3, 4]
    assert gradient.dtype == np.float32


def test_what_is_not_watched_is_plain():
    frozen = StandInVariable(np.ones(2), trainable=False)
    counter = StandInVariable(np.int64(3))
    with GradientTape() as tape:
        assert not isinstance(frozen * 2, Tracked)
        assert not isinstance(counter + 1, Tracked)
    assert tape.gradient(frozen * 2, [frozen]) == [None]


def test_watching_a_variable_that_is_not_trainable():
    frozen = StandInVariable(np.ones(2), trainable=False)
    with GradientTape() as tape:
        assert tape.watch(frozen) is frozen
        y = frozen * 3
    assert tape.gradient(y, frozen).tolist() == [3, 3]


def test_watching_by_hand(v):
    other = StandInVariable(np.ones(2))
    with GradientTape(watch_accessed_variables=False) as tape:
        tape.watch([other])
        y = v * other
    assert tape.gradient(y, [v, other])[0] is None
    assert tape.watched_variables() == [other]


def test_each_tape_watches_for_itself(v):
    with GradientTape() as eager, GradientTape(watch_accessed_variables=False) as lazy:
        y = v * v
    assert lazy.watched_variables() == []
    assert lazy.gradient(y, v) is None
    assert eager.gradient(y, v).tolist() == [2, 4]


def test_reads_after_an_update_have_their_own_value(v):
    with GradientTape() as tape:
        before = v * v
        v.assign([10.0, 20.0])
        after = v * v
        total = np.sum(before + after)
    assert tape.gradient(total, v).tolist() == [22, 44]


def test_a_gradient_is_right_though_the_variable_was_updated_since(v):
    with GradientTape() as tape:
        y = np.sum(v * v)
    v.assign([0.0, 0.0])
    assert tape.gradient(y, v).tolist() == [2, 4]


@pytest.mark.parametrize("discriminator_first", [True, False])
def test_the_order_of_updates_in_a_gan_does_not_matter(discriminator_first):
    """Both losses are computed before either network is updated, as in TensorFlow's tutorial."""
    g, d = StandInVariable(np.float64(2)), StandInVariable(np.float64(3))
    noise, real = 5.0, 7.0
    with GradientTape() as g_tape, GradientTape() as d_tape:
        fake = noise * g
        g_loss = -fake * d
        d_loss = np.square(fake * d - real * d)

    def step(tape, loss, variable):
        variable.assign(variable.array - tape.gradient(loss, variable))

    updates = [(d_tape, d_loss, d), (g_tape, g_loss, g)]
    for update in updates if discriminator_first else updates[::-1]:
        step(*update)
    assert g.array == 2 + 15
    assert d.array == 3 - 2 * 9 * 3


def test_the_gradient_of_a_variable_itself(v):
    with GradientTape(persistent=True) as tape:
        v * 2
        assert tape.gradient(v, v).tolist() == [1, 1]
    assert tape.gradient([v, v], v).tolist() == [2, 2]


def test_a_new_variable_at_an_old_address_is_another_source():
    with GradientTape() as tape:
        total = 0.0
        for k in range(20):
            total = total + StandInVariable(np.float64(k)) * 2
    assert len(tape.watched_variables()) == 20
    assert [float(g) for g in tape.gradient(total, tape.watched_variables())] == [2] * 20


@pytest.mark.parametrize(
    "index", [[3, 1, 3], np.array([[0], [3]]), -2, slice(1, 3), (slice(1, 3), 0), np.arange(4) > 1]
)
def test_a_part_that_is_read_alone_has_the_gradient_of_a_part_of_the_whole(index):
    v = StandInVariable(np.arange(8.0).reshape(4, 2))
    with GradientTape() as expected:
        loss = np.sum(v[index] ** 2)
    with GradientTape() as tape:
        part = current_frame().recorder.read_part(v, index, v.array[index])
        again = np.sum(part**2)
    wanted, got = expected.gradient(loss, v), tape.gradient(again, v)
    assert type(got) is type(wanted)
    assert np.array_equal(dense(got), dense(wanted))


def test_a_part_and_the_whole_of_a_variable_add_up():
    v = StandInVariable(np.arange(8.0).reshape(4, 2))
    with GradientTape() as tape:
        part = current_frame().recorder.read_part(v, [3, 3], v.array[[3, 3]])
        loss = np.sum(part) + np.sum(v[1]) + 10 * np.sum(v)
    assert tape.gradient(loss, v).tolist() == [[10, 10], [11, 11], [10, 10], [12, 12]]


def test_a_part_of_what_no_tape_watches_stays_plain():
    v = StandInVariable(np.arange(3.0), trainable=False)
    with GradientTape():
        part = current_frame().recorder.read_part(v, [1], v.array[[1]])
    assert type(part) is np.ndarray
