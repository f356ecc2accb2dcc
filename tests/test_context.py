"""Which strategy and which replica a thread is in: scopes, the default, `set_strategy`."""

from __future__ import annotations

import inspect

import pytest

import ndistribute as nd
from ndistribute.context import StrategyLike
from tests.kinds import DEADLINE, closing, in_thread, mirrored


@pytest.fixture
def pair():
    with closing(mirrored(2)) as strategy:
        yield strategy


@pytest.fixture
def other():
    with closing(nd.OneDeviceStrategy("cpu:1")) as strategy:
        yield strategy


@pytest.fixture
def back_to_default():
    yield
    nd.set_strategy(None)


def where() -> tuple[nd.Strategy, bool, bool, bool]:
    """Return all that a thread can ask about its place."""
    return (
        nd.get_strategy(),
        nd.has_strategy(),
        nd.in_cross_replica_context(),
        nd.get_replica_context() is not None,
    )


def test_outside_any_scope_the_default_strategy_and_its_replica_are_current():
    strategy = nd.get_strategy()
    assert where() == (strategy, False, False, True)
    assert strategy.num_replicas_in_sync == 1
    assert nd.get_strategy() is strategy
    assert nd.get_replica_context().strategy is strategy
    assert nd.get_replica_context().replica_id_in_sync_group == 0


def test_a_scope_makes_its_strategy_current_across_replicas(pair):
    with pair.scope() as entered:
        assert entered is pair
        assert where() == (pair, True, True, False)
    assert where() == (nd.get_strategy(), False, False, True)


def test_type_checkers_know_what_the_current_strategy_offers():
    inside = {"across_workers", "agree_on", "make_group", "make_variable"}
    for name, method in inspect.getmembers(nd.Strategy, inspect.isfunction):
        if not name.startswith("_") and name not in inside:
            known = inspect.signature(getattr(StrategyLike, name)).parameters
            assert list(known) == list(inspect.signature(method).parameters), name


def test_a_replica_is_in_its_strategy(pair):
    strategy, has, across, inside = pair.run(where)
    assert strategy.values == (pair, pair)
    assert (has.values, across.values, inside.values) == ((True,) * 2, (False,) * 2, (True,) * 2)


def test_a_replica_of_the_default_strategy_is_in_no_other():
    strategy, has, across, inside = nd.get_strategy().run(where)
    assert strategy.values == (nd.get_strategy(),)
    assert (has.values, across.values, inside.values) == ((False,), (False,), (True,))


def test_merge_call_is_across_replicas(pair):
    places = []
    pair.run(lambda: nd.get_replica_context().merge_call(lambda _: places.append(where())))
    assert places == [(pair, True, True, False)]


def test_merge_call_of_the_default_strategy_is_across_replicas_of_no_other():
    places = []
    nd.get_replica_context().merge_call(lambda _: places.append(where()))
    assert places == [(nd.get_strategy(), False, True, False)]
    assert where() == (nd.get_strategy(), False, False, True)


def test_a_scope_ends_with_an_exception(pair):
    with pytest.raises(KeyError), pair.scope(), pair.scope():
        raise KeyError
    assert not nd.has_strategy()


def test_a_scope_of_another_strategy_inside_is_refused(pair, other):
    with pair.scope():
        with pytest.raises(RuntimeError, match=r"^Mixing different strategies: "), other.scope():
            pass
        assert nd.get_strategy() is pair


def test_the_default_scope_inside_another_is_refused(pair):
    default = nd.get_strategy()
    with pair.scope(), pytest.raises(RuntimeError, match="Mixing"), default.scope():
        pass


@pytest.mark.parametrize(
    "call",
    [
        lambda strategy: strategy.run(lambda: None),
        lambda strategy: strategy.reduce("sum", 1.0),
        lambda strategy: strategy.gather([1.0], axis=0),
    ],
)
def test_calls_of_another_strategy_in_a_scope_are_refused(pair, other, call):
    with pair.scope(), pytest.raises(RuntimeError, match="Mixing different strategies"):
        call(other)


def test_scopes_are_per_thread(pair):
    default = nd.get_strategy()
    with pair.scope(), in_thread(where) as theirs:
        assert theirs.result(DEADLINE) == (default, False, False, True)


@pytest.mark.parametrize("own", [True, False])
def test_a_scope_may_be_entered_on_two_threads(pair, other, own):
    def enter():
        with (pair if own else other).scope() as entered:
            return nd.get_strategy() is entered

    with pair.scope(), in_thread(enter) as theirs:
        assert theirs.result(DEADLINE)


@pytest.mark.usefixtures("back_to_default")
def test_set_strategy_is_a_scope_that_is_never_left(pair, other):
    nd.set_strategy(pair)
    assert where() == (pair, True, True, False)
    with pair.scope():
        assert nd.get_strategy() is pair
    with pytest.raises(RuntimeError, match="Mixing"), other.scope():
        pass
    nd.set_strategy(other)
    assert nd.get_strategy() is other
    nd.set_strategy(None)
    assert where() == (nd.get_strategy(), False, False, True)


def test_set_strategy_in_a_scope_is_refused(pair):
    with pair.scope(), pytest.raises(RuntimeError, match="set_strategy"):
        nd.set_strategy(pair)


def test_set_strategy_in_a_replica_is_refused(pair):
    for strategy in (pair, nd.get_strategy()):
        with pytest.raises(RuntimeError, match="set_strategy"):
            strategy.run(lambda: nd.set_strategy(None))


def test_set_strategy_in_a_merge_call_is_refused():
    with pytest.raises(RuntimeError, match="set_strategy"):
        nd.get_replica_context().merge_call(lambda _: nd.set_strategy(None))
