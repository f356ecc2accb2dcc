"""Sessions, their managers, hooks and options of TensorFlow 1."""

import time

import pytest

import ndistribute as nd
from ndistribute import errors
from ndistribute.compat import tf1 as tf


@pytest.fixture(autouse=True)
def graph():
    with tf.Graph().as_default() as made:
        yield made


def test_a_manager_initialises_restores_and_recovers(tmp_path):
    x = tf.placeholder(tf.float32, [2])
    w = tf.Variable(x, name="w")
    saver = tf.train.Saver({"w": w})
    ready = tf.report_uninitialized_variables()
    manager = tf.train.SessionManager(ready_op=ready, recovery_wait_secs=1)
    where = {"saver": saver, "checkpoint_dir": str(tmp_path)}
    with pytest.raises(RuntimeError, match=r"no checkpoint in .*: pass init_op"):
        manager.prepare_session("", **where)
    session, is_ready = manager.recover_session("", **where)
    assert (is_ready, session.run(ready).tolist()) == (False, [b"w"])
    session.close()
    init = {"init_op": tf.global_variables_initializer(), "init_feed_dict": {x: [1.0, 2.0]}}
    with manager.prepare_session("", **init, **where) as session:
        assert session.run(w).tolist() == [1.0, 2.0]
        session.run(w.initializer, {x: [3.0, 4.0]})
        saver.save(session, str(tmp_path / "model"))
    with manager.prepare_session("", **where) as session:
        assert session.run(w).tolist() == [3.0, 4.0]
    session, is_ready = manager.recover_session("", **where)
    assert (is_ready, session.run(w).tolist()) == (True, [3.0, 4.0])
    session.close()


def test_a_manager_runs_what_each_session_needs_and_waits_for_another_process():
    w = tf.Variable(1.0, name="w")
    local = tf.Variable(2.0, collections=[tf.GraphKeys.LOCAL_VARIABLES], name="local")
    ops = {"local_init_op": local.initializer, "ready_op": tf.report_uninitialized_variables()}
    manager = tf.train.SessionManager(**ops)
    started = manager.prepare_session("", init_fn=lambda session: session.run(w.initializer))
    with started as session:
        assert session.run([w, local]) == [1.0, 2.0]
    with pytest.raises(
        errors.FailedPreconditionError,
        match="after the initialisation these variables have no value",
    ):
        manager.prepare_session("")
    with nd.Server.create_local_server() as server:
        with pytest.raises(tf.errors.DeadlineExceededError, match="Is the chief running"):
            manager.wait_for_session(server.target, max_wait_secs=0)
        with tf.Session(server.target) as chief:
            chief.run(w.initializer)
            with manager.wait_for_session(server.target, max_wait_secs=10) as session:
                assert session.run([w, local]) == [1.0, 2.0]
            other = tf.report_uninitialized_variables([tf.Variable(3.0)])
            waiting = tf.train.SessionManager(**ops, ready_for_local_init_op=other)
            with pytest.raises(tf.errors.DeadlineExceededError):
                waiting.wait_for_session(server.target, max_wait_secs=0)


def test_a_timer_of_seconds_or_steps_says_when_and_how_much_has_passed():
    timer = tf.train.SecondOrStepTimer(every_steps=3)
    assert timer.last_triggered_step() is None
    assert timer.should_trigger_for_step(1)
    assert timer.update_last_triggered_step(1) == (None, None)
    assert [timer.should_trigger_for_step(step) for step in (1, 3, 4)] == [False, False, True]
    before = time.monotonic()
    seconds, steps = timer.update_last_triggered_step(5)
    assert (steps, timer.last_triggered_step()) == (4, 5)
    assert 0 < seconds <= time.monotonic() - before + seconds
    timer.reset()
    assert timer.should_trigger_for_step(5)
    now = tf.train.SecondOrStepTimer(every_secs=0.0)
    now.update_last_triggered_step(1)
    assert [now.should_trigger_for_step(step) for step in (1, 2)] == [False, True]
    late = tf.train.SecondOrStepTimer(every_secs=1000.0)
    late.update_last_triggered_step(1)
    assert not late.should_trigger_for_step(2)
    for both in ({}, {"every_secs": 1.0, "every_steps": 1}):
        with pytest.raises(ValueError, match="either a number of steps or"):
            tf.train.SecondOrStepTimer(**both)


