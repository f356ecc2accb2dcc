"""Functions of TensorFlow 1 give the values and dtypes that TensorFlow gives."""

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.compat import tf1 as tf
from tests.compat.test_layers import run

pytestmark = pytest.mark.usefixtures("empty_graph")
f32 = np.float32
GRID = np.arange(12, dtype=f32).reshape(3, 4)


def test_the_gradient_of_sigmoid_cross_entropy_is_right_at_zero() -> None:
    z, labels = tf.placeholder(tf.float32, [4]), f32([0, 1, 0.5, 0])
    logits = f32([0, 0, 0, 3])
    loss = tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=z)
    found, slope = run([loss, tf.gradients(loss, z)[0]], {z: logits})
    shares = 1 / (1 + np.exp(-logits))
    np.testing.assert_allclose(slope, shares - labels, atol=1e-7)
    expected = -labels * np.log(shares) - (1 - labels) * np.log(1 - shares)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    extreme = run(
        tf.nn.sigmoid_cross_entropy_with_logits(labels=f32([1, 0]), logits=f32([3e38] * 2))
    )
    np.testing.assert_array_equal(extreme, f32([0, 3e38]))
    with nd.GradientTape() as tape:
        watched = tape.watch(np.zeros(2))
        whole = nd.losses.binary_crossentropy(np.array([0.0, 1.0]), watched, from_logits=True)
    np.testing.assert_allclose(tape.gradient(whole, watched), [0.25, -0.25])


def test_slice_and_where() -> None:
    x = tf.placeholder(tf.float32, [None, 4])
    mask = tf.placeholder(tf.bool, [None])
    part = tf.slice(x, [0, 1], tf.stack([tf.shape(x)[0] - 1, -1]))
    rows = tf.where(mask, x, -x)
    places = tf.where(mask)
    found = run([part, rows, places], {x: GRID, mask: [True, False, True]})
    np.testing.assert_array_equal(found[0], GRID[:2, 1:])
    np.testing.assert_array_equal(found[1], GRID * f32([[1], [-1], [1]]))
    np.testing.assert_array_equal(found[2], [[0], [2]])
    assert places.shape == (None, 1)


def test_a_network_that_diverged_is_not_right() -> None:
    scores = f32([[1, np.nan, 0], [np.inf, 2, 2], [3, 0, 1], [3, 0, 1], [3, 0, 1]])
    found = run(tf.nn.in_top_k(tf.constant(scores), [1, 0, 0, 2, 7], 1))
    assert found.tolist() == [False, False, True, False, False]


def test_losses_take_axes_weights_and_smoothing() -> None:
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(2, 3, 4)), rng.dirichlet(np.ones(3), (2, 4))
    labels = np.moveaxis(labels, -1, 1)
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    loss = tf.nn.softmax_cross_entropy_with_logits_v2(labels=labels, logits=logits, axis=1)
    np.testing.assert_allclose(run(loss), -(labels * np.log(shares)).sum(1))
    x, y = f32([[1.0], [2.0], [4.0]]), f32([[1.0], [1.0], [1.0]])
    weighted = tf.losses.mean_squared_error(y, x, weights=f32([[5.0], [2.0], [0.0]]))
    smooth = tf.losses.sigmoid_cross_entropy(y, x, label_smoothing=0.2, loss_collection=None)
    plain = tf.losses.sigmoid_cross_entropy(0.9 * y, x)
    bent = tf.losses.huber_loss(y, x, 1.0, 2.0), tf.losses.absolute_difference(y, x)
    found = run([weighted, smooth, plain, tf.losses.get_regularization_loss(), *bent])
    assert found[4:] == [pytest.approx((0 + 0.5 + 4) / 3), pytest.approx(4 / 3)]
    assert found[0] == pytest.approx((5 * 0 + 2 * 1) / 2)
    assert found[1] == pytest.approx(found[2])
    assert found[3] == 0.0
    assert len(tf.get_collection(tf.GraphKeys.LOSSES)) == 4


def test_labels_have_gradients_but_in_the_first_generation() -> None:
    labels, logits = tf.Variable(f32([[0.5, 0.5]])), tf.Variable(f32([[1.0, 0.0]]))
    new = tf.nn.softmax_cross_entropy_with_logits_v2(labels=labels, logits=logits)
    old = tf.nn.softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    logs = np.log(np.exp([1.0, 0.0]).sum()) - np.array([1.0, 0.0])
    np.testing.assert_allclose(run(tf.gradients(new, labels)[0]), [logs], rtol=1e-6)
    assert tf.gradients(old, labels) == [None]


