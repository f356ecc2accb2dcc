"""What a trace would freeze, lose or compute wrong raises, and says where and what to write."""

from __future__ import annotations

import gc
import itertools
import threading
import time

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.errors import TracingError

pytest.importorskip("jax")

X = np.arange(1.0, 5.0)
OUTSIDE = np.ones(4)
KEPT: list = []
counter = itertools.count()


def writes(x):
    OUTSIDE[0] = x[0]
    return x


def adds_to_outside(x):
    np.add(x, 1, out=OUTSIDE)
    return x


def leaks(x):
    KEPT.append(x * 2)
    return sum(KEPT[-2:])


def makes_variables(x):
    return nd.Variable(np.ones(4)) + x


def needs_loop(x):
    return nd.while_loop(lambda k, y: k < 3, lambda k, y: (k + 1, y + rng().normal()), (0, x))


def writes_in_branch(x):
    y = x * 1

    def write():
        y[0] = 1
        return y * 1

    return nd.cond(x[0] > 0, write, lambda: y)


def tape_around(kind):
    def step(x):
        with nd.GradientTape() as tape:
            x = tape.watch(x)
            if kind == "cond":
                return nd.cond(np.sum(x.value) > 0, lambda: x, lambda: x)
            return nd.while_loop(lambda y: True, lambda y: (y,), (x,))

    return step


def rng():
    return nd.get_replica_context().rng


