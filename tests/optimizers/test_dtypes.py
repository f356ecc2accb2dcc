"""16-bit variables train as float32 ones do, complex gradients train complex variables alone."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ndistribute as nd
from ndistribute.optimizers import SGD, Adagrad, Adam, Optimizer
from tests.kinds import host_memory, raised_in
from tests.processes import python_says

HALVES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
TARGET = np.linspace(-1.0, 1.0, 12).reshape(6, 2)

OPTIMIZERS: dict[str, Callable[[], Optimizer]] = {
    "momentum": lambda: SGD(0.02, 0.9),
    "adagrad": lambda: Adagrad(0.3),
    "adam": lambda: Adam(0.1),
    "clipped": lambda: SGD(0.1, global_clipnorm=2.0),
}


def make(strategy: nd.Strategy, value: Any, dtype: Any = None) -> nd.Variable:
    with strategy.scope():
        return nd.Variable(value, dtype=dtype)


def train(strategy: nd.Strategy, optimizer: Optimizer, dtype: Any, steps: int = 60) -> nd.Variable:
    """Bring a variable to `TARGET` by the gradients of its squared distance."""
    variable = make(strategy, np.zeros_like(TARGET), dtype)
    target = TARGET.astype(dtype)

    def step() -> None:
        with nd.GradientTape() as tape:
            loss = np.sum((variable - target) ** 2) / strategy.num_replicas_in_sync
        gradient = tape.gradient(loss, variable)
        assert gradient.dtype == np.dtype(dtype)
        optimizer.apply_gradients([(gradient, variable)])

    for _ in range(steps):
        strategy.run(step)
    return variable


@pytest.mark.parametrize(
    ("dtype", "name"), [("float16", "momentum"), ("bfloat16", "adam"), ("float16", "clipped")]
)
@host_memory("it computes with arrays of the host")
def test_16_bit_variables_train(strategy: nd.Strategy, dtype: str, name: str) -> None:
    optimizer = OPTIMIZERS[name]()
    variable = train(strategy, optimizer, HALVES[dtype])
    assert variable.dtype == HALVES[dtype]
    np.testing.assert_allclose(variable.numpy().astype(float), TARGET, atol=0.1)
    assert all(slot.dtype == np.float32 for slot in optimizer.variables[1:])


def test_rows_of_16_bit_variables_train(strategy: nd.Strategy) -> None:
    variable = make(strategy, np.zeros((5, 2)), ml_dtypes.bfloat16)
    rows = nd.IndexedSlices(np.ones((3, 2), ml_dtypes.bfloat16), np.array([4, 0, 4]), (5, 2))
    optimizer = SGD(0.5)
    strategy.run(lambda: optimizer.apply_gradients([(rows, variable)]))
    moved = -0.5 * strategy.num_replicas_in_sync * np.array([1.0, 0, 0, 0, 2])
    np.testing.assert_array_equal(variable.numpy().astype(float), moved[:, None].repeat(2, 1))


def test_squares_and_norms_of_gradients_may_be_beyond_float16(strategy: nd.Strategy) -> None:
    for optimizer in (Adam(0.5), Adagrad(0.5, 0.0)):
        variable = make(strategy, np.ones(3, np.float16))
        gradient = np.full(3, 1000.0 / strategy.num_replicas_in_sync, np.float16)
        strategy.run(lambda o=optimizer, g=gradient, v=variable: o.apply_gradients([(g, v)]))
        np.testing.assert_allclose(variable.numpy(), 0.5, rtol=1e-3)
    variable = nd.Variable(np.zeros(2, np.float16))
    gradient = np.array([30000.0, 40000.0], np.float16)
    SGD(1.0, clipnorm=1.0).apply_gradients([(gradient, variable)])
    np.testing.assert_allclose(variable.numpy(), [-0.6, -0.8], rtol=1e-3)


def test_complex_gradients_of_real_variables_and_any_of_integers_are_refused(
    strategy: nd.Strategy,
) -> None:
    for dtype in (np.float64, ml_dtypes.bfloat16):
        variable = make(strategy, np.ones(2), dtype)
        with raised_in(strategy, None, ValueError, "Nothing has changed"):
            strategy.run(lambda v=variable: SGD(0.1).apply_gradients([(np.array([1j, 1j]), v)]))
        assert variable.numpy().astype(float).tolist() == [1, 1]
    integers = make(strategy, np.ones(2, np.int64))
    with pytest.raises(ValueError, match="Nothing has changed"):
        SGD(0.1).apply_gradients([(np.ones(2), integers)])


@pytest.mark.parametrize("name", ["adagrad", "clipped", "clipvalue"])
def test_a_complex_variable_trains_like_its_two_parts(strategy: nd.Strategy, name: str) -> None:
    rng = np.random.default_rng(3)
    start, *gradients = rng.normal(size=(4, 3, 2))
    make_optimizer = {**OPTIMIZERS, "clipvalue": lambda: SGD(0.1, clipvalue=0.5)}[name]
    found = []
    for form in (lambda a: a, lambda a: a.view(complex)[..., 0]):
        variable, optimizer = make(strategy, form(start)), make_optimizer()
        for gradient in gradients:
            pairs = [(form(gradient), variable)]
            strategy.run(lambda o=optimizer, pairs=pairs: o.apply_gradients(pairs))
        found.append(variable.numpy())
    np.testing.assert_allclose(found[1].view(float).reshape(3, 2), found[0], rtol=1e-12)


def test_a_server_knows_bfloat16_though_its_program_did_not_import_it() -> None:
    code = """if True:
        import sys
        from ndistribute.parameter_server.messages import Create, NewVariable
        from ndistribute.parameter_server.store import Store
        from ndistribute.transport.codec import _dtype_of
        assert "ml_dtypes" not in sys.modules
        ((_, reply),) = Store().handle("a", 1, Create((NewVariable("v", (2,), "bfloat16"),)))
        print(*reply.states, _dtype_of("bfloat16"))
    """
    assert python_says("-c", code).split() == ["wanted", "bfloat16"]


def test_bfloat16_variables_are_written_like_other_floats(strategy: nd.Strategy) -> None:
    for value in (0.5, 2, [1.0, 2.0], np.float32([3.0])):
        variable = make(strategy, np.zeros(np.shape(value)), ml_dtypes.bfloat16)
        variable.assign(value).assign_add(value)
        np.testing.assert_array_equal(variable.numpy().astype(float), 2 * np.asarray(value))
        with pytest.raises(ValueError, match="lose information"):
            variable.assign(np.asarray(value) * 1j)


def test_what_replicas_add_to_bfloat16_is_shared_out(several: nd.Strategy) -> None:
    with several.scope():
        total = nd.Variable(
            0.0, dtype=ml_dtypes.bfloat16, synchronization="on_read", aggregation="sum"
        )
    total.assign(6.0)
    parts = several.gather(nd.PerReplica([p.reshape(1) for p in several.local_results(total)]), 0)
    if len(parts) == several.num_replicas_in_sync:
        assert set(parts.astype(float)) == {6.0 / len(parts)}
    assert float(total) == 6.0
