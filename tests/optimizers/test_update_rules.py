"""The update rules give what their papers' formulas give, in place, whatever the blocks."""

import dataclasses
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute import update_rules
from ndistribute.optimizers import SGD, Optimizer
from ndistribute.optimizers.algorithms import AdamRule, RMSpropRule
from ndistribute.update_rules import Rule, hyperparameters_of, rule_named, update_rows, update_whole
from tests.optimizers.formulas import MAKERS

CASES = [make().rule for make in MAKERS.values()]
CASES += [AdamRule(0.5, 0.7, 1e-3), RMSpropRule(0.8, 0.9, centered=True)]


def start(rule, size=101, dtype=float):
    """Return a variable and its slots."""
    rng = np.random.default_rng(1)
    slots = [np.full(size, rule.initial_slot(name), dtype) for name in rule.all_slots]
    return rng, rng.standard_normal(size), slots


@pytest.mark.parametrize("rule", CASES, ids=str)
def test_blocks_and_rows_give_the_bits_of_the_whole(rule, monkeypatch):
    rng, whole, slots = start(rule)
    monkeypatch.setattr(update_rules, "BLOCK_ELEMENTS", 7)
    forms = [[whole.copy(), *(slot.copy() for slot in slots)] for _ in range(2)]
    for step in range(1, 4):
        gradient, rate = rng.standard_normal(len(whole)), rule.rates(step, 0.1)
        given = gradient.copy()
        update_whole(rule, forms[0], gradient, rate)
        update_rows(rule, forms[1], gradient, np.arange(len(whole)), rate)
        assert np.array_equal(gradient, given)
        rule.step(whole, gradient, slots, rate)
        assert {form[0].tobytes() for form in forms} == {whole.tobytes()}


@pytest.mark.parametrize("rule", [case for case in CASES if case.leaves_rows], ids=str)
def test_a_rule_that_touches_rows_alone_leaves_the_others_without_gradient(rule):
    _, variable, slots = start(rule)
    before = variable.copy()
    rule.update(variable, np.zeros_like(variable), slots, rule.rate(1, 0.1))
    assert variable.tobytes() == before.tobytes()


def test_a_rule_can_be_named_and_made_again():
    assert [rule_named(*hyperparameters_of(rule)) for rule in CASES] == CASES


def test_a_rule_that_makes_no_sense_is_refused():
    for name, numbers, says in (
        ("lion", {}, "no update rule 'lion'.*adagrad"),
        ("sgd", {"beta_1": 0.9}, "no hyperparameter beta_1"),
        ("sgd", {"momentum": 2.0}, "momentum must be in"),
        ("sgd", {"nesterov": 1.0}, "above 0"),
        ("adam", {"beta_2": 1.0}, "beta_2 must be in"),
        ("rmsprop", {"rho": 1.0}, "rho must be in"),
        ("adagrad", {"initial_accumulator_value": -1.0}, "0 or more"),
    ):
        with pytest.raises(ValueError, match=says):
            rule_named(name, numbers)


def test_a_rule_needs_a_name_of_its_own_and_an_optimizer_no_arithmetic() -> None:
    with pytest.raises(TypeError, match="Derived needs its own `name`"):

        class Derived(AdamRule):
            pass

    @dataclasses.dataclass(frozen=True)
    class First(Rule):
        name = "twice"

    with pytest.raises(TypeError, match="are both named 'twice'"):

        class Second(Rule):
            name = "twice"

    assert hyperparameters_of(First()) == ("twice", {})
    with pytest.raises(TypeError, match="nothing calls update: define update of a Rule"):

        class Own(SGD):
            def update(self) -> None:
                pass

    rule: Any = 0.1
    with pytest.raises(TypeError, match=r"needs a Rule, got 0\.1"):
        Optimizer(rule, 0.1)


def test_a_variable_named_twice_and_a_learning_rate_that_raises_change_nothing() -> None:
    variable, optimizer = nd.Variable([1.0]), SGD({1: 0.5}.__getitem__)
    for pairs, error in (([([1.0], variable)], KeyError), ([([1.0], variable)] * 2, ValueError)):
        with pytest.raises(error, match=r"0|occurs twice"):
            optimizer.apply_gradients(pairs)
    assert (optimizer.iterations, variable.numpy().tolist()) == (0, [1.0])


def test_one_optimizer_trains_variables_of_a_strategy_and_of_none() -> None:
    plain = nd.Variable([2.0])
    with nd.MirroredStrategy(["cpu:0", "cpu:1"]):
        own = nd.Variable([2.0])
    for order in ((plain, own), (own, plain)):
        optimizer = SGD(1.0)
        for variable in order:
            optimizer.apply_gradients([([1.0], variable)])
        assert optimizer.iterations == 2
    assert (float(own[0]), float(plain[0])) == (0.0, 0.0)


def test_variables_of_another_strategy_are_refused_in_any_place() -> None:
    elsewhere = nd.Variable([1.0])
    with nd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        own, optimizer = nd.Variable([1.0]), SGD(1.0)
        for pairs in ([elsewhere, own], [own, elsewhere]):
            with pytest.raises(RuntimeError, match="update of variable"):
                strategy.run(lambda p=pairs: optimizer.apply_gradients([([1.0], v) for v in p]))
        assert own.numpy().tolist() == [1.0]
