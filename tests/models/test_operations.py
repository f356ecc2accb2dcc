"""Fused operations: their derivatives, their dtypes, and what they keep."""

import itertools
from functools import partial

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.models import activations, losses, operations, regularizers
from ndistribute.models.memory import keep_freed_memory
from ndistribute.models.operations.images import Windows
from tests.autodiff.standin import check_gradients, gradients_of
from tests.kinds import context, one_process

LINEAR, TANH = activations.linear, activations.tanh


def normal(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape)


def convolved(x, kernel, strides, padding, dilation, groups):
    """Convolve by the definition, one output element at a time."""
    windows = Windows.over(x.shape[1:3], kernel.shape[:2], strides, padding, dilation)
    images, (height, width, channels, filters) = len(x), kernel.shape
    y = np.zeros((images, *windows.count, filters))
    for row, column, f in itertools.product(*map(range, (*windows.count, filters))):
        first = f // (filters // groups) * channels
        for i, j in itertools.product(range(height), range(width)):
            at_y = row * strides[0] + i * dilation[0] - windows.before[0]
            at_x = column * strides[1] + j * dilation[1] - windows.before[1]
            if 0 <= at_y < x.shape[1] and 0 <= at_x < x.shape[2]:
                part = x[:, at_y, at_x, first : first + channels]
                y[:, row, column, f] += part @ kernel[i, j, :, f]
    return y


