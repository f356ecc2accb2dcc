"""Which strategy and which replica a thread is in: scopes, the default, `set_strategy`."""

import gc
import inspect

import pytest

import ndistribute as nd
from ndistribute import context
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


def where():
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
    assert nd.get_replica_context().strategy is strategy
    assert nd.get_replica_context().replica_id_in_sync_group == 0


def test_a_scope_makes_its_strategy_current_across_replicas(pair):
    with pair.scope() as entered:
        assert entered is pair
        with pair.scope():
            assert where() == (pair, True, True, False)
        assert where() == (pair, True, True, False)
    assert where() == (nd.get_strategy(), False, False, True)
    with pytest.raises(KeyError), pair.scope(), pair.scope():
        raise KeyError
    assert not nd.has_strategy()
    with nd.get_strategy().scope() as entered:  # It changes nothing.
        assert where() == (entered, False, False, True)


def test_type_checkers_know_what_the_current_strategy_offers():
    inside = {"across_workers", "agree_on", "attempt", "let_go", "make_group", "make_variable"}
    inside |= {"note_variable"}
    for name, method in inspect.getmembers(nd.Strategy, inspect.isfunction):
        if not name.startswith("_") and name not in inside:
            known = inspect.signature(getattr(StrategyLike, name)).parameters
            assert list(known) == list(inspect.signature(method).parameters), name


@pytest.mark.parametrize("default", [False, True])
def test_a_replica_is_in_its_strategy_and_a_merge_call_across_its_replicas(pair, default):
    strategy = nd.get_strategy() if default else pair
    places = []

    def step():
        nd.get_replica_context().merge_call(lambda _: places.append(where()))
        return [where()]

    (seen,) = strategy.run(step)
    inside = (strategy, not default, False, True)
    assert tuple(zip(*(part.values for part in seen), strict=True)) == (inside,) * len(
        strategy.devices
    )
    assert places == [(strategy, not default, True, False)]
    assert where() == (nd.get_strategy(), False, False, True)


def test_another_strategy_in_a_scope_is_refused(pair, other):
    default = nd.get_strategy()
    with pair.scope():
        for use in (
            lambda: other.scope().__enter__(),
            lambda: default.scope().__enter__(),
            lambda: other.run(lambda: None),
            lambda: other.reduce("sum", 1.0),
            lambda: other.gather([1.0], axis=0),
        ):
            with pytest.raises(RuntimeError, match=r"^Mixing different strategies: "):
                use()
        assert nd.get_strategy() is pair


@pytest.mark.parametrize("own", [True, False])
def test_scopes_are_per_thread(pair, other, own):
    default = nd.get_strategy()

    def enter():
        assert where() == (default, False, False, True)
        with (pair if own else other).scope() as entered:
            return nd.get_strategy() is entered

    with pair.scope(), in_thread(enter) as theirs:
        assert theirs.result(DEADLINE)


@pytest.mark.usefixtures("back_to_default")
def test_set_strategy_is_a_scope_that_is_never_left(pair, other):
    default = nd.get_strategy()
    nd.set_strategy(pair)
    assert where() == (pair, True, True, False)
    with pair.scope():
        assert nd.get_strategy() is pair
    with pytest.raises(RuntimeError, match="Mixing"), other.scope():
        pass
    nd.set_strategy(other)
    assert nd.get_strategy() is other
    for back in (None, default):
        nd.set_strategy(back)
        assert where() == (default, False, False, True)


def test_set_strategy_in_a_scope_a_replica_or_a_merge_call_is_refused(pair):
    def reset(*_):
        nd.set_strategy(None)

    for use in (
        lambda: pair.run(reset),
        lambda: nd.get_strategy().run(reset),
        lambda: nd.get_replica_context().merge_call(reset),
    ):
        with pytest.raises(RuntimeError, match="set_strategy"):
            use()
    with pair.scope(), pytest.raises(RuntimeError, match="set_strategy"):
        reset()


def test_strategies_that_are_collected_meanwhile_do_not_disturb_who_looks_for_them():
    class Collected:
        def __init__(self):
            self.cycle = self

    thresholds = gc.get_threshold()
    try:
        for most in range(1, 8):  # The garbage collector runs at each of the next allocations.
            gc.set_threshold(most)
            for _ in range(300):
                context.register_strategy_of_several(Collected())
                assert context.strategies_of_several() is not None
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert not any(isinstance(one, Collected) for one in context.strategies_of_several())
