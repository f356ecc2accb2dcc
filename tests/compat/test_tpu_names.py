"""A script for TPUs runs by the names that it has in TensorFlow."""

from __future__ import annotations

import numpy as np
import pytest

from ndistribute.compat import tf
from ndistribute.context import current_trace


def test_a_script_for_tpus_runs_by_tensorflows_names():
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu="")
    tf.config.experimental_connect_to_cluster(resolver)
    assert len(tf.tpu.experimental.initialize_tpu_system(resolver)) == 8
    strategy = tf.distribute.TPUStrategy(resolver)
    assert strategy.num_replicas_in_sync == 8
    with strategy.scope():
        v = tf.Variable(1.0)

    @tf.function(jit_compile=True)
    def double(x):
        return 2 * x

    @tf.function
    def step():
        return strategy.run(lambda x: double(v * x), args=(np.float32(3),))

    assert strategy.reduce("sum", step()) == 48
    assert double(np.float32(2)) == 4
    assert len(double.compilations) == 1
    strategy.close()
    tf.distribute.experimental.TPUStrategy(resolver).close()


@pytest.mark.parametrize("jit_compile", [True, False, None, "auto"])
def test_models_compile_their_steps_if_they_are_told_to(jit_compile):
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile(loss="mse", jit_compile=jit_compile)
    traced = []
    model.layers[0].activation = lambda x: traced.append(current_trace() is not None) or x
    model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0)
    assert any(traced) == (jit_compile is True)


@pytest.mark.parametrize("kind", ["MirroredStrategy", "TPUStrategy"])
def test_a_source_that_is_not_watched_in_place_says_what_to_write(kind):
    def step(x, watched_alone):
        with tf.GradientTape() as tape:
            known = tape.watch(x)
            y = (x if watched_alone else known) ** 2.0
        return tape.gradient(y, x if watched_alone else known)

    with getattr(tf.distribute, kind)() as strategy:
        with pytest.raises(ValueError, match=r"write x = tape\.watch\(x\)"):
            strategy.run(step, args=(np.ones(2), True))
        gradients = strategy.run(step, args=(np.ones(2), False))
        assert np.array_equal(strategy.experimental_local_results(gradients)[0], [2.0, 2.0])
