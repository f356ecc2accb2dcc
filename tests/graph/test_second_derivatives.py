"""Gradients of gradients in graphs: as tapes and numeric differences give, or refused by name."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import special

from ndistribute import errors
from ndistribute import graph as g
from ndistribute.autodiff import recorder
from ndistribute.graph import executor
from ndistribute.indexed_slices import IndexedSlices
from ndistribute.models import nn
from ndistribute.numpy_functions import register
from tests.autodiff.standin import both, dense
from tests.autodiff.test_expressions import DIFFERENTIATED, X, function_of, lines
from tests.graph.conftest import PS, WORKER

SHAPES = (6, 5, 5, 2), (3, 3, 2, 4), (16, 3)
AT, WEIGHTS = np.array([0.3, -0.7, 1.2]), np.array([1.0, 2.0, 3.0])


def differences(run: Callable[[Any], Any], at: Any) -> Any:
    """Return the central differences of a function of an array by its elements."""
    found = np.zeros_like(at)
    for index in np.ndindex(at.shape):
        step = np.zeros_like(at)
        step[index] = 1e-6
        found[index] = (run(at + step) - run(at - step)) / 2e-6
    return found


def first_gradient(expression: str) -> Any:
    """Return the function of an expression, x, seeds and dy/dx, if graphs can compute them."""
    function, x = function_of(expression), g.placeholder(np.float64, X.shape)
    weights = np.random.default_rng(5).uniform(0.5, 1.5, np.shape(function(X)))
    y = function(x)
    if not isinstance(y, g.Tensor):
        raise TypeError(f"{y!r} is no tensor.")
    if y.shape is not None:
        assert all(n in (None, m) for n, m in zip(y.shape, weights.shape, strict=True))
    slope = g.gradients(y, x, weights)[0]
    return function, x, weights, slope


def test_each_expression_has_the_derivatives_that_a_tape_and_differences_give():
    direction, compared = np.random.default_rng(6).uniform(-1, 1, X.shape), 0
    for expression in lines(DIFFERENTIATED):
        with g.Graph().as_default(), g.Session() as session:
            try:
                function, x, weights, slope = first_gradient(expression)
                alone = session.run(slope, {x: X})
            except (AttributeError, NameError, TypeError, errors.InvalidArgumentError):
                continue  # Graphs have not all functions and methods of arrays.
            second = g.gradients(np.sum(slope * direction), x)[0]
            third = g.gradients(np.sum(second * direction), x)[0]
            computed = [*map(dense, session.run([slope, second, third], {x: X}))]
            by_tape = both(function, X, weights, direction)
            ends = [dense(session.run(second, {x: X + step * direction})) for step in (1e-6, -1e-6)]
        np.testing.assert_allclose(dense(alone), computed[0], rtol=1e-10, err_msg=expression)
        for ours, expected in zip(computed, by_tape, strict=False):
            np.testing.assert_allclose(ours, dense(expected), 1e-9, 1e-12, err_msg=expression)
        change = np.sum((ends[0] - ends[1]) / 2e-6 * direction)
        assert np.sum(computed[2] * direction) == pytest.approx(change, rel=1e-4, abs=1e-4)
        compared += 1
    assert compared >= 150


def slope_of(y: Any, x: Any, seed: Any = None) -> Any:
    return g.gradients(y, x, seed)[0]


def in_branch(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a program in which a branch computes a function, and its gradients."""

    def program(x: Any) -> Any:
        either = g.cond(np.sum(x) > 0, lambda: function(x * 1.0), lambda: x)
        return np.sum(either**2)

    return program


def descent(x: Any) -> Any:
    """Return the end of a descent whose steps use a gradient."""

    def step(i: Any, a: Any) -> Any:
        return [i + 1, a - 0.1 * slope_of(np.sum(a**4 * x), a)]

    return np.sum(g.while_loop(lambda i, a: i < 3, step, [0, x])[1] ** 2)


def loop(x: Any) -> Any:
    turns = g.while_loop(lambda i, a: i < 3, lambda i, a: [i + 1, np.sin(a) * x + a], [0, x])
    return np.sum(turns[1] ** 2)


def clipped(x: Any, most: float) -> Any:
    slopes = slope_of(np.sum(np.sin(x) * x), x), slope_of(np.sum(x**3), x), None
    (one, other, _), norm = g.clip_by_global_norm(slopes, most)
    return np.sum(one * WEIGHTS) + np.sum(other**2) + norm


def looked_up(x: Any, power: int = 3) -> Any:
    return np.sum(x[g.constant(np.array([1, 1, 2]))] ** power)


