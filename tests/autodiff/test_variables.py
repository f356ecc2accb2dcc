"""Variables as sources: watching, snapshots, updates between reads, and rows of tables."""

import numpy as np
import pytest

from ndistribute.autodiff import GradientTape, Tracked
from ndistribute.indexed_slices import IndexedSlices
from tests.autodiff.standin import StandInVariable, dense


@pytest.fixture
def v():
    return StandInVariable(np.array([1.0, 2.0], np.float32))


def test_a_trainable_variable_is_watched_when_it_is_read(v):
    frozen, counter = StandInVariable(np.ones(2), trainable=False), StandInVariable(np.int64(3))
    with GradientTape() as tape:
        y = np.sum(v * v) + v[0]
        assert not isinstance(frozen * 2, Tracked)
        assert not isinstance(counter + 1, Tracked)
    assert tape.watched_variables() == [v]
    gradient, nothing = tape.gradient(y, [v, frozen])
    assert (gradient.tolist(), gradient.dtype, nothing) == ([3, 4], np.float32, None)


def test_watching_by_hand(v):
    frozen = StandInVariable(np.ones(2), trainable=False)
    with GradientTape() as eager, GradientTape(watch_accessed_variables=False) as lazy:
        assert lazy.watch(frozen) is frozen
        y = v * frozen
    assert lazy.watched_variables() == [frozen]
    assert [None if g is None else g.tolist() for g in lazy.gradient(y, [v, frozen])] == [
        None,
        [1, 2],
    ]
    assert eager.gradient(y, v).tolist() == [1, 1]


def test_each_read_has_its_own_value_though_the_variable_is_updated(v):
    with GradientTape() as tape:
        before = v * v
        v.assign([10.0, 20.0])
        total = np.sum(before + v * v)
    v.assign([0.0, 0.0])
    assert tape.gradient(total, v).tolist() == [22, 44]


@pytest.mark.parametrize("discriminator_first", [True, False])
def test_the_order_of_updates_in_a_gan_does_not_matter(discriminator_first):
    """Both losses are computed before either network is updated, as in TensorFlow's tutorial."""
    g, d = StandInVariable(np.float64(2)), StandInVariable(np.float64(3))
    with GradientTape() as g_tape, GradientTape() as d_tape:
        fake = 5.0 * g
        g_loss = -fake * d
        d_loss = np.square(fake * d - 7.0 * d)
    updates = [(d_tape, d_loss, d), (g_tape, g_loss, g)]
    for tape, loss, variable in updates if discriminator_first else updates[::-1]:
        variable.assign(variable.array - tape.gradient(loss, variable))
    assert g.array == 2 + 15
    assert d.array == 3 - 2 * 9 * 3


def test_a_new_variable_at_an_old_address_is_another_source():
    with GradientTape() as tape:
        total = sum(StandInVariable(np.float64(k)) * 2 for k in range(20))
    assert len(tape.watched_variables()) == 20
    assert [float(g) for g in tape.gradient(total, tape.watched_variables())] == [2] * 20


def lookup(table, *look):
    """Return the gradient of the sum of what `look` makes of a variable."""
    variable = StandInVariable(table)
    with GradientTape() as tape:
        total = np.sum(sum(np.sum(one(variable)) for one in look))
    return tape.gradient(total, variable)


@pytest.mark.parametrize(
    "look",
    [
        lambda v: v[np.array([3, -1, 0])],
        lambda v: v[[3, -1, 0]],
        lambda v: np.take(v, [3, -1, 0], axis=0),
        lambda v: v.tracked_value().take(np.array([3, -1, 0]), 0),
    ],
)
def test_rows_of_a_variable_stay_rows(look):
    rows = lookup(np.ones((5, 2), np.float32), look)
    assert isinstance(rows, IndexedSlices)
    assert rows.indices.tolist() == [3, 4, 0]
    assert rows.values.tolist() == [[1, 1]] * 3
    assert (rows.dense_shape, rows.dtype) == ((5, 2), np.float32)
    assert dense(lookup(np.ones((5, 0)), look)).shape == (5, 0)


def test_several_look_ups_are_joined_in_reverse_order():
    rows = lookup(np.ones((5, 2)), lambda v: v[[0, 1]], lambda v: v[[[4], [0]]] * 2.0)
    assert isinstance(rows, IndexedSlices)
    assert rows.indices.tolist() == [4, 0, 0, 1]
    assert rows.to_dense().tolist() == [[3, 3], [1, 1], [0, 0], [0, 0], [2, 2]]


@pytest.mark.parametrize(
    ("uses", "expected"),
    [
        ((lambda v: v * 3.0, lambda v: v[np.array([1, 1])]), [3, 5, 3]),
        ((lambda v: v[[1, 1]], lambda v: v[:1]), [1, 2, 0]),
        ((lambda v: v[[1, 1]], lambda v: v[[1, 1]], lambda v: 10 * v), [10, 14, 10]),
        ((lambda v: (v * 2.0)[np.array([1, 1])],), [0, 4, 0]),
    ],
)
def test_rows_beside_another_use_are_dense(uses, expected):
    for order in (uses, uses[::-1]):
        assert lookup(np.ones((3, 1)), *order).reshape(-1).tolist() == expected


def test_rows_belong_to_the_caller():
    indices, seed = np.array([0, 1]), np.ones((2, 2))
    variable = StandInVariable(np.ones((3, 2)))
    with GradientTape() as tape:
        picked = variable[indices]
    rows, again = tape.gradient(picked, [variable, variable], output_gradients=seed)
    assert not np.shares_memory(rows.indices, indices)
    assert not np.shares_memory(rows.values, seed)
    assert not np.shares_memory(rows.values, again.values)
