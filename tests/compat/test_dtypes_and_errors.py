"""Functions of tensors keep to TensorFlow's rules for dtypes, and refuse what it refuses."""

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.compat import tf

x, whole = tf.constant([1.5, -2.0]), tf.constant([3, 4])
f64 = tf.constant([1.0, 2.0], tf.float64)
matrix = tf.constant([[1.0, 2.0], [3.0, 5.0]])

DTYPES = {
    "add": (lambda: tf.add(x, 1), "float32", [2.5, -1]),
    "maximum": (lambda: tf.maximum(x, 0), "float32", [1.5, 0]),
    "power": (lambda: tf.pow(x, 2), "float32", [2.25, 4]),
    "where": (lambda: tf.where(x > 0, x, 0), "float32", [1.5, 0]),
    "beside a list": (lambda: tf.concat([x, [1, 2]], 0), "float32", [1.5, -2, 1, 2]),
    "of numbers": (lambda: tf.concat([[1], [2.5]], 0), "float32", [1, 2.5]),
    "range": (lambda: tf.range(tf.constant(2, tf.int64), 4), "int64", [2, 3]),
    "fractions": (lambda: tf.range(1, 2.5), "float32", [1, 2]),
    "doubles": (lambda: tf.range(tf.constant(2.0, tf.float64)), "float64", [0, 1]),
    "array": (lambda: whole + np.array([1.5, 2.0]), "int32", [4, 6]),
    "mixed": (lambda: tf.constant([np.float32(0.5), 1.0]), "float32", [0.5, 1]),
    "of NumPy": (lambda: tf.constant(np.array([2.7]), tf.int32), "int32", [2]),
    "bool": (lambda: tf.constant(True, tf.float32), "float32", 1),
    "hint": (lambda: tf.convert_to_tensor([1], dtype_hint=tf.float32), "float32", [1]),
    "no hint": (lambda: tf.convert_to_tensor([1.5], dtype_hint=tf.int32), "float32", [1.5]),
    "integer mean": (lambda: tf.reduce_mean([-3, -4]), "int32", -3),
    "relu": (lambda: tf.nn.relu([-1, 2]), "int32", [0, 2]),
    "keyword": (lambda: tf.reduce_sum(axis=0, input_tensor=matrix), "float32", [4, 7]),
    "number first": (lambda: tf.multiply(2, x), "float32", [3, -4]),
    "of NumPy first": (lambda: tf.multiply(np.float64(2), x), "float32", [3, -4]),
    "named": (lambda: tf.gather(indices=[1], params=[3, 4]), "int32", [4]),
    "angle": (lambda: tf.math.atan2(y=1.0, x=2.0), "float32", 0.46364760),
    "scalar": (lambda: tf.math.scalar_mul(scalar=2.0, x=x), "float32", [3, -4]),
    "greatest number": (lambda: tf.argmax([1.0, np.nan, 3.0, 2.0]), "int64", 2),
    "least number": (lambda: tf.argmin([np.nan, 1.0]), "int64", 1),
    "list": (lambda: matrix[[1, 0]], "float32", 3),
    "list of a variable": (lambda: tf.Variable(matrix)[[1, 0]], "float32", 3),
    "biased": (lambda: tf.nn.bias_add(matrix, [1.0, 2.0]), "float32", [[2, 4], [4, 7]]),
    "bounded rows": (
        lambda: tf.nn.embedding_lookup(matrix, [0], max_norm=1.0),
        "float32",
        [[0.4472136, 0.8944272]],
    ),
    "conjugate": (lambda: tf.math.imag(tf.transpose([[1j]], conjugate=True)), "float64", [[-1]]),
    "counts": (lambda: tf.unique_with_counts([3, 3]).count, "int32", [2]),
    "different": (lambda: tf.unique([3, 3]).y, "int32", [3]),
    "pooled": (
        lambda: tf.nn.max_pool2d(input=tf.ones([1, 2, 2, 1]), ksize=2, strides=2, padding="SAME"),
        "float32",
        [[[[1]]]],
    ),
    "constant": (lambda: tf.stop_gradient(input=x, name="x"), "float32", [1.5, -2]),
    "loss": (
        lambda: tf.nn.softmax_cross_entropy_with_logits([[1.0, 0.0]], [[0.0, 0.0]]),
        "float32",
        [np.log(2)],
    ),
    "of lists": (lambda: tf.keras.losses.MSE([[1.0, 2.0]], [[0.0, 0.0]]), "float32", [2.5]),
    "average": (lambda: tf.nn.compute_average_loss([1.0, 2.0], None, 4), "float32", 0.75),
    "dtype by its number": (lambda: tf.zeros(2, 3), "int32", [0, 0]),
    "greatest of none": (lambda: tf.reduce_max(tf.zeros([0])), "float32", -np.inf),
    "least of none": (lambda: tf.reduce_min(tf.zeros([0, 1], tf.int8), 0), "int8", [127]),
    "no exponentials": (lambda: tf.reduce_logsumexp(tf.zeros([0])), "float32", -np.inf),
    "bytes descending": (
        lambda: tf.sort(tf.constant([0, 5, 255], tf.uint8), direction="DESCENDING"),
        "uint8",
        [255, 5, 0],
    ),
    "stable": (lambda: tf.argsort([3, 1, 3], direction="DESCENDING"), "int32", [0, 2, 1]),
    "top": (lambda: tf.math.top_k([1, 5, 5], 2).indices, "int32", [1, 2]),
    "rest": (lambda: tf.split(tf.range(6), [2, -1])[1], "int32", [2, 3, 4, 5]),
    "exclusive": (lambda: tf.math.cumprod([2, 3, 4], exclusive=True), "int32", [1, 2, 6]),
    "reversed": (lambda: tf.cumsum([1, 2], exclusive=True, reverse=True), "int32", [2, 0]),
    "dropped": (lambda: tf.math.unsorted_segment_sum([1, 2], [-1, 1], 2), "int32", [0, 2]),
    "adjoint": (lambda: tf.matmul(matrix, matrix, transpose_b=True)[0], "float32", [5, 13]),
    "batches": (lambda: tf.eye(2, batch_shape=[1]), "float32", [[[1, 0], [0, 1]]]),
    "remainder": (lambda: tf.truncatemod(-5, 3), "int32", -2),
    "limited": (lambda: tf.saturate_cast([300.0, -1.0], tf.uint8), "uint8", [255, 0]),
    "long": (lambda: tf.saturate_cast([1e20], tf.int64), "int64", [2**63 - 2**39]),
    "gathered": (
        lambda: tf.TensorArray(tf.int32, 1).unstack([1, 2, 3]).stack(),
        "int32",
        [1, 2, 3],
    ),
    "unwritten": (lambda: tf.TensorArray(tf.float32, 2).write(1, 3.0).stack(), "float32", [0, 3]),
    "gelu": (lambda: tf.nn.gelu(x), "float32", [1.3997893, -0.0455003]),
    "about gelu": (lambda: tf.nn.gelu(x, approximate=True), "float32", [1.3995717, -0.04540235]),
    "bytes of text": (lambda: tf.strings.length("é"), "int32", 2),
    "characters": (lambda: tf.strings.length("é", unit="UTF8_CHAR"), "int32", 1),
}