def partial(x: Any) -> Any:
    """Return a gradient by what was computed from another argument of the same operation."""
    b = np.sin(x)
    return slope_of(np.multiply(x, b) * b, b)


def seeded(x: Any) -> Any:
    w = WEIGHTS * g.constant(1.0)
    return slope_of(np.sin(w), w, x**2)


def network_of_images(x: Any) -> Any:
    """Return the loss of a small convolutional network, whose images and weights are scaled."""
    rng = np.random.default_rng(0)
    images, kernel, weights = (rng.standard_normal(shape) for shape in SHAPES)
    y = nn.conv2d(x[0] * images, x[1] * kernel, padding="same")
    y = np.reshape(nn.max_pool2d(nn.relu(y), (2, 2)), (6, 16))
    return np.mean(nn.softmax_cross_entropy(y @ (x[2] * weights), np.arange(6) % 3))


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "seeds": lambda x: np.sum(seeded(x) ** 2),
    "itself as the seed": lambda x: np.sum(slope_of(y := x**3, x, y) ** 2),
    "several": lambda x: np.sum(slope_of([np.sum(x**3), np.sum(np.exp(x))], x) ** 2),
    "identity": lambda x: np.sum(slope_of(g.identity(g.identity(x) ** 3), x) ** 2),
    "a row of a Hessian": lambda x: np.sum(
        slope_of(slope_of(np.sum(x**3) + x[0] * x[1] * x[2], x)[1], x) ** 2
    ),
    "parts": lambda x: np.sum(slope_of(np.sum(np.split(x**3, 3)[1] * x), x) ** 2),
    "clipped": lambda x: clipped(x, 1.5),
    "not clipped": lambda x: clipped(x, 150.0),
    "a network": lambda x: np.sum(slope_of(network_of_images(x), x) ** 2),
    "rows": lambda x: np.sum(slope_of(looked_up(x), x) ** 2),
    "rows added": lambda x: np.sum(slope_of([looked_up(x), looked_up(x, 2)], x) ** 2),
    "rows scaled": lambda x: np.sum(
        g.clip_by_global_norm([slope_of(looked_up(x), x)], 1.0, np.sum(x))[0][0] ** 2
    ),
    "norm of rows made whole": lambda x: g.global_norm([np.positive(slope_of(looked_up(x), x))]),
    "of a branch": lambda x: np.sum(slope_of(in_branch(np.sin)(x), x) ** 2),
    "of a loop": lambda x: np.sum(slope_of(loop(x), x) ** 2),
    "in a branch": in_branch(lambda x: slope_of(np.sum(np.sin(x) * WEIGHTS * x), x)),
    "in a branch, an argument twice": in_branch(lambda x: slope_of(np.multiply(x, x), x) * x),
    "in a branch, arguments of each other": in_branch(partial),
    "in a branch, seeds alone": in_branch(seeded),
    "in a branch, twice": in_branch(lambda x: slope_of(slope_of(x**3, x) ** 2, x)),
    "in a branch, rows": in_branch(lambda x: slope_of(looked_up(x), x) * x),
    "in a loop": descent,
    "of one in a loop": lambda x: np.sum(slope_of(descent(x), x) ** 2),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_each_program_with_gradients_is_differentiated(session, program):
    x = g.placeholder(np.float64, [3])
    y = PROGRAMS[program](x)
    found = [session.run(g.gradients(y, x)[0], {x: AT}) for _ in range(2)]
    expected = differences(lambda at: session.run(y, {x: at}), AT)
    for one in found:
        np.testing.assert_allclose(dense(one), expected, 1e-5, 1e-7)


def test_a_stopped_gradient_is_a_constant(session):
    x = g.placeholder(np.float64, [3])
    slope = slope_of(np.sum(x**3), x)
    assert g.gradients(slope.stop_gradient(), x) == [None]
    found = session.run(slope_of(np.sum(slope.stop_gradient() * x), x), {x: AT})
    np.testing.assert_allclose(found, 3 * AT**2)


def test_a_gradient_has_the_same_value_whether_or_not_it_is_differentiated(session):
    x = g.placeholder(np.float64, [3])
    slope = slope_of(looked_up(x), x)
    norm, second = g.global_norm([slope, slope * 2.0]), slope_of(np.sum(slope**2), x)
    alone, beside = session.run([slope, norm], {x: AT}), session.run([slope, norm, second], {x: AT})
    assert type(alone[0]) is type(beside[0]) is IndexedSlices
    np.testing.assert_array_equal(alone[0].values, beside[0].values)
    assert alone[1] == beside[1]


