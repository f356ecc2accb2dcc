"""Scripts of TensorFlow 1 run by changing one import."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ndistribute import graph
from ndistribute.compat import tf as tf2
from ndistribute.compat import tf1 as tf
from tests.processes import python_says


@pytest.fixture(autouse=True)
def new_graph() -> Iterator[None]:
    """Begin with an empty default graph, as a program does."""
    graph.reset_default_graph()
    yield
    graph.reset_default_graph()


def test_the_smallest_program_runs() -> None:
    c = tf.constant("Hello, distributed TensorFlow!")
    server = tf.train.Server.create_local_server()
    session = tf.Session(server.target)
    assert session.run(c) == b"Hello, distributed TensorFlow!"
    session.close()
    server.stop()


def test_names_of_classic_networks_compute_what_they_say() -> None:
    tf.set_random_seed(3)
    x, keep = tf.placeholder(tf.float32, [None, 8]), tf.placeholder(tf.float32)
    y = tf.placeholder(tf.int64, [None])
    w = tf.get_variable("w", [8, 4], initializer=tf.truncated_normal_initializer(stddev=0.1))
    with tf.variable_scope("output"):
        b = tf.get_variable("b", [4], initializer=tf.constant_initializer(0.5, dtype=tf.float32))
    c = tf.get_variable("c", [4], initializer=tf.zeros_initializer)
    e = tf.get_variable("e", [4, 4], initializer=tf.contrib.layers.xavier_initializer(seed=1))
    hidden = tf.nn.dropout(tf.nn.relu(tf.matmul(x, w) + b + c), keep)
    logits = tf.matmul(hidden, e)
    loss = tf.losses.sparse_softmax_cross_entropy(labels=y, logits=logits)
    optimizer = tf.train.GradientDescentOptimizer(0.1)
    gradients, variables = zip(*optimizer.compute_gradients(loss), strict=True)
    clipped, norm = tf.clip_by_global_norm(gradients, 0.01)
    step = tf.contrib.framework.get_or_create_global_step()
    train = optimizer.apply_gradients(zip(clipped, variables, strict=True), global_step=step)
    tf.scalar_summary("loss", loss)
    with tf.control_dependencies([train]), tf.name_scope("after"):
        later = tf.identity(step.read_value())
    assert (b.name, later.name) == ("output/b:0", "after/identity:0")
    images, whole = tf.reshape(x, [-1, 2, 4, 1]), [1, 2, 4, 1]
    pooled = tf.nn.max_pool(images, ksize=whole, strides=whole, padding="SAME")
    right = tf.reduce_mean(tf.to_float(tf.nn.in_top_k(logits, y, 2)))
    n = tf.Variable(0)
    gpus = tf.GPUOptions(allow_growth=True)
    config = tf.ConfigProto(allow_soft_placement=True, gpu_options=gpus)
    with tf.Session(config=config) as session:
        session.run(tf.initialize_all_variables())
        feeds = {x: np.linspace(0, 1, 40).reshape(5, 8), y: [0, 1, 2, 3, 0], keep: 1.0}
        found, scores = session.run([right, logits], feeds)
        best = np.argsort(-scores, 1)[:, :2]
        among = [target in row for target, row in zip(feeds[y], best, strict=True)]
        assert found == pytest.approx(np.mean(among))
        assert session.run(tf.global_norm(clipped), feeds) == pytest.approx(0.01)
        assert session.run([later, norm, loss], feeds)[2].dtype == np.float32
        assert session.run(step) == 1
        assert isinstance(session.run(tf.merge_all_summaries(), feeds), bytes)
        values = session.run([pooled, tf.nn.l2_loss(x)], feeds)
        np.testing.assert_allclose(values[0].ravel(), feeds[x].max(1))
        assert values[1] == pytest.approx(np.sum(feeds[x] ** 2) / 2)
        kept = session.run(hidden, {x: np.ones((1000, 8)), keep: 0.25})
        assert 0.2 < np.mean(kept > 0) < 0.3
        assert session.run(tf.nn.zero_fraction(tf.constant([0.0, 1.0]))) == 0.5
        assert [session.run(tf.assign_add(n, 2)), session.run(tf.assign(n, 7))] == [2, 7]
        assert [one.shape for one in session.run(tf.unstack(w, 8))] == [(4,)] * 8
        assert session.run(tf.slice(x, [1, 2], [2, -1]), feeds).shape == (2, 6)
    assert tf.get_collection(tf.GraphKeys.LOSSES) == [loss]


def test_names_shapes_and_keywords_are_those_of_the_first_generation() -> None:
    x = tf.placeholder("float", [None, 6], name="x")
    assert x.dtype == tf.cast(x > 0, "float").dtype == np.float32
    assert x.shape.as_list() == x.get_shape().as_list() == [None, 6]
    assert x.get_shape()[1].value == x.shape[1].value == 6
    assert tf.get_variable("w", [2, 3]).get_shape().num_elements() == 6
    softmax = tf.nn.softmax(x, name="softmax_tensor")
    assert softmax.get_shape()[1:].num_elements() == 6
    value = np.arange(12, dtype=np.float32).reshape(2, 6)
    frozen = tf.stop_gradient(x)
    doubled = tf.py_func(lambda a: 2 * a, [x], tf.float32, name="doubled")
    with pytest.raises(ValueError, match=r"'doubled:0'.*set_shape"):
        doubled.get_shape()
    with tf.Session() as session:

        def run(fetches: object) -> object:
            return session.run(fetches, {x: value})

        assert run("softmax_tensor:0").sum() == pytest.approx(2.0)
        np.testing.assert_array_equal(run(tf.gradients(x * frozen, x)[0]), value)
        np.testing.assert_array_equal(run(tf.gradients(tf.sign(x), x)[0]), 0 * value)
        np.testing.assert_array_equal(run(doubled), 2 * value)
        products = tf.matmul(x, x, transpose_a=True)
        np.testing.assert_array_equal(run(products), value.T @ value)
        joined = tf.concat(axis=0, values=[x, x])
        assert run([joined, tf.squeeze(x[:1], [0]), tf.div(7, 2)])[2] == 3
        assert run([tf.mod(-7, 3), tf.floordiv(-7, 2)]) == [2, -4]
        np.testing.assert_array_equal(run(tf.cumsum(x, axis=1)), np.cumsum(value, 1))


def test_an_estimator_takes_numpy_input_and_an_optimizer_by_name(tmp_path: Path) -> None:
    x = {"x": np.linspace(0, 1, 20, dtype=np.float32)}
    of = tf.estimator.inputs.numpy_input_fn
    model = tf.estimator.LinearRegressor(
        [tf.feature_column.numeric_column("x")], model_dir=str(tmp_path), optimizer="Adagrad"
    )
    model.train(of(x, 3 * x["x"], batch_size=7, num_epochs=None, shuffle=True), steps=300)
    found = model.evaluate(of(x, 3 * x["x"], batch_size=7, num_epochs=1, shuffle=False))
    assert found["average_loss"] < 0.05
    assert found["global_step"] == 300
    assert len(list(model.predict(of(x, num_epochs=2, shuffle=False)))) == 40
    with pytest.raises(ValueError, match="shuffle must be"):
        of(x)


@pytest.mark.parametrize("activation", ["relu", "tanh", "softmax", None])
def test_a_layer_that_is_called_twice_has_the_variables_of_one(activation):
    x = tf.placeholder(tf.float32, [None, 4, 4, 1])
    convolve = tf.layers.Conv2D(2, 3, activation=activation, name="c")
    dense, norm = tf.layers.Dense(3, activation), tf.layers.BatchNormalization()
    y, again = (tf.layers.Flatten()(convolve(x)) for _ in range(2))
    outputs = [dense(norm(y, training=True)), dense(norm(again, training=True))]
    assert [v.op.name for v in convolve.variables] == ["c/kernel", "c/bias"]
    assert len(norm.variables) == 4
    assert len(tf.trainable_variables()) == 6
    with tf.train.MonitoredSession(tf.train.ChiefSessionCreator()) as session:
        first, second = session.run(outputs, {x: np.random.default_rng(0).random((2, 4, 4, 1))})
    np.testing.assert_array_equal(first, second)
    if activation == "softmax":
        np.testing.assert_allclose(first.sum(axis=1), 1, rtol=1e-5)
    with pytest.raises(RuntimeError, match="makes an operation of a graph"):
        tf2.compat.v1.layers.Dense(2)(np.ones((2, 2)))


def test_sessions_restore_and_wait_as_their_creators_say(tmp_path):
    step = tf.train.get_or_create_global_step()
    add = tf.assign_add(step, 1)
    saver = tf.train.CheckpointSaverHook(str(tmp_path), save_steps=1)
    for start in (0, 2):
        creator = tf.train.ChiefSessionCreator(checkpoint_dir=str(tmp_path))
        with tf.train.MonitoredSession(creator, hooks=[saver]) as session:
            assert session.run(step) == start
            session.run(add)
            session.run(add)
    with tf.train.SingularMonitoredSession(checkpoint_dir=str(tmp_path)) as session:
        assert session.raw_session().run(step) == 4
    waiting = tf.train.WorkerSessionCreator(max_wait_secs=0)
    with pytest.raises(tf.errors.DeadlineExceededError, match="Is the chief running"):
        tf.train.MonitoredSession(waiting)


def test_errors_are_made_of_a_node_an_operation_and_a_message():
    error = tf.errors.AbortedError("node", "op", "lost")
    assert (error.node_def, error.op, error.message, str(error)) == ("node", "op", "lost", "lost")
    assert str(tf.errors.NotFoundError("no file")) == "no file"


def test_messages_of_the_chosen_level_are_shown(caplog: pytest.LogCaptureFixture) -> None:
    before = logging.getLogger("ndistribute").level
    try:
        tf.logging.set_verbosity(tf.logging.INFO)
        tf.logging.info("step %d", 3)
        tf.logging.debug("hidden")
    finally:
        tf.logging.set_verbosity(before)
    assert caplog.messages == ["step 3"]


def test_two_imports_in_one_process_follow_their_own_rules() -> None:
    """TensorFlow 2 is eager but in graphs, and TensorFlow 1 makes graphs but when told not to."""
    v1 = tf2.compat.v1
    for names in (tf2, v1):
        assert names.constant(2.0) + 1.0 == 3.0
        assert not isinstance(names.Variable(1.0), graph.Variable)
        assert names.executing_eagerly()
    assert isinstance(tf.constant(2.0), graph.Tensor)
    assert isinstance(tf.Variable(1.0), graph.Variable)
    with tf2.Graph().as_default():
        assert isinstance(tf2.constant(2.0), graph.Tensor)
        assert isinstance(tf2.Variable(1.0), tf2.Variable)
        assert isinstance(v1.placeholder(tf2.float32), graph.Tensor)
        with tf2.init_scope():
            assert tf2.constant(2.0).numpy() == 2.0
    assert tf2.cond(True, lambda: 1, lambda: 2) == 1
    with pytest.raises(RuntimeError, match=r"as_default"):
        v1.placeholder(tf2.float32)
    assert tf.executing_eagerly() is False
    assert tf.compat.v1.train.Saver is v1.train.Saver is graph.Saver
    assert tf.compat.v1 is tf
    assert tf.keras.layers.Dense is tf2.keras.layers.Dense


def test_the_program_says_whether_names_make_operations() -> None:
    program = (
        "import ndistribute.compat.tf as tf\n"
        "import ndistribute.compat.tf1 as tf1\n"
        "print([names.executing_eagerly() for names in (tf, tf.compat.v1, tf1)])\n"
        "tf.compat.v1.disable_eager_execution()\n"
        "tf1.enable_eager_execution()\n"
        "print([names.executing_eagerly() for names in (tf, tf.compat.v1, tf1)])\n"
        "print(type(tf.Variable(1.0)).__module__)\n"
    )
    expected = "[True, True, False]\n[False, False, True]\nndistribute.graph.variables\n"
    assert python_says("-c", program) == expected


def test_no_use_of_a_name_changes_what_others_mean() -> None:
    """Each name is used; afterwards a variable is a variable, as at the beginning."""
    first = tf2.Variable(1.0)
    for path in [name for name in sys.modules if f"{name}.".startswith(f"{tf2.__name__}.")]:
        for name in dir(sys.modules[path]):
            getattr(sys.modules[path], name)
    clipped, norm = tf2.clip_by_global_norm([tf2.constant([3.0, 4.0]), None], 1.0)
    np.testing.assert_allclose(clipped[0], [0.6, 0.8], rtol=1e-6)
    assert (clipped[1], norm.numpy(), norm.dtype) == (None, 5.0, np.float32)
    rows = tf2.IndexedSlices(np.float32([[3.0], [4.0]]), np.array([1, 1]), (2, 1))
    (scaled,), norm = tf2.clip_by_global_norm([rows], 2.5)
    np.testing.assert_allclose(scaled.values, [[1.5], [2.0]])
    assert tf2.linalg.global_norm([rows, tf2.constant(12.0)]) == 13.0
    assert tf2.random_normal_initializer(mean=5.0, stddev=0.0)([2]).tolist() == [5.0, 5.0]
    with tf2.control_dependencies([first.assign_add(1.0)]), tf2.name_scope("scope"):
        assert tf2.no_op() is tf2.group(first) is None
    doubled = tf2.py_function(lambda x: 2 * x.numpy(), [first], tf2.float64)
    assert (doubled.numpy(), doubled.dtype) == (4.0, np.float64)
    assert tf2.numpy_function(lambda x: [x, type(x) is np.ndarray], [[1]], [int, bool])[1]
    tf2.feature_column.numeric_column("x")
    averages = tf2.train.ExponentialMovingAverage(0.75)
    averages.apply([first])
    first.assign(6.0)
    averages.apply([first])
    assert averages.average(first).numpy() == 3.0
    assert isinstance(tf2.Variable(1.0), type(first))


def test_flags_are_parsed_and_the_program_exits_with_its_result() -> None:
    program = (
        "import ndistribute.compat.tf1 as tf\n"
        "tf.app.flags.DEFINE_string('job_name', '', '100% of a job')\n"
        "tf.app.flags.DEFINE_integer('steps', 3, '')\n"
        "tf.app.flags.DEFINE_boolean('sync', False, '')\n"
        "tf.app.flags.DEFINE_boolean('log', True, '')\n"
        "def main(rest):\n"
        "    flags = tf.app.flags.FLAGS\n"
        "    print(flags.job_name, flags.steps, flags.sync, flags.log, rest[1:])\n"
        "tf.app.run()\n"
    )
    said = python_says("-c", program, "--job_name=ps", "--sync", "--nolog", "--steps", "5", "other")
    assert said == "ps 5 True False ['other']\n"


def test_moving_averages_are_kept_restored_and_follow_each_update(tmp_path: Path) -> None:
    with tf.Graph().as_default():
        w = tf.Variable(np.zeros(2), name="w")
        step = tf.train.get_or_create_global_step()
        x = tf.placeholder(tf.float64, [2])
        loss = tf.reduce_sum(x)
        train = tf.group(w.assign_add(x), step.assign_add(1))
        slow = tf.train.ExponentialMovingAverage(0.9, step)
        with tf.control_dependencies([train]):
            update = slow.apply(tf.trainable_variables() + [loss])
        saver = tf.train.Saver()
        expected, mean, value = np.zeros(2), 0.0, np.zeros(2)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for k in range(1, 5):
                batch = np.array([1.0, k])
                session.run(update, {x: batch})
                decay = min(0.9, (1 + k) / (10 + k))
                value = value + batch
                expected += (1 - decay) * (value - expected)
                mean += (1 - decay) * (batch.sum() - mean)
            found = session.run([slow.average(w), slow.average(loss)])
            np.testing.assert_allclose(found[0], expected)
            np.testing.assert_allclose(found[1], mean)
            path = saver.save(session, str(tmp_path / "model"))
        assert slow.average(step) is None
    with tf.Graph().as_default(), tf.Session() as session:
        w = tf.Variable(np.zeros(2), name="w")
        averages = tf.train.ExponentialMovingAverage(0.9)
        tf.train.Saver(averages.variables_to_restore()).restore(session, path)
        np.testing.assert_allclose(session.run(w), expected)


def test_a_monitored_session_runs_as_a_session_does() -> None:
    with tf.Graph().as_default():
        step, text = tf.train.get_or_create_global_step(), tf.constant("a")
        add = step.assign_add(1)
        stop = tf.train.StopAtStepHook(last_step=2)
        with tf.train.MonitoredTrainingSession(hooks=[stop]) as session:
            assert session.run(text, options=tf.RunOptions(), run_metadata=None) == b"a"
            session.run_step_fn(lambda context: context.run_with_hooks(add))
            assert not session.should_stop()
            session.run(add)
            assert session.should_stop()


def test_variables_are_found_by_name_and_collections_by_patterns() -> None:
    with tf.Graph().as_default() as graph, tf.Session() as session:
        v = tf.Variable(2.0, name="scope/v")
        tf.Variable(3.0, name="other")
        session.run(tf.global_variables_initializer())
        assert session.run("scope/v:0") == session.run(graph.get_tensor_by_name("scope/v:0")) == 2.0
        assert graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES, ".*v") == [v]
        x = tf.placeholder(tf.float32, [5, None])
        x.set_shape([None, 3])
        assert x.shape == (5, 3)
        with pytest.raises(ValueError, match=r"is \(5, 3\)"):
            x.set_shape([None, 4])


WITHOUT_EFFECT = {
    "aggregate": lambda w: tf.train.GradientDescentOptimizer(0.1).minimize(w * w, average=True),
    "run": lambda w: tf.RunOptions(inter_op_thread_pool=1),
    "initialized": lambda w: tf.train.Scaffold(copy_from_scaffold=print),
    "waits": lambda w: tf.train.Supervisor().prepare_or_wait_for_session(wait_for_checkpoint=True),
    "queues": lambda w: tf.train.Supervisor().start_queue_runners(None, ["runner"]),
    "isolated": lambda w: tf.ConfigProto(isolate_session_state=True),
    "placement": lambda w: tf.ConfigProto(graph_options=w),
    "memory": lambda w: tf.GPUOptions(per_process_gpu_memory_fraction=0.5),
    "compiled": lambda w: tf.function(lambda: w, polymorphic=True),
    "reassigned": lambda w: tf.assign(w, 1.0, when="later"),
    "settings": lambda w: tf.config.run_functions_eagerly(eager=True),
    "negative": lambda w: tf.train.Saver([w], max_to_keep=-1),
    "padded": lambda w: tf.train.Saver([w], pad_step_number=True),
    "state": lambda w: tf.train.Saver([w]).save(None, "path", latest_filename="other"),
    "constraint": lambda w: tf.get_variable("v", [2], constraint=tf.identity),
    "partitioner": lambda w: tf.get_variable("v", [2], partitioner=print),
    "assigned": lambda w: w.assign(1.0, when="later"),
    "averages": lambda w: tf.train.SyncReplicasOptimizer(None, 1, variable_averages=print),
    "named": lambda w: tf.summary.FileWriter("logs", filename_suffix="x"),
    "strategy": lambda w: tf.nn.embedding_lookup(w, [1], partition_strategy="other"),
    "protocol": lambda w: tf.train.Server({"local": ["localhost:0"]}, protocol="grpc+verbs"),
    "sessions": lambda w: tf.train.Server(
        {"a": ["localhost:0"]}, config=tf.ConfigProto(log_device_placement=True)
    ),
    "tables": lambda w: tf.nn.embedding_lookup([np.eye(2), np.eye(2)], [1]),
    "bounds": lambda w: tf.flags.DEFINE_integer("bounded", 1, "", lower_bound=0),
    "format": lambda w: tf.keras.Sequential().save("path", save_format="h5"),
    "seed": lambda w: tf.estimator.inputs.numpy_input_fn(np.eye(2), shuffle=True, seed=1),
}


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_an_option_without_effect_is_refused_and_leaves_no_file(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with tf.Graph().as_default(), pytest.raises((TypeError, ValueError)):
        WITHOUT_EFFECT[name](tf.Variable(2.0, name="w"))
    assert not list(tmp_path.iterdir())


def test_options_that_change_no_result_are_accepted(tmp_path):
    with tf.Graph().as_default():
        w = tf.get_variable("w", [], initializer=tf.zeros_initializer(), use_resource=True)
        step = tf.train.GradientDescentOptimizer(0.1).minimize(w, gate_gradients=1)
        saver = tf.train.Saver([w], write_version=2, sharded=True)
        options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(step, options=options, run_metadata=tf.RunMetadata())
            assert session.run(w.assign(3.0, use_locking=True)) == 3.0
            assert saver.save(session, str(tmp_path / "w"), write_meta_graph=False)
    config = tf.ConfigProto(inter_op_parallelism_threads=4, intra_op_parallelism_threads=1)
    assert tf.train.Server({"local": ["localhost:0"]}, config=config, start=False) is not None


def test_the_global_step_is_that_of_the_graph_that_is_named():
    first, second = tf.Graph(), tf.Graph()
    with first.as_default():
        step = tf.train.get_or_create_global_step()
    with second.as_default():
        assert tf.train.get_global_step() is None
        assert tf.train.get_global_step(first) is step


def test_functions_of_arrays_take_the_arguments_of_graphs() -> None:
    grid = np.arange(12, dtype=np.float32).reshape(3, 4)
    losses = tf2.nn.sparse_softmax_cross_entropy_with_logits([0, 1, 2], grid)
    expected = np.log(np.exp(grid).sum(1)) - grid[[0, 1, 2], [0, 1, 2]]
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    assert tf2.while_loop(lambda n: True, lambda n: n + 1, [0], maximum_iterations=3)[0] == 3


def test_options_of_datasets_are_checked_when_they_are_set():
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = "off"
    options.threading.private_threadpool_size = 2
    assert options.auto_shard_policy is tf.data.experimental.AutoShardPolicy.OFF
    with pytest.raises(ValueError, match="auto_shard_policy must be one of"):
        options.auto_shard_policy = "some"
    with pytest.raises(TypeError, match="auto_shard_polcy has no effect"):
        options.experimental_distribute.auto_shard_polcy = "off"


def test_a_summary_goes_where_the_program_wants_it(capsys):
    lines = []
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(2,))])
    model.summary(print_fn=lines.append)
    assert "Parameters: 3" in lines[0]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("shape", [None, [None, 2, 2], [None, None, None]])
def test_models_compute_of_tensors_of_graphs_whatever_is_known_of_their_shapes(shape):
    layers, ones = tf2.keras.layers, np.ones((3, 2, 2), np.float32)
    with tf.Graph().as_default():
        x, start = tf.placeholder(tf.float32, shape), tf2.keras.Input((2, 2))
        of_rows = layers.Dense(1, "softplus", kernel_initializer="ones")
        sequence = tf2.keras.Sequential([layers.Flatten(input_shape=(2, 2)), of_rows])
        functional = tf2.keras.Model(start, of_rows(layers.Flatten()(start)))
        of_graph = [sequence(x, training=False), functional(x, training=False)]
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for output in session.run(of_graph, {x: ones}):
                np.testing.assert_allclose(output, np.log1p(np.exp(np.full((3, 1), 4.0))), 1e-6)


def test_names_of_the_first_generation_work_with_arrays_or_say_where_they_work() -> None:
    """Outside of graphs `tf.compat.v1` makes no operation of a graph."""
    v1 = tf2.compat.v1
    w = v1.get_variable("w", [2], initializer=tf2.ones_initializer())
    step = v1.train.get_or_create_global_step()
    v1.train.GradientDescentOptimizer(0.25).minimize(lambda: w * w, global_step=step)
    assert (w.numpy().tolist(), step.numpy()) == ([0.5, 0.5], 1)
    assert v1.train.get_or_create_global_step() is step
    optimizer = v1.train.MomentumOptimizer(1.0, 0.5)
    for _ in range(2):
        optimizer.apply_gradients([(np.float32([1.0, 0.0]), w)])
    assert v1.assign_add(w, [0.0, 1.0]).numpy().tolist() == [-2.0, 1.5]
    assert v1.global_variables_initializer() is None
    elements = v1.data.make_one_shot_iterator(tf2.data.Dataset.range(3, 4))
    assert elements.get_next().numpy() == 3
    for value in (
        v1.losses.mean_squared_error([1.0, 2.0], [1.0, 4.0]),
        v1.random_normal([2]),
        v1.nn.dropout(tf2.ones([2]), keep_prob=0.5),
        v1.to_float([1]),
    ):
        assert tf2.is_tensor(value)
        assert value.numpy().dtype == np.float32
    for make in (
        lambda: v1.layers.dense(np.ones((1, 2)), 3),
        lambda: v1.summary.scalar("loss", 1.0),
        lambda: v1.metrics.mean([1.0]),
    ):
        with pytest.raises(RuntimeError, match=r"makes an operation of a graph: .*as_default"):
            make()
