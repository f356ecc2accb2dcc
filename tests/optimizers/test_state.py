"""What an optimizer keeps can be made ahead, saved and restored by hand."""

from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.optimizers import SGD, Adam, Optimizer
from tests.kinds import context, mirrored, raised_in, rank
from tests.optimizers.formulas import MAKERS

OPTIMIZERS = {"scheduled": lambda: SGD(lambda step: 0.1 / (1 + step)), **MAKERS}
SHAPES = ((40, 3), (7,), ())


def make(strategy: nd.Strategy) -> list[nd.Variable]:
    rng = np.random.default_rng(2)
    with strategy.scope():
        return [nd.Variable(rng.normal(size=shape)) for shape in SHAPES]


def steps(
    strategy: nd.Strategy, optimizer: Optimizer, variables: list[nd.Variable], numbers: range
) -> None:
    def step(number: int) -> None:
        rng = np.random.default_rng(10 * number + rank())
        gradients = [rng.normal(size=variable.shape) for variable in variables]
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    for number in numbers:
        strategy.run(step, args=(number,))


def bits(variables: list[nd.Variable]) -> list[bytes]:
    return [variable.numpy().tobytes() for variable in variables]


@pytest.mark.parametrize("name", ["scheduled", "momentum", "adagrad", "adam"])
def test_training_goes_on_from_saved_state_with_the_same_bits(
    strategy: nd.Strategy, name: str
) -> None:
    variables = make(strategy)
    with strategy.scope():
        optimizer = OPTIMIZERS[name]()
    steps(strategy, optimizer, variables, range(3))
    weights, state = ([v.numpy() for v in own] for own in (variables, optimizer.variables))
    count = optimizer.iterations
    steps(strategy, optimizer, variables, range(3, 6))
    expected = bits([*variables, *optimizer.variables])

    with strategy.scope():
        again = OPTIMIZERS[name]()
    again.build(variables)
    assert again.iterations == 0
    for variable, value in zip([*variables, *again.variables], [*weights, *state], strict=True):
        variable.assign(value)
    assert again.iterations == count == 3
    steps(strategy, again, variables, range(3, 6))
    assert bits([*variables, *again.variables]) == expected


def test_the_count_of_steps_can_be_set(strategy: nd.Strategy) -> None:
    variables = make(strategy)
    with strategy.scope():
        optimizer = Adam(0.1)
    optimizer.build(variables)
    with pytest.raises(ValueError, match="0 or more, got -1"):
        optimizer.iterations = -1
    optimizer.iterations = 41
    steps(strategy, optimizer, variables, range(1))
    assert optimizer.iterations == int(optimizer.variables[0]) == 42


def test_the_count_of_an_optimizer_that_is_not_built_can_not_be_set_but_on_servers() -> None:
    with pytest.raises(RuntimeError, match=r"build\(variables\)"):
        SGD(0.1).iterations = 3
    with nd.ParameterServerStrategy() as strategy:
        optimizer = Adam(0.1)
        optimizer.iterations = 3
        assert optimizer.iterations == 3
        steps(strategy, optimizer, make(strategy), range(2))
        assert optimizer.iterations == 5


def test_building_makes_what_the_first_step_makes(strategy: nd.Strategy) -> None:
    variables = make(strategy)
    with strategy.scope():
        optimizers = [Adam(0.1), Adam(0.1)]
    strategy.run(lambda: optimizers[0].build(variables))
    steps(strategy, optimizers[1], variables, range(1))
    shapes = [[v.shape for v in optimizer.variables] for optimizer in optimizers]
    assert shapes[0] == shapes[1] == [(), *(shape for shape in SHAPES for _ in "mv")]
    own = optimizers[0].variables
    optimizers[0].build(variables)
    assert all(a is b for a, b in zip(own, optimizers[0].variables, strict=True))
    optimizer = Adam(0.1)
    optimizer.build([])
    assert optimizer.variables == []
    for wrong, says in (
        (nd.Variable(0.0, synchronization="on_read", aggregation="sum"), "synchronized on read"),
        (nd.Variable([1, 2]), "cannot be trained"),
    ):
        with pytest.raises(ValueError, match=says):
            optimizer.build([wrong])


def test_who_failed_before_the_first_step_builds_in_the_next_one(several: nd.Strategy) -> None:
    with several.scope():
        weights, optimizer = nd.Variable(np.zeros(3)), Adam(0.1)

    def step(fails: bool) -> None:
        if fails and rank() == 0:
            raise KeyError("on purpose")
        optimizer.apply_gradients([(np.ones(3), weights)])

    with raised_in(several, 0, KeyError, "on purpose"):
        several.run(step, args=(True,))
    several.run(step, args=(False,))
    counts = several.gather(
        nd.PerReplica([np.array([optimizer.iterations])] * len(several.devices)), 0
    )
    assert set(counts) == {1}
    np.testing.assert_allclose(weights.numpy(), -0.1, rtol=1e-4)


@pytest.mark.parametrize("how", ["on_write", "on_read"])
def test_a_slot_lies_beside_its_variable(strategy: nd.Strategy, how: str) -> None:
    with strategy.scope():
        variable = nd.Variable(
            np.ones((3, 2)), name="w", synchronization=how, aggregation="only_first_replica"
        )
    slot: Any = variable.create_slot("adam/m", 0.5, np.float32)
    assert (type(slot), slot.distribute_strategy) == (type(variable), strategy)
    assert (slot.name, slot.shape, slot.dtype) == ("w/adam/m", (3, 2), np.float32)
    assert (slot.trainable, slot.synchronization.value) == (False, how)
    assert slot.aggregation is variable.aggregation
    assert strategy.local_results(slot)[0].tolist() == [[0.5, 0.5]] * 3
    slot.assign(np.zeros((3, 2)))
    assert strategy.local_results(variable)[0].tolist() == [[1.0, 1.0]] * 3
    assert variable.create_slot("other").dtype == variable.dtype


def test_a_slot_is_not_made_by_each_replica() -> None:
    with mirrored(2) as strategy:
        variable = nd.Variable([1.0, 2.0])
        with pytest.raises(RuntimeError, match=r"create_slot .* inside a replica"):
            strategy.run(lambda: variable.create_slot("m"))
        slot = strategy.run(lambda: context().merge_call(lambda _: variable.create_slot("m")))
        assert slot.shape == (2,)


def test_a_sum_of_gradients_is_kept_for_a_step_in_which_its_variable_has_a_gradient():
    w, other = nd.Variable([0.0]), nd.Variable([0.0])
    optimizer = nd.optimizers.GradientAccumulation(SGD(1.0), 2)
    for gradient in ([1.0], None, [2.0], [3.0]):
        optimizer.apply_gradients([(gradient, w), ([1.0], other)])
    assert (w.numpy().tolist(), other.numpy().tolist()) == ([-3.0], [-2.0])
