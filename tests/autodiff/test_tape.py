"""What a tape records, for how long, and what it gives back."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.autodiff import GradientTape, Tracked, custom_gradient
from ndistribute.context import Frame, current_frame, entered
from tests.autodiff.standin import StandInVariable

HERE = re.escape(__file__)


def test_sources_keep_their_structure():
    with GradientTape() as tape:
        nest = tape.watch({"b": [1.0, np.ones(2, np.float32)], "a": (3.0,)})
        y = nest["b"][0] * nest["a"][0] + np.sum(nest["b"][1])
    gradient = tape.gradient(y, nest)
    assert list(gradient) == ["b", "a"]
    assert gradient["b"][0] == 3
    assert gradient["b"][1].tolist() == [1, 1]
    assert gradient["b"][1].dtype == np.float32
    assert gradient["a"] == (1,)


def test_the_target_may_be_a_nest_of_arrays_and_constants():
    with GradientTape() as tape:
        x = tape.watch(np.array([1.0, 2.0]))
        target = {"square": x * x, "again": [x[0], x[0]], "constant": 3.0, "array": np.ones(2)}
    assert tape.gradient(target, x).tolist() == [4, 4]


def test_output_gradients_are_carried_on():
    with GradientTape(persistent=True) as tape:
        x = tape.watch(np.array([1.0, 2.0]))
        y, z = x * 3, np.sum(x)
    seed = np.array([1, 10])
    assert tape.gradient(y, x, output_gradients=seed).tolist() == [3, 30]
    assert tape.gradient([y, z], x, output_gradients=[seed, None]).tolist() == [4, 31]
    with pytest.raises(ValueError, match=r"shape \(3,\).*\(2,\)"):
        tape.gradient(y, x, output_gradients=np.ones(3))
    with pytest.raises(ValueError, match="structure"):
        tape.gradient([y, z], x, output_gradients=np.ones(2))


def test_output_gradients_are_not_changed():
    seed = np.ones(2)
    with GradientTape() as tape:
        x = tape.watch(np.ones(2))
        y = x + 0
    gradient = tape.gradient([y, y], x, output_gradients=[seed, seed])
    gradient += 1
    assert seed.tolist() == [1, 1]


@pytest.mark.parametrize(("mode", "expected"), [("none", None), ("zero", 0), ("ZERO", 0)])
def test_unconnected_sources(mode, expected):
    variable = StandInVariable(np.float32(3))
    with GradientTape() as tape:
        x, y = tape.watch((2.0, np.ones(3, np.float32)))
        z = x * x
    gradients = tape.gradient(z, [y, x, variable], unconnected_gradients=mode)
    assert gradients[1] == 4
    if expected is None:
        assert gradients[0] is None
        assert gradients[2] is None
    else:
        assert gradients[0].tolist() == [0, 0, 0]
        assert gradients[0].dtype == np.float32
        assert (gradients[2].shape, gradients[2].dtype) == ((), np.float32)


def test_an_unknown_mode_is_refused():
    with GradientTape() as tape:
        x = tape.watch(2.0)
    with pytest.raises(ValueError, match="'none' or 'zero'"):
        tape.gradient(x, x, "nothing")
    assert tape.gradient(x, x) == 1


@pytest.mark.parametrize("target", [3.0, np.ones(2), None, [1, 2]], ids=str)
def test_a_target_that_was_not_recorded_has_no_gradients(target):
    with GradientTape() as tape:
        x, y = tape.watch((1.0, 2.0))
    assert tape.gradient(target, [x, y]) == [None, None]


def test_a_source_can_be_the_target_or_lie_between():
    with GradientTape(persistent=True) as tape:
        x = tape.watch(np.array([1.0, 2.0]))
        h = x * 3
        y = h * h
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


def test_one_gradient_unless_persistent():
    with GradientTape() as tape:
        x = tape.watch(2.0)
        y = x * x
    assert tape.gradient(y, x) == 4
    with pytest.raises(RuntimeError, match="persistent=True"):
        tape.gradient(y, x)


def test_a_persistent_tape_gives_the_same_again():
    with GradientTape(persistent=True) as tape:
        x = tape.watch(np.array([1.0, 2.0]))
        y = np.tanh(x) * x + x[0] - np.max(x)
        z = y * y
    first = tape.gradient(z, x)
    assert tape.gradient(z, x).tolist() == first.tolist()
    assert tape.gradient(y, x).tolist() == tape.gradient(y, x).tolist()


def test_gradient_inside_the_block_ends_the_tape():
    with GradientTape() as tape:
        x = tape.watch(3.0)
        y = x * x
        assert tape.gradient(y, x) == 6
        assert not isinstance(x * x, Tracked)
    assert current_frame().recorder is None


def test_gradient_inside_the_block_of_a_persistent_tape():
    with GradientTape(persistent=True) as tape:
        x = tape.watch(3.0)
        y = x * x
        assert tape.gradient(y, x) == 6
        z = y * x
    assert tape.gradient(z, x) == 27


def test_nothing_is_recorded_outside():
    with GradientTape() as tape:
        x = tape.watch(3.0)
    assert not isinstance(x * x, Tracked)
    assert not isinstance(np.sum(x), Tracked)
    assert not isinstance(x[...], Tracked)
    assert not isinstance(np.concatenate([np.atleast_1d(x)]), Tracked)
    with GradientTape() as other:
        y = other.watch(2.0)
        z = x * y
    assert other.gradient(z, [x, y])[0] is None
    assert tape.gradient(z, x) is None


def test_a_tracked_array_can_be_watched_by_another_tape():
    with GradientTape() as tape:
        x = tape.watch(3.0)
        assert tape.watch(x) is x
    with GradientTape() as other:
        y = other.watch(x)
        z = y * y
    assert other.gradient(z, y) == 6


def test_stop_recording_pauses():
    variable = StandInVariable(2.0)
    with GradientTape() as tape:
        x = tape.watch(3.0)
        with tape.stop_recording():
            frozen = x * variable
            assert not isinstance(frozen, Tracked)
            assert not isinstance(variable.tracked_value(), Tracked)
        y = x * frozen * variable
    assert [float(g) for g in tape.gradient(y, [x, variable])] == [12, 18]


def test_stop_recording_survives_an_exception():
    with GradientTape() as tape:
        x = tape.watch(3.0)
        with pytest.raises(KeyError), tape.stop_recording():
            raise KeyError
        y = x * x
    assert tape.gradient(y, x) == 6


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
    with pytest.raises(TypeError, match=r"ndarray.*tape\.watch"):
        tape.gradient(x, np.ones(2))
    with pytest.raises(TypeError, match=r"int64.*only variables of a floating dtype"):
        tape.gradient(x, [StandInVariable(np.int64(3))])
    assert tape.gradient(x, x).tolist() == [1, 1]


def test_an_exception_in_the_block_ends_the_recording():
    with pytest.raises(KeyError), GradientTape():
        raise KeyError
    assert current_frame().recorder is None


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
                y = inner.watch(x)
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


def test_a_scope_inside_a_tape_is_recorded():
    with GradientTape() as tape:
        x = tape.watch(3.0)
        with scope():
            y = x * x
        z = y * x
    assert tape.gradient(z, x) == 27


def test_a_tape_can_pause_and_end_inside_a_scope():
    with GradientTape() as tape:
        x = tape.watch(3.0)
        with scope(), scope():
            with tape.stop_recording():
                assert not isinstance(x * x, Tracked)
            y = x * x
            assert isinstance(y, Tracked)
            assert tape.gradient(y, x) == 6
            assert not isinstance(x * x, Tracked)


def test_a_tape_that_ends_in_an_inner_scope_records_in_none():
    with ExitStack() as tapes, GradientTape() as tape:
        tapes.enter_context(outer := GradientTape())
        x = outer.watch(3.0)
        with scope():
            with scope():
                tapes.close()
                tape._close()
            assert current_frame().recorder is None
            assert not isinstance(x * x, Tracked)


def test_a_graph_that_is_closed_takes_no_new_tape():
    with GradientTape() as tape:
        x = tape.watch(3.0)
        with scope(), scope():
            y = x * x
            with scope():
                assert tape.gradient(y, x) == 6
            with GradientTape() as other:
                w = other.watch(2.0)
                z = x * w * w
            assert other.gradient(z, [x, w]) == [None, 12]


def test_tapes_opened_together_both_differentiate():
    with GradientTape() as first, GradientTape() as second:
        x = first.watch(2.0)
        y = second.watch(5.0)
        z, w = x * y, x * x * y
    assert [float(g) for g in first.gradient(z, [x, y])] == [5, 2]
    assert [float(g) for g in second.gradient(w, [x, y])] == [20, 4]


def test_an_inner_tape_sees_only_what_it_was_open_for():
    with GradientTape(persistent=True) as outer:
        x = outer.watch(2.0)
        y = x * x
        with GradientTape() as inner:
            z = y * 3
        after = z * z
    assert inner.gradient(z, y) == 3
    assert outer.gradient(z, x) == 12
    assert outer.gradient(after, [x, y, z]) == [12 * 24, 3 * 24, 24]


def test_an_inner_tape_takes_what_came_before_as_constant():
    with GradientTape() as outer:
        x = outer.watch(2.0)
        y = x * x
        with GradientTape() as inner:
            z = y * 3
    assert inner.gradient(z, x) is None
    assert outer.gradient(z, x) == 12


def test_pausing_one_of_two_tapes():
    with GradientTape() as first, GradientTape() as second:
        x = first.watch(2.0)
        y = x * x
        with first.stop_recording():
            y = y * x
        z = y * x
    assert first.gradient(z, x) == 8
    assert second.gradient(z, x) == 32


def test_gradients_are_constants_to_an_outer_tape():
    with GradientTape() as outer:
        x = outer.watch(3.0)
        with GradientTape() as inner:
            y = x * x
        slope = inner.gradient(y, x)
        z = slope * x
    assert type(slope) is np.ndarray
    assert outer.gradient(z, x) == 6


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


def test_threads_record_for_themselves():
    w = StandInVariable(np.ones((3, 2)))
    barrier = threading.Barrier(4)

    def step(k):
        x = np.full((5, 3), k + 1.0)
        results = []
        for _ in range(20):
            barrier.wait(timeout=50)
            with GradientTape() as tape:
                h = np.tanh(x @ w) * np.float64(k)
                barrier.wait(timeout=50)
                loss = np.sum(h * h)
            results.append(tape.gradient(loss, w))
        return results

    def alone(k):
        x = np.full((5, 3), k + 1.0)
        with GradientTape() as tape:
            h = np.tanh(x @ w) * np.float64(k)
            loss = np.sum(h * h)
        return tape.gradient(loss, w)

    with ThreadPoolExecutor(4) as pool:
        for k, results in enumerate(pool.map(step, range(4))):
            for result in results:
                np.testing.assert_array_equal(result, alone(k))


def test_a_tracked_array_is_refused_in_another_thread():
    with GradientTape() as tape:
        x = tape.watch(3.0)

        def other():
            assert current_frame().recorder is None
            with pytest.raises(TypeError, match="in another thread"):
                x * x
            assert float(x) == 3
            constant = nd.stop_gradient(x)
            with GradientTape() as own:
                y = own.watch(2.0)
                z = constant * y
            return own.gradient(z, [x, y])

        with ThreadPoolExecutor(1) as pool:
            to_x, to_y = pool.submit(other).result(timeout=50)
        z = x * x
    assert to_x is None
    assert to_y == 3
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
        refusal = rf"v.* is read at {HERE}:\d+ in a step of strategy\.run"

        with GradientTape() as tape:
            for read in (lambda: v * 2, v.read_value, lambda: nd.softmax(v)):
                with pytest.raises(TypeError, match=refusal):
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