TRAPS = {
    "a global generator": (lambda x: x + np.random.default_rng().normal(), "traced twice"),
    "the old generator": (lambda x: x + np.random.rand(4), "traced twice"),
    "a clock": (lambda x: x * time.perf_counter(), "traced twice"),
    "a counter": (lambda x: x * next(counter), "traced twice"),
    "a counter that is returned": (lambda x: next(counter), "what it returns"),
    "if": (lambda x: x if x[0] > 0 else -x, "np.where, nd.cond"),
    "while": (lambda x: [None for _ in iter(lambda: bool(x[0] > 0), False)], "nd.while_loop"),
    "range": (lambda x: list(range(x.astype(int)[0])), "nd.while_loop"),
    "float": (lambda x: float(x[0]), "float()"),
    "int": (lambda x: int(x[0]), "int()"),
    "asarray": (np.asarray, "np.asarray"),
    "full": (lambda x: np.full(3, x), "np.ones(n) * x for np.full"),
    "a table": (lambda x: np.arange(3.0)[x.astype(int)], "that x indexes as an argument"),
    "array of arrays": (lambda x: np.array([x, x]), "np.stack"),
    "item": (lambda x: x[0].item(), ".item()"),
    "tolist": (lambda x: x.tolist(), ".tolist()"),
    "a mask": (lambda x: x[x > 2], r"np.where(mask, x, 0)"),
    "unique": (np.unique, "np.unique"),
    "nonzero": (lambda x: np.where(x > 2), "np.where"),
    "a write outside": (writes, "float()"),
    "out= outside": (adds_to_outside, "nd.Variable(array)"),
    "a leak": (leaks, "outside of that step"),
    "variables in each call": (makes_variables, "only in its first call"),
    "random numbers in a loop": (needs_loop, "before the loop"),
    "a write in a branch": (writes_in_branch, "return the new value"),
    "a tape around cond": (tape_around("cond"), "use np.where"),
    "a tape around while_loop": (tape_around("loop"), "a Python loop"),
    "another generator's method": (lambda x: rng().gamma(2.0), "no 'gamma'"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_raises_with_the_line(name):
    function, message = TRAPS[name]
    compiled = nd.function(function)
    with pytest.raises((TracingError, AttributeError, TypeError, ValueError)) as caught:
        compiled(X)
    text = str(caught.value.__cause__ or caught.value)  # NumPy raises a ValueError from ours.
    assert any(part in text for part in message.split("|"))
    if name not in ("a counter that is returned", "variables in each call"):
        assert __file__ in text
    KEPT.clear()
    assert nd.function(lambda x: x + 1)(X)[0] == 2  # All goes on.


def test_a_value_that_leaks_raises_when_it_is_used():
    nd.function(lambda x: KEPT.append(x * 2))(X)
    for use in (lambda v: v + 1, lambda v: v[0], lambda v: v.sum(), lambda v: v.__setitem__(0, 1)):
        with pytest.raises(TracingError, match="outside of that step"):
            use(KEPT[-1])
    KEPT.clear()


def test_an_array_around_a_function_may_not_change_between_calls():
    table = np.arange(4.0)
    compiled = nd.function(lambda x: x * table[1:].sum() + table)
    assert compiled(X)[0] == 6
    np.testing.assert_array_equal(compiled(X), X * 6 + table)
    table[0] = 7
    with pytest.raises(
        TracingError, match=r"test_traps.py:\d+ has changed, but the step was compiled"
    ):
        compiled(X)
    table[0] = 0
    np.testing.assert_array_equal(compiled(X), X * 6 + table)


def test_numbers_around_a_function_compile_it_again():
    scale = 1.0

    @nd.function
    def scaled(x, *, extra=0):
        return x * scale + extra

    assert scaled(X)[0] == 1
    scale = 3.0
    assert scaled(X)[0] == 3
    assert scaled(X, extra=2)[0] == 5
    assert len(scaled.compilations) == 3


def test_shapes_dtypes_and_python_values_compile_again_and_arrays_do_not():
    calls = []

    @nd.function
    def f(x, flag):
        calls.append(flag)
        return x * 2 if flag else x

    for x, flag in ((X, True), (X + 1, True), (X, False), (X[:2], True), (X.astype("f4"), True)):
        result = f(x, flag)
        assert result.dtype == x.dtype
        np.testing.assert_array_equal(result, x * (2 if flag else 1))
    assert len(f.compilations) == 4


@pytest.mark.parametrize("dtype", ["int64", "uint64", "float64", "complex128"])
def test_64_bits_stay_64_bits(dtype):
    x = np.array([2**53 if dtype != "int64" else 2**62 + 1], dtype)
    result = nd.function(lambda x: x + 1)(x)
    assert result.dtype == dtype
    np.testing.assert_array_equal(result, x + 1)


def test_strings_and_none_are_constants_and_arrays_of_objects_stay_plain():
    f = nd.function(lambda x, how, nothing=None: x.sum() if how == "sum" else x.max())
    assert (f(X, "sum"), f(X, "max", nothing=None)) == (10, 4)
    names = np.array(["a", "b"])
    assert nd.function(lambda x, names: x * len(names))(X, names)[0] == 2
    days = np.array(["2020-01-01"], "datetime64[D]")
    with pytest.raises((TypeError, TracingError)):
        nd.function(lambda x, days: x[:1] + days)(X, days)


def test_an_error_in_the_function_leaves_it_usable():
    fails = [True]

    @nd.function
    def f(x):
        if fails[0]:
            raise ValueError("mine")
        return total.assign_add(np.sum(x))

    total = nd.Variable(0.0)
    with pytest.raises(ValueError, match="mine"):
        f(X)
    fails[0] = False
    f(X)
    assert float(total) == 10


def test_a_program_that_fails_leaves_the_variables_as_they_were():
    total = nd.Variable(np.zeros(4))

    @nd.function
    def f(x, k):
        total.assign_add(x)
        return x[k]

    f(X, np.array(1))
    before = total.numpy()
    with pytest.raises(IndexError, match=r"test_traps\.py"):
        f(X, np.array(4))
    np.testing.assert_array_equal(total.numpy(), X)
    f(X, np.array(0))
    np.testing.assert_array_equal(before, X)  # A snapshot keeps its values.
    np.testing.assert_array_equal(total.numpy(), 2 * X)


def test_threads_call_one_function():
    total = nd.Variable(0.0)

    @nd.function
    def f(x):
        total.assign_add(x)
        return x * 2

    results: list = []

    def work(k):
        results.extend(float(f(np.array(float(k)))) for _ in range(20))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(set(results)) == [0, 2, 4, 6]
    assert float(total) == 20 * 6
    assert len(f.compilations) == 1


def test_methods_recursion_and_defaults():
    class Scale:
        def __init__(self, factor):
            self.factor = nd.Variable(factor)

        @nd.function
        def apply(self, x, depth=2):
            return x if depth == 0 else self.apply(x * self.factor, depth - 1)

    two, three = Scale(2.0), Scale(3.0)
    assert (two.apply(X)[0], three.apply(X)[0], two.apply(X, depth=1)[0]) == (4, 9, 2)


def test_a_call_under_a_tape_is_refused():
    f = nd.function(lambda x: x * 2)
    with nd.GradientTape() as tape:
        x = tape.watch(X)
        with pytest.raises(TracingError, match="open the tape in the function"):
            f(x)


def test_collectives_are_refused_under_several_replicas():
    f = nd.function(lambda x: nd.get_replica_context().all_reduce("sum", x))
    strategy = nd.MirroredStrategy(["cpu:0", "cpu:1"])
    with pytest.raises(TypeError, match="all_reduce was called in a compiled function"):
        strategy.run(f, args=(X,))
    strategy.close()


def test_schedules_and_several_steps_of_optimizers_in_a_step():
    def train(wrap):
        weights = nd.Variable(np.ones(4))
        decay = nd.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
        first, second = nd.optimizers.SGD(decay), nd.optimizers.Adam(0.01)

        def step(x):
            for optimizer in (first, first, second):
                with nd.GradientTape() as tape:
                    loss = np.sum((weights - x) ** 2)
                optimizer.apply_gradients([(tape.gradient(loss, weights), weights)])
            return loss

        step = wrap(step)
        losses = [float(step(X)) for _ in range(3)]
        first.learning_rate = 0.2
        losses.append(float(step(X)))
        return losses, weights.numpy(), int(first.iterations), int(second.iterations)

    expected, result = train(lambda f: f), train(nd.function)
    for value, other in zip(result, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-12)


def test_cond_and_while_loop_compute_what_they_compute_plainly():
    def f(x, k):
        y = nd.cond(np.sum(x) > k, lambda a: a * 2, lambda a: a - k, x)
        inner = lambda a, b: nd.cond(b > 2, lambda: (a + 1, b), lambda: (a + 1, b * 2))  # noqa: E731
        return nd.while_loop(lambda a, b: a < k, inner, (np.int64(0), np.max(y)))

    compiled = nd.function(f)
    for k in (np.array(3), np.array(20)):
        for value, other in zip(compiled(X, k), f(X, k), strict=True):
            np.testing.assert_allclose(value, other)


def test_a_check_in_a_loop_raises():
    f = nd.function(
        lambda x, k: nd.while_loop(lambda a, b: a < 2, lambda a, b: (a + 1, b + x[k]), (0, x[0]))
    )
    assert f(X, np.array(1))[1] == 5
    with pytest.raises(IndexError, match="out of range"):
        f(X, np.array(9))


def test_programs_are_dropped_and_leave_nothing():
    @nd.function
    def f(x, number):
        with nd.GradientTape() as tape:
            x = tape.watch(x)
            y = np.sum(x * number)
        return tape.gradient(y, x)

    def compile_some(start, count):
        for number in range(start, start + count):
            f(X, number)
        gc.collect()
        return len(gc.get_objects())

    before = compile_some(0, 70)
    after = compile_some(70, 30)
    assert len(f.compilations) == 100
    assert after - before < 0.05 * before


def test_an_argument_is_not_changed_for_its_caller():
    def scaled(x):
        x /= 255
        return x.sum()

    with pytest.raises(ValueError, match=r"test_traps.py:\d+ is an argument, .* change a copy"):
        nd.function(scaled)(np.ones(3))
    assert nd.function(lambda x: scaled(x.copy()))(np.full(3, 255.0)) == 3


@pytest.mark.parametrize(
    ("function", "places"),
    [
        (lambda table, at: table[at], [4]),
        (lambda table, at: table[at.reshape(-1)], [[0, 4]]),
        (lambda table, at: table[at.astype(np.int64)], np.int32([-5])),
        (lambda table, at: table[at + 1], [3]),
    ],
)
def test_places_are_checked_where_they_are_known(function, places):
    compiled = nd.function(function)
    with pytest.raises(IndexError, match="out of bounds for an axis of size 4"):
        compiled(np.arange(4.0), np.asarray(places))
    assert compiled(np.arange(4.0), np.zeros_like(places)).size == np.size(places)


def test_zeros_of_both_signs_are_two_constants_and_nan_is_one():
    compiled = nd.function(lambda x, y: x / y)
    assert [compiled(np.ones(1), zero)[0] for zero in (0.0, -0.0)] == [np.inf, -np.inf]
    for _ in range(3):
        assert np.isnan(compiled(np.ones(1), float("nan")))[0]
    assert len(compiled.compilations) == 3


def test_attributes_that_the_code_names_and_settings_of_layers_are_as_they_are_at_each_call():
    class Settings:
        factor = 1.0

    settings, layer = Settings(), nd.layers.Dropout(0.9)
    settings.factor = 2.0
    scaled = nd.function(lambda x: x * settings.factor)
    dropped = nd.function(lambda x: layer(x, training=True))
    ones = np.ones(1000)
    assert scaled(ones).mean() == 2
    assert np.mean(dropped(ones) == 0) > 0.8
    settings.factor, layer.rate = 3.0, 0.1
    assert scaled(ones).mean() == 3
    assert np.mean(dropped(ones) == 0) < 0.2
    assert len(scaled.compilations) == len(dropped.compilations) == 2


def test_a_place_that_the_condition_of_a_loop_reads_is_checked():
    def search(table, k):
        return nd.while_loop(lambda k: table[k] > 0, lambda k: (k + 1,), (k,))[0]

    found = nd.function(search)
    assert found(np.array([1.0, 1.0, 0.0]), np.int64(0)) == 2
    with pytest.raises(IndexError, match="out of range"):
        found(np.array([1.0, 1.0, -1.0]), np.int64(5))


def test_a_variable_that_a_branch_is_the_first_to_read_can_be_written_after_it():
    v = nd.Variable(np.ones(2))

    @nd.function
    def step(x):
        v.assign(nd.cond(x > 0, lambda: v * 2, lambda: v - 1))

    for x, expected in ((1.0, 2), (-1.0, 1)):
        step(np.float64(x))
        assert v.numpy().tolist() == [expected] * 2


def test_the_count_of_steps_in_a_step_is_that_of_plain_code():
    v, optimizer = nd.Variable(np.ones(2, np.float32)), nd.optimizers.SGD(0.1)

    def step():
        before = optimizer.iterations
        optimizer.apply_gradients([(np.ones(2, np.float32) * before, v)])
        return before, optimizer.iterations, np.ones(1, np.float32) * before

    compiled = nd.function(step)
    for k in range(3):
        before, after, scaled = (compiled if k else step)()
        assert (before, after, scaled) == (k, k + 1, k)
        assert np.asarray(scaled).dtype == np.float32
    assert len(compiled.compilations) == 1