@pytest.mark.parametrize("on_a_server", [False, True])
def test_a_run_ends_after_the_time_that_its_options_allow(on_a_server):
    forever = tf.while_loop(lambda i: i >= 0, lambda i: i * 1, [tf.constant(1)])
    quick = tf.constant(3.0)
    options = tf.RunOptions(timeout_in_ms=200)
    server = nd.Server.create_local_server() if on_a_server else None
    with tf.Session(server.target if server else "") as session:
        assert session.run(quick, options=options, run_metadata=tf.RunMetadata()) == 3.0
        with pytest.raises(tf.errors.DeadlineExceededError):
            session.run(forever, options=options)
    with tf.train.MonitoredSession() as session:
        assert session.run(quick, options=options) == 3.0
        with pytest.raises(tf.errors.DeadlineExceededError):
            session.run(forever, options=options)
    if server is not None:
        server.stop()


def test_hooks_feed_log_and_listen(tmp_path, caplog):
    caplog.set_level("INFO", "ndistribute")
    calls = []

    class Listener(tf.train.CheckpointSaverListener):
        def begin(self):
            calls.append("begin")

        def before_save(self, session, global_step_value):
            calls.append(("before", global_step_value))

        def after_save(self, session, global_step_value):
            calls.append(("after", global_step_value))

        def end(self, session, global_step_value):
            calls.append(("end", global_step_value))

    x = tf.placeholder(tf.float32, [])
    numbers = iter(range(10, 100))
    step = tf.train.get_or_create_global_step()
    add = tf.assign_add(step, 1)
    final = tf.train.FinalOpsHook({"step": step})
    watching = [
        tf.train.FeedFnHook(lambda: {x: next(numbers)}),
        tf.train.LoggingTensorHook({"x is": x * 1.0}, every_n_secs=1000),
        tf.train.LoggingTensorHook({"the step is": step}, at_end=True),
        tf.train.CheckpointSaverHook(str(tmp_path), save_steps=2, listeners=[Listener()]),
        tf.train.StopAtStepHook(num_steps=3),
        final,
    ]
    seen = []
    with tf.train.MonitoredSession(hooks=watching) as session:
        while not session.should_stop():
            seen.append(session.run([x, add])[0])
    assert seen == [10.0, 11.0, 12.0]
    assert final.final_ops_values == {"step": 3}
    told = [text for text in caplog.messages if " is = " in text]
    assert told == ["x is = 10.0", "the step is = 3"]
    saves = [("before", 0), ("after", 0), ("before", 2), ("after", 2), ("before", 3), ("after", 3)]
    assert calls == ["begin", *saves, ("end", 3)]


def test_a_hook_may_not_feed_what_is_fed():
    x = tf.placeholder(tf.float32, [])
    feeding = tf.train.FeedFnHook(lambda: {x: 1.0})
    twice = pytest.raises(RuntimeError, match=r"FeedFnHook feeds .* another hook feeds it too")
    with tf.train.MonitoredSession(hooks=[feeding]) as session, twice:
        session.run(x, {x: 2.0})


def test_text_is_bytes_in_all_sessions(tmp_path):
    words = tf.constant(["a", "b"])
    seen = []

    class Watching(tf.train.SessionRunHook):
        def after_create_session(self, session, coord):
            seen.append(session.run(words).tolist())

    with tf.Session() as session:
        seen.append(session.run(words).tolist())
    with tf.train.Supervisor().managed_session() as session:
        seen.append(session.run(words).tolist())
    with tf.train.MonitoredSession(hooks=[Watching()]) as session:
        seen.append(session.run(words).tolist())
        seen.append(session.run_step_fn(lambda c: c.run_with_hooks(words)).tolist())
    assert seen == [[b"a", b"b"]] * 5