def test_numbers_keep_the_dtypes_of_tensorflow() -> None:
    x = tf.placeholder(tf.float32, [None])
    count = tf.Variable(2**40, name="count")
    fetches = [
        tf.multiply(x, 2),
        tf.add(x, [1.0, 2.0]),
        tf.constant(2**40),
        tf.reduce_mean(tf.constant([1, 2, 4])),
        tf.shape(tf.constant(1.0)),
        count,
    ]
    found = run(fetches, {x: [1, 2]})
    assert [one.dtype for one in found] == ["f4", "f4", "i8", "i4", "i8", "i8"]
    assert (found[2], found[3], found[5]) == (2**40, 2, 2**40)
    assert run(tf.constant([-(2**63), 0])).tolist() == [-(2**63), 0]
    assert {found[5]: "a key"}[2**40] == "a key"  # A number, not an array.


def test_lengths_may_be_tensors() -> None:
    x = tf.placeholder(tf.float32, [None, 4])
    n = tf.shape(x)[0]
    fetches = [
        tf.zeros([n, 2]),
        tf.ones(tf.shape(x), tf.int32),
        tf.fill([n, 2], 0.5),
        tf.range(n),
        tf.range(1, n + 4, 2),
        tf.random_normal([n, 3], mean=x[0, 3]),
        tf.random_uniform([100], 0, n, tf.int32),
        tf.nn.dropout(x + 1, 0.5, noise_shape=[n, 1]),
    ]
    found = run(fetches, {x: GRID})
    assert [one.shape for one in found[:6]] == [(3, 2), (3, 4), (3, 2), (3,), (3,), (3, 3)]
    assert found[1].dtype == np.int32
    assert (found[3].tolist(), found[4].tolist()) == ([0, 1, 2], [1, 3, 5])
    assert abs(found[5] - 3).max() < 6
    assert set(found[6].tolist()) == {0, 1, 2}
    assert all(np.all(row) or not np.any(row) for row in found[7])
    unknown = tf.reshape(tf.placeholder(tf.float32), [-1, 28, 28, 1])
    assert unknown.get_shape().as_list() == [None, 28, 28, 1]
    assert tf.zeros([3, 2]).get_shape().as_list() == [3, 2]


def test_more_arguments_of_the_first_generation_count() -> None:
    x = tf.constant(GRID)
    flags = tf.placeholder(tf.bool, [])
    v = tf.Variable(0.0)
    change = tf.cond(flags, fn1=lambda: tf.group(v.assign_add(1.0)), fn2=tf.no_op)
    loop = tf.while_loop(
        cond=lambda i: i < 3, body=lambda i: [i + 1], loop_vars=[0], back_prop=False
    )
    fetches = [
        tf.cumsum(x, 1, exclusive=True, reverse=True),
        tf.one_hot(tf.constant([0, 2]), 3, on_value=5.0, off_value=-1.0, axis=0),
        tf.norm(x, ord=1),
        tf.reduce_sum(x, axis=range(2)),
        tf.nn.swish(x),
        tf.reduce_logsumexp(x, 1),
        tf.py_func(lambda: [GRID], [], [tf.float32])[0],
        loop[0],
        tf.get_variable("bias", 3, initializer=tf.constant_initializer([1.0, 2.0, 3.0])),
    ]
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        found = session.run(fetches)
        session.run(change, {flags: True})
        session.run(change, {flags: False})
        assert session.run(v) == 1.0
    reverse = np.flip(np.cumsum(np.flip(GRID, 1), 1), 1) - GRID
    np.testing.assert_array_equal(found[0], reverse)
    np.testing.assert_array_equal(found[1], [[5, -1], [-1, -1], [-1, 5]])
    assert (found[2], found[3]) == (GRID.sum(), GRID.sum())
    np.testing.assert_allclose(found[4], GRID / (1 + np.exp(-GRID)), rtol=1e-6)
    np.testing.assert_allclose(found[5], np.log(np.exp(GRID).sum(1)), rtol=1e-6)
    np.testing.assert_array_equal(found[6], GRID)
    assert (found[7], found[8].tolist()) == (3, [1.0, 2.0, 3.0])


