"""What a tape records, for how long, and what it gives back."""

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.autodiff import GradientTape, Tracked, custom_gradient
from ndistribute.context import Frame, current_frame, entered
from tests.autodiff.standin import StandInVariable

HERE = re.escape(__file__)


def test_sources_and_targets_are_nests():
    with GradientTape(persistent=True) as tape:
        nest = tape.watch({"b": [1.0, np.ones(2, np.float32)], "a": (3.0,)})
        y = nest["b"][0] * nest["a"][0] + np.sum(nest["b"][1])
        target = {"y": y, "again": [y, y], "constant": 3.0, "array": np.ones(2)}
    gradient = tape.gradient(y, nest)
    assert list(gradient) == ["b", "a"]
    assert gradient["b"][1].tolist() == [1, 1]
    assert gradient["b"][1].dtype == np.float32
    assert gradient["a"] == (1,)
    assert tape.gradient(target, nest["b"][0]) == 9
    for constant in (3.0, np.ones(2), [1, 2]):
        assert tape.gradient(constant, nest["a"]) == (None,)
    for lost in (None, [y, None]):
        with pytest.raises(TypeError, match="a target is None"):
            tape.gradient(lost, nest["a"])


def test_output_gradients_are_carried_on():
    with GradientTape(persistent=True) as tape:
        x = tape.watch(np.array([1.0, 2.0]))
        y, z = x * 3, np.sum(x)
    seed = np.array([1.0, 10.0])
    assert tape.gradient(y, x, output_gradients=seed).tolist() == [3, 30]
    assert tape.gradient([y, z], x, output_gradients=[seed, None]).tolist() == [4, 31]
    gradient = tape.gradient([x, x], x, output_gradients=[seed, seed])
    gradient += 1
    assert seed.tolist() == [1, 10]
    with pytest.raises(ValueError, match=r"shape \(3,\).*\(2,\)"):
        tape.gradient(y, x, output_gradients=np.ones(3))
    with pytest.raises(ValueError, match="structure"):
        tape.gradient([y, z], x, output_gradients=np.ones(2))


def test_unconnected_sources():
    variable = StandInVariable(np.float32(3))
    with GradientTape(persistent=True) as tape:
        x, y = tape.watch((2.0, np.ones(3, np.float32)))
        z = x * x
    assert tape.gradient(z, [y, x, variable]) == [None, 4, None]
    assert tape.gradient(z, variable) is None
    zeros, four, zero = tape.gradient(z, [y, x, variable], unconnected_gradients="ZERO")
    assert (zeros.tolist(), zeros.dtype, four) == ([0, 0, 0], np.float32, 4)
    assert (zero.shape, zero.dtype, zero) == ((), np.float32, 0)
    with pytest.raises(ValueError, match="'none' or 'zero'"):
        tape.gradient(x, x, "nothing")


def test_a_source_can_be_the_target_or_lie_between():
    with GradientTape(persistent=True) as tape:
        x = tape.watch(np.array([1.0, 2.0]))
        h = x * 3
        y = h * h
        late = tape.watch(1.0)
    assert tape.gradient(y, late) is None
    assert tape.gradient(x, x).tolist() == [1, 1]
    assert [g.tolist() for g in tape.gradient(y, [h, x, y])] == [[6, 12], [18, 36], [1, 1]]
    for target, source in [(h, y), (x, h), ([x, h], [y])]:
        with pytest.raises(ValueError, match=r"swapped.*tape\.gradient\(loss, variables\)"):
            tape.gradient(target, source)


def test_gradients_are_arrays_that_the_caller_owns():
    with GradientTape(persistent=True) as tape:
        x, y, z = tape.watch((np.ones((2, 2)), np.ones((2, 2)), np.float32(1)))
        target = x + y + z * np.ones(1, np.float32)
    gradients = tape.gradient(target, [x, y, z, x])
    assert [type(gradient) for gradient in gradients] == [np.ndarray] * 4
    for gradient in gradients:
        np.add(gradient, 1, out=gradient)
    assert not any(np.shares_memory(a, b) for k, a in enumerate(gradients) for b in gradients[:k])
    assert tape.gradient(target, x).tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("persistent", [True, False])