def test_a_warm_start_takes_trainable_or_all_variables(tmp_path):
    with tf.Graph().as_default(), tf.Session() as session:
        for name in ("dense/w", "dense/b", "other"):
            tf.Variable(5.0, name=name)
        tf.Variable(6.0, trainable=False, name="dense/count")
        session.run(tf.global_variables_initializer())
        path = tf.train.Saver().save(session, str(tmp_path / "model"))

    def values(*args, **options):
        with tf.Graph().as_default(), tf.Session() as session:
            made = [tf.Variable(0.0, name=name) for name in ("dense/w", "dense/b", "other")]
            made.append(tf.Variable(0.0, trainable=False, name="dense/count"))
            tf.train.warm_start(path, *[each(made) for each in args], **options)
            session.run(tf.global_variables_initializer())
            return [float(value) for value in session.run(made)]

    assert values() == [5.0, 5.0, 5.0, 0.0]
    assert values(lambda made: "dense/") == [5.0, 5.0, 0.0, 0.0]
    assert values(lambda made: ["dense/"]) == [5.0, 5.0, 0.0, 6.0]
    assert values(lambda made: [made[1]]) == [0.0, 5.0, 0.0, 0.0]
    renamed = {"dense/w": "dense/count"}
    assert values(lambda made: "dense/w", var_name_to_prev_var_name=renamed)[0] == 6.0
    with pytest.raises(ValueError, match="matches none of"):
        values(lambda made: "conv")


def test_the_options_of_a_hook_hold_for_the_run():
    seen = []

    class Watching(tf.train.SessionRunHook):
        def before_run(self, run_context):
            return tf.train.SessionRunArgs(None, options=tf.RunOptions(timeout_in_ms=200))

        def after_run(self, run_context, run_values):
            seen.append((run_values.results, run_values.options.timeout_in_ms))

    forever = tf.while_loop(lambda i: i >= 0, lambda i: i * 1, [tf.constant(1)])
    with tf.train.MonitoredSession(hooks=[Watching()]) as session:
        assert session.run(tf.get_default_graph().get_tensor_by_name("constant:0")) == 1
        with pytest.raises(tf.errors.DeadlineExceededError):
            session.run(forever)
    assert seen == [(None, 200)]


def test_mistakes_in_hooks_are_said(tmp_path):
    with pytest.raises(ValueError, match="number of steps must be 1 or more, got 0"):
        tf.train.LoggingTensorHook(["x"], every_n_iter=0)
    tf.train.get_or_create_global_step()
    both = {"saver": tf.train.Saver(), "scaffold": tf.train.Scaffold()}
    with pytest.raises(ValueError, match="got both saver and scaffold"):
        tf.train.CheckpointSaverHook(str(tmp_path), save_steps=1, **both)
    nothing = tf.train.FinalOpsHook(None)
    with tf.train.MonitoredSession(hooks=[nothing]):
        pass
    assert nothing.final_ops_values is None


def test_a_session_begins_with_the_checkpoint_of_a_path(tmp_path):
    step = tf.train.get_or_create_global_step()
    add = tf.assign_add(step, 1)
    saving = tf.train.CheckpointSaverHook(str(tmp_path), save_steps=1)
    with tf.train.MonitoredSession(hooks=[saving]) as session:
        for _ in range(3):
            session.run(add)
    path = str(tmp_path / "model.ckpt-2")
    creator = tf.train.ChiefSessionCreator(checkpoint_filename_with_path=path)
    with tf.train.MonitoredSession(creator) as session:
        assert session.run(step) == 2


def test_a_supervisor_takes_a_manager_and_writes_nothing_without_a_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    w = tf.Variable(1.0)
    local = tf.Variable(w * 2, collections=[tf.GraphKeys.LOCAL_VARIABLES])
    manager = tf.train.SessionManager(local_init_op=local.initializer)
    supervisor = tf.train.Supervisor(logdir="", session_manager=manager, save_model_secs=7)
    session = supervisor.prepare_or_wait_for_session()
    assert session.run(local) == 2.0
    assert (supervisor.save_model_secs, supervisor.summary_writer) == (7, None)
    assert not supervisor.should_stop()
    supervisor.stop()
    session.close()
    assert supervisor.should_stop()
    assert not list(tmp_path.iterdir())
    other = tf.train.Supervisor(is_chief=False)
    with pytest.raises(RuntimeError, match="only the chief"):
        other.start_standard_services(None)