def test_the_average_of_a_tensor_begins_at_zero() -> None:
    loss = tf.constant(4.0)
    averages = tf.train.ExponentialMovingAverage(0.9)
    update = averages.apply([loss])
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(update)
        assert session.run(averages.average(loss)) == pytest.approx(0.4)


def test_gradients_of_a_table_are_clipped_by_their_rows() -> None:
    ids, table = tf.placeholder(tf.int64, [None]), tf.Variable(np.zeros((4, 2)))
    loss = tf.reduce_sum(tf.nn.embedding_lookup(table, ids) * np.array([3.0, 4.0]))
    clipped, norm = tf.clip_by_global_norm(tf.gradients(loss, [table]), 1.0)
    x = tf.constant([3.0, 4.0])
    through = tf.gradients(tf.clip_by_global_norm([x], 10.0)[0][0], x)[0]
    infinite = tf.clip_by_global_norm([x, tf.constant([np.inf])], 1.0)[0]
    rows, found, slope, infinite = run([clipped[0], norm, through, infinite], {ids: [1, 1, 3]})
    assert found == pytest.approx(np.sqrt(3 * 25.0))
    np.testing.assert_allclose(rows.to_dense() * found, [[0, 0], [6, 8], [0, 0], [3, 4]])
    np.testing.assert_allclose(slope, 1.0)
    assert all(np.isnan(part).all() for part in infinite)


def test_rows_of_a_gradient_are_an_array_for_other_operations() -> None:
    table = tf.Variable(np.ones((4, 2), np.float32))
    taken = tf.nn.embedding_lookup(table, tf.constant([1, 1, 3]))
    rows = tf.gradients(tf.reduce_sum(taken * taken), [table])[0]
    whole = np.array([[0, 0], [4, 4], [0, 0], [2, 2]], np.float32)
    fetches = [rows * 0.5, tf.square(rows), tf.nn.l2_loss(rows), tf.zeros_like(rows), rows[1]]
    expected = [whole / 2, whole**2, np.sum(whole**2) / 2, 0 * whole, whole[1]]
    *values, histogram = run([*fetches, tf.summary.histogram("gradient", rows)])
    for value, other in zip(values, expected, strict=True):
        np.testing.assert_array_equal(value, other)
    assert histogram


def test_the_orders_of_arguments_before_the_first_version_are_known() -> None:
    x, labels = tf.constant(GRID), tf.constant([0, 1, 2])
    new = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=x)
    old = tf.nn.sparse_softmax_cross_entropy_with_logits(x, labels)
    parts = tf.split(0, 3, x) + tf.split(x, 3) + tf.split(x, [1, 3], 1)
    found = run([tf.concat(1, [x, x]), tf.concat([x, x], 1), new, old, parts])
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[2], found[3])
    assert [part.shape for part in found[4]] == [(1, 4)] * 6 + [(3, 1), (3, 3)]


def test_losses_do_not_broadcast_labels() -> None:
    logits, numbers = tf.constant([[2.0, 0.0, 1.0], [0.0, 3.0, 1.0]]), tf.constant([0, 1])
    column = tf.losses.sparse_softmax_cross_entropy(tf.reshape(numbers, [2, 1]), logits)
    flat = tf.losses.sparse_softmax_cross_entropy(numbers, logits)
    assert run([column, flat]) == [pytest.approx(0.2887, abs=1e-4)] * 2
    for loss in tf.losses.mean_squared_error, tf.losses.sigmoid_cross_entropy:
        with pytest.raises(ValueError, match="reshape one of them"):
            loss(tf.constant([1.0, 2.0]), tf.constant([[1.0], [2.0]]))


def test_a_dataset_gives_its_batches_to_the_steps() -> None:
    dataset = tf.data.Dataset.from_tensor_slices(([1.0, 2.0, 3.0], [0, 1, 0])).batch(2)
    x, y = dataset.make_one_shot_iterator().get_next()
    total = tf.reduce_sum(x) + tf.to_float(tf.reduce_max(y))
    iterator = tf.compat.v1.data.make_initializable_iterator(dataset.map(lambda x, y: x))
    later = iterator.get_next()
    with tf.Session() as session:
        session.run(iterator.initializer)
        assert [session.run(fetch) for fetch in (total, total)] == [4.0, 3.0]
        assert session.run(later).tolist() == [1.0, 2.0]
        with pytest.raises(tf.errors.OutOfRangeError):
            session.run(total)