def test_one_gradient_unless_persistent(persistent):
    with GradientTape(persistent) as tape:
        x = tape.watch(3.0)
        y = x * x
        assert tape.gradient(y, x) == 6
        z = y * x
        assert isinstance(z, Tracked) is persistent
    assert current_frame().recorder is None
    if persistent:
        assert tape.gradient(z, x) == tape.gradient(z, x) == 27
    else:
        message = r"not persistent.*pass all sources together.*persistent=True"
        with pytest.raises(RuntimeError, match=message):
            tape.gradient(y, x)


def test_nothing_is_recorded_outside():
    with GradientTape() as tape:
        x = tape.watch(3.0)
        assert tape.watch(x) is x
    for one in (x * x, np.sum(x), x[...], np.concatenate([np.atleast_1d(x)])):
        assert not isinstance(one, Tracked)
    with GradientTape() as other:
        y, again = other.watch((2.0, x))
        z = x * y * again
    assert other.gradient(z, [x, y, again]) == [None, 9, 6]
    assert tape.gradient(z, x) is None


def test_stop_recording_pauses():
    variable = StandInVariable(2.0)
    with GradientTape() as tape:
        x = tape.watch(3.0)
        with tape.stop_recording():
            frozen = x * variable
            assert not isinstance(frozen, Tracked)
            assert not isinstance(variable.tracked_value(), Tracked)
        with pytest.raises(KeyError), tape.stop_recording():
            raise KeyError
        y = x * frozen * variable
    assert [float(g) for g in tape.gradient(y, [x, variable])] == [12, 18]
    with pytest.raises(KeyError), GradientTape():
        raise KeyError
    assert current_frame().recorder is None


def test_wrong_uses_say_so():
    tape = GradientTape()
    with pytest.raises(RuntimeError, match="with block"):
        tape.watch(1.0)
    with pytest.raises(RuntimeError, match="with block"):
        tape.gradient(1.0, [])
    with pytest.raises(RuntimeError, match="is recording"), tape.stop_recording():
        pass
    with tape:
        x = tape.watch(np.ones(2))
        with pytest.raises(RuntimeError, match="create a new one"), tape:
            pass
        with pytest.raises(TypeError, match=r"int64.*astype"):
            tape.watch(np.ones(2, np.int64))
        with tape.stop_recording(), pytest.raises(RuntimeError, match="is recording"):
            tape.stop_recording().__enter__()
    with pytest.raises(TypeError, match=r"ndarray.*variables.*tape\.watch\(array\)"):
        tape.gradient(x, np.ones(2))
    with pytest.raises(TypeError, match="is steps of dtype int64: only variables of a float"):
        tape.gradient(x, [nd.Variable(3, name="steps")])
    assert tape.gradient(x, x).tolist() == [1, 1]


def test_a_tape_records_in_its_own_frame_only():
    with GradientTape() as tape:
        x = tape.watch(3.0)
        with entered(Frame(None, None)):
            assert x > 1
            for compute in (
                lambda x: x * 2,
                lambda x: 2 * x,
                np.exp,
                np.sum,
                lambda x: x[...],
                lambda x: np.where(True, 0.0, x),
                nd.softmax,
            ):
                with pytest.raises(TypeError, match=rf"{HERE}:\d+ computes.*records elsewhere"):
                    compute(x)
            with GradientTape() as inner:
                with pytest.raises(TypeError, match=r"GradientTape\.watch .* records elsewhere"):
                    inner.watch(x)
                y = inner.watch(nd.stop_gradient(x))
                z = y * y
                with pytest.raises(TypeError, match="records elsewhere"):
                    np.stack([x, y])
            assert inner.gradient(z, y) == 6
            assert nd.stop_gradient(x) * 2 == 6
        with entered(Frame(None, None, merging=True)):
            assert not isinstance(x * x, Tracked)
        w = x * x * x
    assert tape.gradient(w, x) == 27


def scope():
    """Enter a frame as a strategy's scope does, which goes on recording."""
    return entered(Frame(None, None, current_frame().recorder))