CONVOLUTIONS = [
    ((3, 3), (1, 1), "same", (1, 1), 1),
    ((3, 3), (1, 1), "valid", (1, 1), 2),
    ((2, 3), (2, 1), "same", (1, 2), 1),
    ((3, 2), (2, 3), "valid", (2, 1), 4),
    ((1, 1), (1, 1), "valid", (1, 1), 1),
    ((1, 1), (2, 2), "same", (1, 1), 2),
    ((4, 1), (3, 1), "same", (1, 1), 1),
]


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_a_convolution_is_its_definition_and_has_its_gradients(case):
    size, strides, padding, dilation, groups = case
    x, kernel, bias = normal(2, 6, 7, 4), normal(*size, 4 // groups, 8), normal(8)
    options = {"strides": strides, "padding": padding, "dilation": dilation, "groups": groups}
    y = operations.conv2d(x, kernel, bias, LINEAR, **options)
    convolve = partial(operations.conv2d, activation=TANH, **options)
    check_gradients(convolve, x[:, :5, :6], kernel[..., :4], bias[:4])
    expected = convolved(x, kernel, strides, padding, dilation, groups) + bias
    np.testing.assert_allclose(y, expected, atol=1e-12)


LABELS, PREDICTIONS, WEIGHTS = np.random.default_rng(0).uniform(0.1, 0.9, size=(3, 4, 4))
CLASSES = np.array([[1, 0], [3, 2]])
MASK = np.array([[True, False, True, True], [False, True, True, False]])
STATISTICS = {"mean": normal(4), "variance": np.square(normal(4)) + 1}
NORMALIZED = normal(3, 2, 4), normal(4) + 2, normal(4)
IMAGES = normal(2, 5, 6, 2)
HEADS = normal(2, 2, 3, 2), normal(2, 4, 3, 2), normal(2, 4, 3, 5)
ATTENTION = partial(operations.attention, kept=np.random.default_rng(1).uniform(size=(2, 3, 2, 4)))
LOSSES = "mean_squared_error mean_absolute_error huber binary_crossentropy categorical_crossentropy"
POOLS = itertools.product(
    (operations.max_pool2d, operations.average_pool2d),
    [((2, 2), None), ((3, 2), (2, 1)), ((2, 2), (3, 3))],
    ("valid", "same"),
)
DIFFERENTIATED = [
    *(
        (lambda x, pool=pool, size=size, padding=padding: pool(x, *size, padding), [IMAGES])
        for pool, size, padding in POOLS
    ),
    *(
        (
            partial(operations.dense, activation=activations.get(name)),
            [normal(2, 3, 4), normal(4, 5), normal(5)],
        )
        for name in ("linear", "relu", "tanh", "sigmoid", "gelu")
    ),
    *(
        (partial(ATTENTION, mask=mask, is_causal=is_causal), HEADS)
        for mask in (None, MASK)
        for is_causal in (False, True)
    ),
    (lambda *arrays: operations.batch_normalization(*arrays, epsilon=1e-3)[0], NORMALIZED),
    (lambda x: operations.batch_normalization(x, None, None, epsilon=1e-3)[0], NORMALIZED[:1]),
    (partial(operations.layer_normalization, epsilon=1e-3), NORMALIZED),
    (lambda x: operations.layer_normalization(x, None, None, epsilon=1e-3), NORMALIZED[:1]),
    (partial(operations.normalized_by, **STATISTICS, epsilon=1e-3), NORMALIZED),
    (lambda x: operations.softmax_cross_entropy(x, CLASSES), [normal(2, 2, 4)]),
    (lambda x: operations.softmax_cross_entropy(x, PREDICTIONS), [LABELS]),
    *((regularizer(0.3), [normal(3, 4)]) for regularizer in (regularizers.L1, regularizers.L2)),
    *(
        (losses.FunctionLoss(getattr(losses, name)), [LABELS, PREDICTIONS, WEIGHTS[0]])
        for name in LOSSES.split()
    ),
    (partial(losses.compute_average_loss, global_batch_size=9), [LABELS, WEIGHTS[0]]),
]


@pytest.mark.parametrize(("function", "arrays"), DIFFERENTIATED)
def test_operations_and_losses_have_the_gradients_of_differences(function, arrays):
    """Those of losses by labels and weights were None."""
    check_gradients(function, *arrays)


@pytest.mark.parametrize("name", LOSSES.split())
def test_a_variable_of_labels_has_a_gradient(name):
    with nd.GradientTape() as tape:
        variable = nd.Variable(LABELS)
        total = np.sum(getattr(losses, name)(variable, PREDICTIONS))
    assert np.any(tape.gradient(total, variable))


def test_layer_normalization_gives_a_mean_of_0_and_a_deviation_of_1():
    y = operations.layer_normalization(NORMALIZED[0], None, None, epsilon=0.0)
    np.testing.assert_allclose(y.mean(axis=-1), 0, atol=1e-14)
    np.testing.assert_allclose(y.std(axis=-1), 1, rtol=1e-12)


BLOCKS = {
    "_HOST_BYTES": partial(operations.conv2d, activation=TANH, padding="same"),
    "_POOLED_BYTES": lambda x, *_: operations.max_pool2d(x, (2, 2)),
}


@pytest.mark.parametrize("limit", BLOCKS)
def test_images_in_several_blocks_are_computed_as_in_one(limit, monkeypatch):
    arrays = normal(5, 6, 6, 2), normal(3, 3, 2, 4), normal(4)
    expected, gradients = gradients_of(BLOCKS[limit], *arrays)
    nbytes = 2 * 36 * 8 * (18 if limit == "_HOST_BYTES" else 2)  # Of two images.
    monkeypatch.setattr(f"ndistribute.models.operations.images.{limit}", nbytes)
    y, again = gradients_of(BLOCKS[limit], *arrays)
    for one, other in zip([y, *again], [expected, *gradients], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def test_the_first_of_equal_elements_has_the_gradient_of_max_pooling():
    y, (gradient,) = gradients_of(
        lambda x: operations.max_pool2d(x, (2, 2)), np.zeros((1, 2, 4, 1))
    )
    assert y.shape == (1, 1, 2, 1)
    assert gradient[0, :, :, 0].tolist() == [[1, 0, 1, 0], [0, 0, 0, 0]]


def test_padding_is_never_the_largest_and_not_in_the_mean():
    x = np.full((1, 3, 3, 1), -2.0)
    assert (operations.max_pool2d(x, (2, 2), padding="same") == -2).all()
    assert (operations.average_pool2d(x, (2, 2), padding="same") == -2).all()


def test_integers_are_pooled():
    x = np.arange(9).reshape(1, 3, 3, 1) - 9
    assert operations.max_pool2d(x, (2, 2), padding="same").ravel().tolist() == [-5, -4, -2, -1]
    assert operations.average_pool2d(x, (3, 3)).ravel().tolist() == [-5.0]


@pytest.mark.parametrize("width", [3, 600])
def test_batch_normalization_is_its_definition(width):
    arrays = normal(4, 2, width), normal(width) + 2, normal(width)
    y, mean, variance = operations.batch_normalization(*arrays, epsilon=1e-3)
    rows = arrays[0].reshape(-1, width)
    np.testing.assert_allclose(mean, rows.mean(axis=0), atol=1e-14)
    np.testing.assert_allclose(variance, rows.var(axis=0), rtol=1e-12)
    expected = (rows - mean) / np.sqrt(variance + 1e-3) * arrays[1] + arrays[2]
    np.testing.assert_allclose(y.reshape(-1, width), expected, atol=1e-12)


def test_a_large_mean_does_not_cancel_the_variance():
    x = (1000 + normal(500, 2)).astype(np.float32)
    y, _, variance = operations.batch_normalization(x, None, None, epsilon=0.0)
    np.testing.assert_allclose(variance, x.astype(float).var(axis=0), rtol=1e-4)
    np.testing.assert_allclose(y.std(axis=0), 1, rtol=1e-4)
    summed = operations.batch_normalization(
        x, None, None, epsilon=0.0, total=lambda vector: 2 * vector
    )[2]
    np.testing.assert_allclose(summed, variance, rtol=1e-4)


def test_attention_is_a_softmax_over_keys():
    q, k, v = normal(2, 5, 3, 4), normal(2, 6, 3, 4), normal(2, 6, 3, 7)
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / 2
    expected = np.einsum("bhqk,bkhd->bqhd", nd.softmax(scores, axis=-1), v)
    np.testing.assert_allclose(operations.attention(q, k, v), expected, atol=1e-12)


def test_a_query_without_keys_has_zeros_and_no_gradient():
    q, k, v = normal(1, 2, 1, 3), normal(1, 4, 1, 3), normal(1, 4, 1, 3)
    mask = np.array([[False] * 4, [True] * 4])
    y, gradients = gradients_of(lambda *given: operations.attention(*given, mask=mask), q, k, v)
    assert (y[0, 0] == 0).all()
    assert (y[0, 1] != 0).all()
    assert np.isfinite(np.concatenate([g.ravel() for g in gradients])).all()
    assert (gradients[0][0, 0] == 0).all()
    nothing = operations.attention(q, k[:, :0], v[:, :0])
    assert nothing.shape == q.shape
    assert not nothing.any()


def raw(array):
    return nd.stop_gradient(array)


def calls():
    """Return each operation as a function of its arrays, and those arrays."""
    x, vector = normal(3, 6, 6, 4), normal(4)
    heads = normal(2, 3, 2, 4)
    yield lambda *a: operations.conv2d(*a, activations.relu), (x, normal(3, 3, 4, 2), normal(2))
    yield lambda *a: operations.dense(*a, activations.relu), (x, normal(4, 2), normal(2))
    yield lambda a: operations.max_pool2d(a, (2, 2)), (x,)
    yield lambda a: operations.average_pool2d(a, (2, 2)), (x,)
    yield lambda *a: operations.batch_normalization(*a, epsilon=1e-3)[0], (x, vector, vector)
    yield (
        lambda *a: operations.normalized_by(
            *a, mean=raw(a[1]), variance=raw(a[2]) ** 2, epsilon=1e-3
        ),
        (x, vector, vector),
    )
    yield lambda *a: operations.layer_normalization(*a, epsilon=1e-3), (x, vector, vector)
    yield operations.attention, (heads, heads, heads)
    yield lambda *a: operations.attention(*a, is_causal=True), (heads, heads, heads)
    yield lambda a: operations.softmax_cross_entropy(a, raw(a)[..., 0].astype(int) * 0), (x,)
    yield regularizers.L2(), (x,)
    yield regularizers.L1(), (x,)


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_operations_keep_the_dtype_and_are_precise(dtype):
    for function, arrays in calls():
        narrow = [array.astype(dtype) for array in arrays]
        y, gradients = gradients_of(function, *narrow)
        assert {one.dtype for one in [y, *gradients]} == {np.dtype(dtype)}
        expected, wanted = gradients_of(function, *(one.astype(float) for one in narrow))
        tolerance = 40 * np.finfo(dtype).eps
        for one, other in zip([y, *gradients], [expected, *wanted], strict=True):
            np.testing.assert_allclose(one, other, atol=tolerance * max(1, abs(other).max()))


def test_an_empty_batch_has_an_empty_result_and_no_gradient_of_weights():
    for function, arrays in list(calls())[:-2]:
        whole = 3 if all(one.shape == arrays[0].shape for one in arrays) else 1
        y, gradients = gradients_of(function, *(one[:0] for one in arrays[:whole]), *arrays[whole:])
        assert len(y) == 0
        assert gradients[0].shape[0] == 0
        assert not any(gradient.any() for gradient in gradients)


@one_process("looks into a communicator")
def test_gradients_of_weights_are_written_into_the_memory_of_the_all_reduce(monkeypatch):
    given = []

    def memory(dtype, shape):
        given.append(np.empty(shape, dtype))
        return given[-1]

    with nd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        kernels = [nd.Variable(normal(3, 3, 1, 2)), nd.Variable(normal(32, 3))]

        def step():
            monkeypatch.setattr(context().communicator, "gradient_memory", memory)
            if context().replica_id_in_sync_group:
                return []
            with nd.GradientTape() as tape:
                y = operations.conv2d(normal(2, 6, 6, 1), kernels[0], None, LINEAR)
                loss = np.sum(operations.dense(y.reshape(2, 32), kernels[1], None, TANH))
            return tape.gradient(loss, kernels)

        first = strategy.run(lambda: step() or [np.zeros(0)] * 2)
        found = [one.values[0] for one in first]
    assert all(one is other for one, other in zip(found, given[::-1], strict=True))


def test_settings_of_the_user_for_memory_are_left_alone():
    assert keep_freed_memory({}) in (False, True)  # Whether the C library has the setting.
    assert not keep_freed_memory({"MALLOC_TRIM_THRESHOLD_": "1"})


def test_a_gradient_that_the_user_changes_in_place_is_used_anew():
    x, kernel, bias = normal(2, 3), normal(3, 2), np.zeros(2)
    with nd.GradientTape(persistent=True) as tape:
        w = tape.watch(kernel)
        y = operations.dense(x, w, bias, activations.relu)
    upstream = np.ones((2, 2))
    first = tape.gradient(y, w, output_gradients=upstream)
    upstream *= 2
    np.testing.assert_array_equal(tape.gradient(y, w, output_gradients=upstream), 2 * first)