def test_what_has_no_second_derivative_is_refused_by_name(session):
    register("special.digamma", special.digamma)
    x = g.placeholder(np.float64, [3])
    y = g.get_default_graph().add("special.digamma", [x]).outputs[0]
    second = slope_of(slope_of(y, x) ** 2, x)
    with pytest.raises(errors.InvalidArgumentError, match=r"_zeta, .* has no derivative rule"):
        session.run(second, {x: WEIGHTS})
    norm = slope_of(g.global_norm([slope_of(looked_up(x), x)]), x)
    with pytest.raises(
        errors.InvalidArgumentError, match=r"norm of IndexedSlices .* has no gradient"
    ):
        session.run(norm, {x: AT})


def test_one_thread_at_a_time_differentiates_an_operation(session, monkeypatch):
    inside, most, changed = 0, 0, threading.Condition()

    def tracked_pass(*args: Any) -> Any:
        nonlocal inside, most
        with changed:
            inside += 1
            most = max(most, inside)
            changed.notify_all()
            changed.wait_for(lambda: most > 1, 0.02)  # For another thread, if one may come.
            inside -= 1
        return computed(*args)

    monkeypatch.setattr(executor, "_LONG_SECONDS", 0.0)
    computed = recorder.tracked_pass
    monkeypatch.setattr(recorder, "tracked_pass", tracked_pass)
    x = g.placeholder(np.float64, [3])
    y = np.sin(x)
    parts = [slope_of(slope_of(y, x, WEIGHTS * k) ** 2, x, WEIGHTS) for k in range(1, 4)]
    for _ in range(4):
        found = session.run(parts, {x: AT})
    assert most == 1
    for k, one in enumerate(found, 1):
        np.testing.assert_allclose(one, found[0] * k**2)


def descended(target: str, ps: str | None, worker: str | None) -> list[Any]:
    """Return the first and the last loss, and the weights, of descents by clipped gradients."""
    rng = np.random.default_rng(4)
    with g.Graph().as_default(), g.Session(target) as session:
        with g.device(ps):
            weights = [g.Variable(rng.standard_normal(shape)) for shape in ((3, 5), (5,), (5, 1))]
        with g.device(worker):
            x = g.placeholder(np.float64, [None, 3])
            y = np.tanh(x @ weights[0] + weights[1]) @ weights[2]
            norms = np.sqrt(np.sum(slope_of(y, x) ** 2, axis=1))
            loss = np.mean(y) + 10 * np.mean((norms - 1) ** 2)  # Each gradient's norm is to be 1.
        optimizer = g.GradientDescentOptimizer(0.5)
        pairs = optimizer.compute_gradients(loss, weights)
        slopes, _ = g.clip_by_global_norm([slope for slope, _ in pairs], 1.0)
        train = optimizer.apply_gradients(zip(slopes, weights, strict=True))
        feeds = {x: rng.standard_normal((6, 3))}
        session.run(g.global_variables_initializer())
        first, *_ = [session.run([loss, train], feeds)[0] for _ in range(6)]
        return [first, *session.run([loss, *weights], feeds)]


def test_an_optimizer_minimises_the_penalty_of_a_gradient_on_two_tasks(cluster):
    together = descended(cluster["worker"].target, PS, WORKER)
    assert together[1] < together[0]
    for ours, expected in zip(together, descended("", None, None), strict=True):
        np.testing.assert_allclose(ours, expected, 1e-9, 1e-12)


def test_in_a_body_gradients_are_those_of_what_it_reads_and_others_are_refused():
    x, v = g.constant(3.0), g.Variable(2.0)
    around = x * v

    def body(y, source):
        return lambda: g.gradients(y(), source)[0]

    def chosen(y, source):
        return g.cond(g.constant(True), body(y, source), lambda: np.array(0.0))

    inside = [chosen(lambda: x * x * v, source) for source in (v, x)]
    for y, source in (
        (lambda: around * x, v),
        (lambda: around + 1.0, x),
        (lambda: g.cond(g.constant(True), lambda: around * 2.0, lambda: around), v),
    ):
        with pytest.raises(ValueError, match=r"was computed outside of this cond or while_loop"):
            chosen(y, source)
    with pytest.raises(ValueError, match="outside of this cond"):
        g.while_loop(lambda y: y < 9.0, lambda y: y + g.gradients(y * y, x)[0], [x])
    with g.Session() as session:
        session.run(g.global_variables_initializer())
        assert session.run(inside) == [9.0, 12.0]
