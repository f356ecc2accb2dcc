"""`rng` and `set_seed`: every replica draws its own numbers, the same in every run."""

import numpy as np
import pytest

import ndistribute as nd
from tests.kinds import closing, context, host_memory, mine, mirrored, plain_step
from tests.processes import python_says


def draw(strategy):
    return strategy.run(lambda: context().rng.integers(2**62)).values


@host_memory("a generator of CuPy draws other kinds of numbers")
def test_a_seed_decides_what_is_drawn_from_step_to_step(strategy):
    nd.set_seed(7)
    first = [draw(strategy) for _ in range(3)]
    assert first[0] != first[1]
    nd.set_seed(7)
    assert [draw(strategy) for _ in range(3)] == first
    nd.set_seed(8)
    assert draw(strategy) != first[0]


@host_memory("a generator of CuPy is another")
@plain_step("it has a generator of its own")
def test_a_replica_has_one_generator_of_numpy(strategy):
    generators = [strategy.run(lambda: context().rng).values for _ in range(2)]
    assert all(first is second for first, second in zip(*generators, strict=True))
    assert all(type(generator) is np.random.Generator for generator in generators[0])


@host_memory("a generator of CuPy draws other numbers")
@plain_step("JAX draws other numbers")
def test_each_replica_draws_its_own_whatever_the_strategy(strategy):
    nd.set_seed(7)
    with closing(mirrored(5)) as five:
        drawn = [draw(five) for _ in range(2)]
    assert len({number for step in drawn for number in step}) == 10
    nd.set_seed(7)
    assert [draw(strategy) for _ in range(2)] == [mine(strategy, step) for step in drawn]
    for seed in (-1, "seven", 1.5):
        with pytest.raises((ValueError, TypeError)):
            nd.set_seed(seed)


def test_without_a_seed_two_processes_differ_and_with_one_they_agree():
    code = (
        "import ndistribute as nd; draw = lambda: nd.get_replica_context().rng.integers(2**62); "
        "first = draw(); nd.set_seed(7); print(first, draw())"
    )
    first, second = (python_says("-c", code).split() for _ in range(2))
    assert first[0] != second[0]
    assert first[1] == second[1]
