"""The update rules give what their papers' formulas give, in place, whatever the blocks."""

from __future__ import annotations

import numpy as np
import pytest

from ndistribute.update_rules import (
    RULES,
    Adagrad,
    Adam,
    Sgd,
    hyperparameters_of,
    rule_named,
)

CASES = [Sgd(), Sgd(0.9), Sgd(0.9, nesterov=True), Adagrad(), Adam(), Adam(0.5, 0.7, 1e-3)]


def formula(rule, variable, gradient, slots, step, rate):
    """Return the variable and the slots after a step, computed as one would write it down."""
    match rule:
        case Sgd(momentum=0.0):
            return variable - rate * gradient, []
        case Sgd(momentum=m, nesterov=ahead):
            velocity = m * slots[0] - rate * gradient
            return variable + (m * velocity - rate * gradient if ahead else velocity), [velocity]
        case Adagrad(epsilon=e):
            total = slots[0] + gradient**2
            return variable - rate * gradient / np.sqrt(total + e), [total]
        case Adam(beta_1=b1, beta_2=b2, epsilon=e):
            mean = b1 * slots[0] + (1 - b1) * gradient
            square = b2 * slots[1] + (1 - b2) * gradient**2
            corrected = rate * np.sqrt(1 - b2**step) / (1 - b1**step)
            return variable - corrected * mean / (np.sqrt(square) + e), [mean, square]


def start(rule, size=101):
    """Return a variable and its slots."""
    rng = np.random.default_rng(1)
    slots = [np.full(size, rule.initial_slot(name)) for name in rule.slot_names]
    return rng, rng.standard_normal(size), slots


@pytest.mark.parametrize("rule", CASES, ids=str)
def test_a_rule_is_its_formula(rule):
    rng, variable, slots = start(rule)
    expected, expected_slots = variable.copy(), [slot.copy() for slot in slots]
    for step in range(1, 6):
        gradient = rng.standard_normal(len(variable))
        expected, expected_slots = formula(rule, expected, gradient, expected_slots, step, 0.1)
        rule.update(variable, gradient.copy(), slots, rule.rate(step, 0.1))
        np.testing.assert_allclose(variable, expected, rtol=1e-12, atol=1e-12)
        for slot, other in zip(slots, expected_slots, strict=True):
            np.testing.assert_allclose(slot, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", CASES, ids=str)
def test_blocks_give_the_bits_of_the_whole(rule):
    rng, whole, slots = start(rule)
    parts, part_slots = whole.copy(), [slot.copy() for slot in slots]
    for step in range(1, 4):
        gradient = rng.standard_normal(len(whole))
        for at in range(0, len(parts), 7):
            block = slice(at, at + 7)
            views = [slot[block] for slot in part_slots]
            rule.update(parts[block], gradient[block].copy(), views, rule.rate(step, 0.1))
        rule.update(whole, gradient, slots, rule.rate(step, 0.1))
        assert whole.tobytes() == parts.tobytes()


@pytest.mark.parametrize("rule", CASES, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_rule_keeps_the_dtype(rule, dtype):
    _, variable, slots = start(rule)
    variable, slots = variable.astype(dtype), [slot.astype(dtype) for slot in slots]
    rule.update(variable, np.ones_like(variable), slots, rule.rate(1, 0.1))
    assert variable.dtype == dtype
    assert np.isfinite(variable).all()


@pytest.mark.parametrize("rule", [case for case in CASES if case.rows_alone], ids=str)
def test_a_rule_that_touches_rows_alone_leaves_the_others_without_gradient(rule):
    _, variable, slots = start(rule)
    before = variable.copy()
    rule.update(variable, np.zeros_like(variable), slots, rule.rate(1, 0.1))
    assert variable.tobytes() == before.tobytes()


@pytest.mark.parametrize("rule", CASES, ids=str)
def test_a_rule_can_be_named_and_made_again(rule):
    name, numbers = hyperparameters_of(rule)
    assert rule_named(name, numbers) == rule
    assert type(rule) is RULES[name]


@pytest.mark.parametrize(
    ("name", "numbers", "says"),
    [
        ("lion", {}, "sgd, adagrad, adam"),
        ("sgd", {"beta_1": 0.9}, "no beta_1"),
        ("sgd", {"momentum": 2.0}, "momentum must be in"),
        ("sgd", {"nesterov": 1.0}, "above 0"),
        ("adam", {"beta_2": 1.0}, "beta_2 must be in"),
        ("adagrad", {"initial_accumulator_value": -1.0}, "0 or more"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(name, numbers, says):
    with pytest.raises(ValueError, match=says):
        rule_named(name, numbers)


def test_what_is_no_rule_has_no_name():
    with pytest.raises(ValueError, match="is no rule"):
        hyperparameters_of(object())
