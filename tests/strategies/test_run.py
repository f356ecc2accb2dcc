"""`run`: what reaches the replicas, and what comes back."""

import threading

import numpy as np
import pytest

import ndistribute as nd
from tests.kinds import (
    DEADLINE,
    context,
    cpus,
    each,
    host_memory,
    mine,
    mirrored,
    one_process,
    parts,
    plain_step,
    rank,
)
from tests.test_tree import Batch, Pair


@plain_step("one trace stands for all replicas")
def test_each_replica_knows_its_device(strategy):
    def step():
        own = context()
        assert own.device == strategy.devices[own.local_replica_id]
        assert type(own.replica_id_in_sync_group) is int

    strategy.run(step)


def test_each_replica_knows_its_place(strategy):
    size = strategy.num_replicas_in_sync

    def step():
        own = context()
        assert own.strategy is strategy
        return own.replica_id_in_sync_group, own.num_replicas_in_sync

    ids, sizes = strategy.run(step)
    assert ids.values == mine(strategy, range(size))
    assert sizes.values == each(strategy, size)


def test_components_reach_their_replica_wherever_they_stand(strategy):
    mine = parts(strategy, lambda i: 10 * i)

    def step(nest, pair, *, named):
        assert nest["b"] == pair.right == named.y == "same"
        return nest["a"][0], pair.left, named.x, 10 * rank()

    nest = {"a": [mine], "b": "same"}
    everyone = strategy.run(step, (nest, Pair(mine, "same")), {"named": Batch(mine, "same")})
    for passed in strategy.local_results(everyone):
        assert len(set(passed)) == 1


def test_everything_else_passes_as_the_very_same_object(strategy):
    with strategy.scope():
        v = nd.Variable(1.0)
        own = nd.Variable(1.0, synchronization="on_read", aggregation="sum")
    given = [object(), None, "text", nd.ReduceOp.SUM, v]
    if not isinstance(strategy, nd.TPUStrategy):  # There an array is an input of the program.
        given += [np.zeros(3), {"a": 1}]
    same = strategy.run(lambda *args, w: are_same([*args, w], [*given, own]), given, {"w": own})
    assert all(same.values)
    result = strategy.run(lambda: {"v": v, "own": [own]})
    assert result["v"] is v
    assert result["own"][0] is own


def are_same(left, right):
    return all(a is b for a, b in zip(left, right, strict=True))


def test_the_result_has_the_structure_that_the_step_returned(strategy):
    result = strategy.run(
        lambda: {"list": [rank(), (rank(),)], "pair": Pair(rank(), None), "batch": Batch(0, [])}
    )
    ids = mine(strategy, lambda i: i)
    assert list(result) == ["list", "pair", "batch"]
    assert type(result["pair"]) is Pair
    assert [leaf.values for leaf in (result["list"][0], result["list"][1][0])] == [ids, ids]
    assert result["pair"].left.values == ids
    assert result["pair"].right is None
    assert result["batch"].x.values == each(strategy, 0)
    assert result["batch"].y == []


def test_a_leaf_is_a_per_replica_even_of_one_and_none_alone_is_none(strategy):
    for value in (1, "text", np.zeros(2), object()):
        result = strategy.run(lambda value=value: value)
        assert type(result) is nd.PerReplica
        assert are_same(result.values, each(strategy, value))
    assert strategy.run(lambda: (None, [None])) == (None, [None])


@plain_step("one trace stands for all replicas")
def test_some_replicas_may_return_none(strategy):
    some = strategy.run(lambda: None if context().local_replica_id else "first")
    assert some.values == ("first",) + (None,) * (len(strategy.devices) - 1)


def test_replicas_run_at_the_same_time_on_threads_that_are_kept():
    together = threading.Barrier(4)
    with mirrored(4) as strategy:
        strategy.run(lambda: together.wait(DEADLINE))
        first, second = (strategy.run(threading.get_ident).values for _ in range(2))
    assert first == second
    assert len(set(first)) == 4
    assert first[0] == threading.get_ident()


def test_floating_point_settings_reach_every_replica(strategy):
    zero = np.zeros(1)

    def step():
        with pytest.raises(FloatingPointError):
            zero / zero

    with np.errstate(invalid="raise"):
        strategy.run(step)
    with np.errstate(invalid="ignore"):
        strategy.run(lambda: zero / zero)


def test_the_old_name_calls_what_a_subclass_overrides():
    for name in ("distribute_dataset", "distribute_values_from_function", "local_results", "run"):
        own = {name: lambda _, *args, **kwargs: (args, kwargs)}
        alias = "experimental_run_v2" if name == "run" else f"experimental_{name}"
        with type("Mine", (nd.OneDeviceStrategy,), own)("cpu:0") as strategy:
            assert getattr(strategy, alias)(1, x=2) == ((1,), {"x": 2})


@one_process("several processes have one chief and one cluster")
@host_memory("it shows cpu:0")
@plain_step("it shows cpu:0")
def test_a_strategy_of_one_process_is_its_own_chief_and_shows_its_devices(strategy):
    assert strategy.is_chief is True
    resolver = strategy.cluster_resolver
    assert resolver is None or not resolver.cluster_spec()
    assert "cpu:0" in repr(strategy)
    assert [str(device) for device in strategy.devices] == cpus(len(strategy.replica_contexts))


def test_a_strategy_of_clusters_has_a_resolver_also_where_it_is_alone(monkeypatch):
    for name in ("TF_CONFIG", "PMI_RANK", "RANK", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for kind in (nd.MultiWorkerMirroredStrategy, nd.ParameterServerStrategy):
        with kind() as strategy:
            resolver = strategy.cluster_resolver
            assert (resolver.task_type, resolver.task_id, resolver.num_workers) == (None, None, 1)
            assert resolver.is_chief
            assert strategy.is_chief


def test_options_of_a_run_change_nothing_and_others_are_refused(strategy):
    options = nd.RunOptions(experimental_bucketizing_dynamic_shape=True)
    assert strategy.run(lambda: None, options=options) is None
    with pytest.raises(TypeError, match=r"must be nd\.RunOptions\(\.\.\.\) or None, got 'dynamic'"):
        strategy.run(rank, options="dynamic")
    with pytest.raises(ValueError, match="experimental_xla_options have no effect"):
        nd.RunOptions(experimental_xla_options=3)


def test_a_scope_can_be_entered_again_and_inside_of_itself(strategy):
    scope = strategy.scope()
    for _ in range(2):
        with scope as outer, scope as inner:
            assert outer is inner is nd.get_strategy() is strategy
        assert nd.get_strategy() is not strategy or strategy.is_default


@host_memory("it shows cpu:0")
def test_an_empty_list_of_devices_means_those_of_the_machine():
    with nd.MirroredStrategy([]) as strategy:
        devices = strategy.devices
    with nd.MirroredStrategy() as strategy:
        assert strategy.devices == devices