def test_a_tape_can_pause_and_end_inside_a_scope():
    with GradientTape() as tape:
        x = tape.watch(3.0)
        with scope(), scope():
            with tape.stop_recording():
                assert not isinstance(x * x, Tracked)
            y = x * x
            with scope():
                assert tape.gradient(y, x) == 6
            assert not isinstance(x * x, Tracked)
            with GradientTape() as other:
                w = other.watch(2.0)
                z = x * w * w
            assert other.gradient(z, [x, w]) == [None, 12]
    with ExitStack() as tapes, GradientTape() as tape:
        tapes.enter_context(outer := GradientTape())
        x = outer.watch(3.0)
        with scope():
            with scope():
                tapes.close()
                tape._close()
            assert current_frame().recorder is None


def test_each_of_several_tapes_sees_what_it_was_open_for():
    with GradientTape(persistent=True) as outer:
        x = outer.watch(2.0)
        y = x * x
        with GradientTape(persistent=True) as inner:
            w = inner.watch(5.0)
            z = y * 3 * w
            slope = inner.gradient(z, y)
        after = z * z
        product = slope * x
    assert inner.gradient(z, [x, y, w]) == [None, 15, 12]
    assert outer.gradient(z, [x, w]) == [60, 12]
    assert outer.gradient(after, [x, y, z]) == [2 * 60 * 60, 2 * 60 * 15, 120]
    assert outer.gradient(product, [x, w]) == [15, 6]


def test_pausing_one_of_two_tapes():
    with GradientTape() as first, GradientTape() as second:
        x = first.watch(2.0)
        y = x * x
        with first.stop_recording():
            y = y * x
        z = y * x
    assert first.gradient(z, x) == 8
    assert second.gradient(z, x) == 32


def test_only_what_leads_to_a_source_is_computed():
    calls = []

    @custom_gradient
    def loud(x, name):
        return x * 2, [lambda g: calls.append(name) or g * 2, None]

    with GradientTape() as tape:
        x, y = tape.watch((1.0, 2.0))
        loud(x, "dead end")
        a, b = loud(x, "x"), loud(y, "y")
        z = a * b
        loud(z, "after")
    tape.gradient(z, y)
    assert calls == ["y"]


def test_a_tracked_array_is_refused_in_another_thread():
    with GradientTape() as tape:
        x = tape.watch(3.0)

        def other():
            with pytest.raises(TypeError, match="in another thread"):
                x * x
            assert float(x) == 3
            with GradientTape() as own:
                y = own.watch(2.0)
                z = nd.stop_gradient(x) * y
            return own.gradient(z, [x, y])

        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(other).result(timeout=50) == [None, 3]
        z = x * x
    assert tape.gradient(z, x) == 6


def test_a_step_that_computes_with_what_a_tape_around_it_tracks_is_refused():
    with GradientTape() as tape:
        x = tape.watch(3.0)
        with pytest.raises(TypeError, match=r"in a step of strategy\.run"):
            nd.get_strategy().run(lambda x: x * 2, (x,))
        with pytest.raises(TypeError, match="reduce or gather of a strategy"):
            nd.get_strategy().reduce("sum", x * 2)
    assert nd.get_strategy().reduce("sum", x) == 3


def test_a_variable_that_a_step_reads_under_a_tape_around_it_is_refused():
    """Its gradient was None, without a word."""
    with nd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        v = nd.Variable(3.0, name="v")
        with GradientTape() as tape:
            for read in (lambda: v * 2, v.read_value, lambda: nd.softmax(v)):
                with pytest.raises(TypeError, match=rf"v.* is read at {HERE}:\d+ in a step of"):
                    strategy.run(read)
            with tape.stop_recording():
                strategy.run(lambda: v * 2)
            y = v * 2
        assert tape.gradient(y, v) == 2
        strategy.run(lambda: v * 2)


def test_a_tape_in_a_step_records_under_a_tape_around_it():
    with nd.MirroredStrategy(["cpu:0"]) as strategy:
        v, frozen = nd.Variable(3.0, name="v"), nd.Variable(2.0, trainable=False)
        optimizer = nd.optimizers.SGD(0.5)

        def step():
            with GradientTape() as inner:
                loss = v * v
            with pytest.raises(TypeError, match=r"v.* is read at"):
                v + 0
            optimizer.apply_gradients([(inner.gradient(loss, v), v)])
            return nd.get_replica_context().all_reduce("sum", frozen * nd.stop_gradient(v))

        with GradientTape():
            (total,) = strategy.run(step).values
        assert total == 0
        assert v.numpy() == 0
