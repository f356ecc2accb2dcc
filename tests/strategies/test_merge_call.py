"""`merge_call`, and what a replica's context allows and refuses."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import ndistribute as nd
from tests.kinds import DEADLINE, context, each, mine, plain_step, raised_in, rank, works


@plain_step("it runs while the step is traced")
def test_a_merge_call_runs_once_and_a_per_replica_that_it_returns_comes_apart(strategy):
    calls = []

    def merged(current, *args, **kwargs):
        calls.append((current, args, kwargs))
        return {"doubled": nd.PerReplica([2 * i for i in args[0]["a"][0].values]), "all": "same"}

    result = strategy.run(
        lambda: context().merge_call(merged, args=({"a": [rank()], "b": None},), kwargs={"x": 1})
    )
    ((current, (nest,), kwargs),) = calls
    assert current is strategy
    assert nest["a"][0].values == mine(strategy, lambda i: i)
    assert nest["b"] is None
    assert kwargs["x"].values == each(strategy, 1)
    assert {type(nest["a"][0]), type(kwargs["x"])} == {nd.PerReplica}
    assert result["doubled"].values == mine(strategy, lambda i: 2 * i)
    assert result["all"].values == each(strategy, "same")


def test_a_variable_passes_as_itself_and_takes_a_cross_replica_write(strategy):
    with strategy.scope():
        v = nd.Variable(1.0)

    def merged(current, variable, x):
        assert variable is v
        with current.scope():
            assert nd.get_strategy() is strategy
        return variable.assign_add(strategy.reduce("sum", x))

    assert strategy.run(lambda: context().merge_call(merged, args=(v, 1.0))) is v
    assert float(v) == 1 + strategy.num_replicas_in_sync


@plain_step("it runs while the step is traced")
def test_an_object_of_all_replicas_passes_as_itself(several):
    shared, array, arrived = object(), np.zeros(2), []

    def merged(_, *args):
        arrived.append(args)

    several.run(lambda: context().merge_call(merged, args=(shared, array, "text", 1.5, [rank()])))
    ((same, zeros, text, number, (differ,)),) = arrived
    assert (same, text) == (shared, "text")
    assert zeros is array or len(several.devices) == 1  # Of this process.
    assert number.values == each(several, 1.5)  # That numbers are one object is chance.
    assert differ.values == mine(several, lambda i: i)


def test_cross_replica_methods_in_a_replica_name_what_to_call(strategy):
    for use, instead in (
        (lambda: strategy.run(lambda: None), "merge_call"),
        (lambda: strategy.scope().__enter__(), "merge_call"),
        (lambda: strategy.reduce("sum", 1.0), "merge_call"),
        (lambda: strategy.gather(np.zeros(1), axis=0), "all_gather"),
        (lambda: context().merge_call(lambda s: s.run(lambda: None)), "merge_call"),
    ):
        with raised_in(strategy, None, RuntimeError, instead):
            strategy.run(use)
        assert works(strategy)


@plain_step("no replica has a thread of its own")
def test_a_context_is_refused_outside_its_replica_and_its_thread(several):
    """After the step, in another replica or strategy, and on a thread that the step started."""
    contexts = several.run(context).values
    with several.scope():
        _are_refused([contexts[-1]])
    _are_refused([contexts[-1]])
    default = nd.get_replica_context()

    def step():
        _are_refused([default, *(other for other in contexts if other is not context())])
        with ThreadPoolExecutor(1) as pool:
            pool.submit(_are_refused, [context()]).result(DEADLINE)

    several.run(step)
    assert works(several)


def _are_refused(contexts):
    for call in itertools.chain(*map(_calls, contexts)):
        with pytest.raises(RuntimeError, match="outside"):
            call()


def _calls(own):
    return (
        lambda: own.all_reduce("sum", 1.0),
        lambda: own.all_gather(np.zeros(1), axis=0),
        lambda: own.merge_call(lambda _: None),
        lambda: own.rng,
    )


def test_the_default_context_works_outside_any_scope():
    own = nd.get_replica_context()
    assert own.all_reduce("sum", 2.0) == 2
    assert own.all_gather(np.array([1, 2]), axis=0).tolist() == [1, 2]
    assert own.merge_call(lambda s, x: s.reduce("sum", x), args=(3,)) == 3