@pytest.mark.parametrize("name", DTYPES)
def test_results_have_tensorflows_dtype_and_value(name: str) -> None:
    made, dtype, expected = DTYPES[name]
    result = made()
    assert isinstance(result, tf.Tensor)
    assert result.dtype == dtype
    np.testing.assert_allclose(result, np.asarray(expected), rtol=1e-6)


REFUSED = {
    "a fraction": (
        lambda: tf.constant([1, 2.7], tf.int32),
        TypeError,
        "cannot become a tensor of int32",
    ),
    "text": (lambda: tf.constant("a", tf.float32), TypeError, "cannot become a tensor of float32"),
    "beside integers": (lambda: whole + [1.5, 2], TypeError, "cannot become a tensor of int32"),
    "too great": (lambda: tf.constant(300, tf.uint8), OverflowError, "300"),
    "converted": (lambda: tf.convert_to_tensor(x, tf.int32), ValueError, "tf.cast"),
    "variable": (lambda: tf.Variable(x, dtype=tf.float64), ValueError, "tf.cast"),
    "assigned": (lambda: tf.Variable(x).assign(f64), ValueError, "tf.cast"),
    "joined": (lambda: tf.concat([x, f64], 0), ValueError, "float32 and float64"),
    "stacked": (lambda: tf.stack([x, whole]), ValueError, "float32 and int32"),
    "chosen": (lambda: tf.where(x > 0, x, f64), ValueError, "tf.cast"),
    "root": (lambda: tf.sqrt(whole), ValueError, "sqrt needs a tensor of floats, got int32"),
    "softmax": (lambda: tf.nn.softmax([1, 2]), ValueError, "tf.cast"),
    "norm": (lambda: tf.norm(whole), ValueError, "norm needs a tensor of floats, got int32"),
    "deviation": (
        lambda: tf.math.reduce_std(whole),
        ValueError,
        "std needs a tensor of floats, got int32",
    ),
    "share": (
        lambda: tf.reduce_mean([True, False]),
        ValueError,
        "mean needs a tensor of floats, got bool",
    ),
    "negative": (lambda: tf.gather(x, [-1]), ValueError, "index -1 is not in"),
    "row": (lambda: tf.nn.embedding_lookup(matrix, [2]), ValueError, "index 2 is not in"),
    "place": (lambda: tf.gather_nd(matrix, [[0, 2]]), ValueError, "index 2 is not in"),
    "written": (lambda: tf.tensor_scatter_nd_add(x, [[-1]], [1.0]), ValueError, "index -1"),
    "direction": (lambda: tf.sort(x, direction="down"), ValueError, "'DESCENDING', got 'down'"),
    "sizes": (lambda: tf.split(x, [2, 1]), ValueError, r"sizes \[2, 1\] must .* the axis, 2\."),
    "a size below 0": (lambda: tf.split(x, [4, -2]), ValueError, r"\[4, -2\] must be 0 or more"),
    "axes": (lambda: tf.unique([[1, 2]]), ValueError, "expected one axis"),
    "zero": (lambda: whole // 0, ValueError, "divided by zero"),
    "modulo": (lambda: whole % tf.constant([1, 0]), ValueError, "divided by zero"),
    "near": (lambda: tf.debugging.assert_near(1.0, 1.000009), ValueError, "isclose"),
    "nothing": (lambda: tf.TensorArray(tf.int32, 1).stack(), ValueError, "no item"),
    "limit": (lambda: tf.random.uniform([1], dtype=tf.int32), ValueError, "maxval"),
    "vector": (lambda: tf.matmul(matrix, x), ValueError, "2 and 1 axes"),
    "unit": (lambda: tf.strings.length("a", unit="WORD"), ValueError, "unit must be"),
    "ragged": (lambda: tf.strings.split(["a b", "c"]), NotImplementedError, "split each text"),
    "options": (
        lambda: tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True),
        NotImplementedError,
        "async",
    ),
    "module": (lambda: tf.saved_model.save(tf.Module(), "path"), TypeError, "tf.train.Checkpoint"),
    "symbolic": (lambda: tf.shape(tf.keras.Input((3,))), TypeError, r"x\.shape"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_tensorflow_refuses_is_refused(name: str) -> None:
    call, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        call()


def test_the_array_of_a_tensor_is_a_copy() -> None:
    for tensor in (tf.constant([1.0]), tf.constant([1.0]) + 1):
        before = tensor.numpy()
        tensor.numpy()[0] = 9
        np.testing.assert_array_equal(tensor, before)


def test_the_shape_of_a_symbolic_tensor_is_known_where_it_has_no_open_length() -> None:
    assert tf.shape(tf.keras.Input((3,), batch_size=2)).numpy().tolist() == [2, 3]


def test_a_list_is_one_place_of_a_variable() -> None:
    variable = tf.Variable(matrix)
    variable[[1, 0]].assign(9.0)
    assert variable.numpy().tolist() == [[1, 2], [9, 5]]


def test_shapes_are_merged_and_compared() -> None:
    shape = tf.TensorShape([2, None])
    assert shape.merge_with([2, 3]).as_list() == [2, 3]
    assert shape.concatenate([4]).as_list() == [2, None, 4]
    assert shape.rank == 2
    assert shape.is_compatible_with([2, 5])
    for other in ([3, 3], [2]):
        assert not shape.is_compatible_with(other)
        with pytest.raises(ValueError, match="the shape is"):
            shape.assert_is_compatible_with(other)


def test_a_tensor_is_not_none_and_shows_its_number() -> None:
    assert (x == None, x != None) == (False, True)  # noqa: E711
    assert repr(tf.constant(1.5)) == "<tf.Tensor: shape=(), dtype=float32, numpy=1.5>"


def test_the_error_function_and_gelu_have_gradients() -> None:
    value = tf.constant([0.5])
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(value)
        error, unit = tf.math.erf(value), tf.nn.gelu(value)
    np.testing.assert_allclose(tape.gradient(error, value), [0.8787826], rtol=1e-6)
    np.testing.assert_allclose(tape.gradient(unit, value), [0.8674951], rtol=1e-6)


GRADIENTS = {
    "greatest": (lambda v: tf.maximum(v, 0.0), [0, 1, 1]),
    "least": (lambda v: tf.minimum(0.0, v), [1, 0, 0]),
    "relu6": (lambda v: tf.nn.relu6(v * 3), [0, 0, 0]),
    "selu": (tf.nn.selu, [0.2379328, 1.050701, 1.050701]),
    "norm of nothing": (lambda v: tf.clip_by_norm(v * 0, 1.0), [0, 0, 0]),
    "set": (lambda v: tf.tensor_scatter_nd_update(v, [[1]], [5.0]) ** 2, [-4, 0, 4]),
    "written": (lambda v: tf.tensor_scatter_nd_update(tf.ones([3]), [[0], [2], [1]], v), [1, 1, 1]),
    "added": (
        lambda v: tf.tensor_scatter_nd_add(tf.ones([2]), [[1], [1], [0]], v) ** 2,
        [-2, -2, 6],
    ),
    "taken away": (lambda v: tf.tensor_scatter_nd_sub(tf.ones([3]), [[1], [1], [0]], v), [-1] * 3),
    "segments": (lambda v: tf.math.unsorted_segment_sum(v, [0, -1, 0], 1) ** 2, [0, 0, 0]),
    "complex": (lambda v: tf.abs(tf.complex(v, v)), [-1.4142135, 0, 1.4142135]),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_tensorflow_where_functions_have_corners(name: str) -> None:
    function, expected = GRADIENTS[name]
    variable = tf.Variable([-2.0, 0.0, 2.0])
    with tf.GradientTape() as tape:
        result = function(variable)
    np.testing.assert_allclose(tape.gradient(result, variable), expected, rtol=1e-6)


def test_a_tape_that_is_reset_forgets_what_it_recorded() -> None:
    v, w = tf.Variable(2.0), tf.Variable(3.0)
    with tf.GradientTape() as tape:
        square = w * w
        tape.reset()
        result = v * v + square
    gradients = tape.gradient(result, [v, w])
    assert gradients[0].numpy() == 4
    assert gradients[1] is None


def test_text_is_split_joined_and_replaced() -> None:
    text = tf.strings
    assert text.split("a b  c").numpy().tolist() == [b"a", b"b", b"c"]
    assert text.split("a,,c", ",").numpy().tolist() == [b"a", b"", b"c"]
    assert text.join([["a", "c"], "b"], "-").numpy().tolist() == [b"a-b", b"c-b"]
    assert text.regex_replace(["aXX"], "X", "y").numpy().tolist() == [b"ayy"]
    assert text.regex_replace("aXX", "X", "y", replace_global=False).numpy() == b"ayX"
    assert text.lower("ÉA", encoding="utf-8").numpy().decode() == "éa"
    assert text.lower("ÉA").numpy().decode() == "Éa"


CODES = {
    "AbortedError": 10,
    "AlreadyExistsError": 6,
    "CancelledError": 1,
    "DataLossError": 15,
    "DeadlineExceededError": 4,
    "FailedPreconditionError": 9,
    "InternalError": 13,
    "InvalidArgumentError": 3,
    "NotFoundError": 5,
    "PermissionDeniedError": 7,
    "ResourceExhaustedError": 8,
    "UnauthenticatedError": 16,
    "UnavailableError": 14,
    "UnimplementedError": 12,
    "UnknownError": 2,
}


@pytest.mark.parametrize("name", CODES)
def test_errors_take_a_node_an_operation_and_a_message(name: str) -> None:
    kind = getattr(tf.errors, name)
    error = kind(None, "matmul", "shapes differ")
    assert (error.node_def, error.op, error.message) == (None, "matmul", "shapes differ")
    assert str(error) == "shapes differ"
    assert error.error_code == kind.error_code == CODES[name]
    assert isinstance(error, tf.errors.OpError)
    assert tf.errors.OpError(None, None, "m", CODES[name]).error_code == CODES[name]


def test_codes_are_those_of_the_errors() -> None:
    assert tf.errors.OK == 0
    assert nd.WorkerLostError.error_code == tf.errors.UNAVAILABLE
    assert nd.AuthenticationError.error_code == tf.errors.UNAUTHENTICATED
    assert issubclass(tf.errors.OperatorNotAllowedInGraphError, TypeError)


def test_what_is_wrong_with_files_are_tensorflows_errors(tmp_path) -> None:
    folder = str(tmp_path / "a")
    tf.io.gfile.mkdir(folder)
    for kind, call in (
        (tf.errors.AlreadyExistsError, lambda: tf.io.gfile.mkdir(folder)),
        (tf.errors.NotFoundError, lambda: tf.io.gfile.listdir(f"{folder}/b")),
        (tf.errors.NotFoundError, lambda: tf.io.gfile.GFile(f"{folder}/b")),
        (tf.errors.NotFoundError, lambda: tf.train.Checkpoint().restore(f"{folder}/b-1")),
    ):
        with pytest.raises(kind, match=r"/a"):
            call()


def test_files_are_copied_and_renamed_unless_there_are_others(tmp_path) -> None:
    first, second, third = (str(tmp_path / name) for name in "abc")
    with tf.io.gfile.GFile(first, "w") as file:
        file.write("text")
    tf.io.gfile.copy(first, second)
    tf.io.gfile.rename(second, third)
    for write in (tf.io.gfile.copy, tf.io.gfile.rename):
        with pytest.raises(tf.errors.AlreadyExistsError, match="overwrite"):
            write(first, third)
    tf.io.gfile.rename(first, third, overwrite=True)
    assert tf.io.gfile.listdir(str(tmp_path)) == ["c"]
    assert tf.compat.as_bytes("é") == tf.compat.as_bytes("é".encode())
    assert tf.compat.as_str(b"a") == tf.compat.as_text("a") == "a"


def test_nests_keep_their_structure() -> None:
    nest = tf.nest
    assert nest.flatten({"b": 1, "a": [2, None]}) == [2, None, 1]
    assert nest.map_structure(lambda a, b: a + b, {"a": 1}, {"a": 2}) == {"a": 3}
    assert nest.map_structure(lambda a, b: a + b, [1], (2,), check_types=False) == [3]
    assert nest.pack_sequence_as({"b": 0, "a": (0, 0)}, [1, 2, 3]) == {"b": 3, "a": (1, 2)}
    assert [nest.is_nested(value) for value in ([1], {}, 1, None)] == [True, True, False, False]
    nest.assert_same_structure([1, (2,)], [3, (None,)])
    with pytest.raises(TypeError, match="differ"):
        nest.assert_same_structure([1, (2,)], [1, [2]])
    for call in (
        lambda: nest.assert_same_structure([1], [1, 2]),
        lambda: nest.map_structure(max, [1, 2], [1]),
        lambda: nest.pack_sequence_as([0, 0], [1]),
        lambda: nest.map_structure(max),
    ):
        with pytest.raises(ValueError, match=r"differ|leaves|at least one"):
            call()


def test_rows_need_no_shape() -> None:
    variable = tf.Variable([1.0, 2.0, 3.0])
    rows = tf.IndexedSlices([5.0], [1])
    assert isinstance(rows, tf.IndexedSlices)
    assert isinstance(nd.IndexedSlices(np.ones(1), np.array([0]), (3,)), tf.IndexedSlices)
    assert variable.scatter_update(rows).numpy().tolist() == [1, 5, 3]
