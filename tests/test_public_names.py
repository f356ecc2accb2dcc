"""What `dir` and completion show: the names that users call, and no others."""

import inspect

import numpy as np
import pytest

import ndistribute as nd

STRATEGY = """
    close cluster_resolver devices distribute_dataset distribute_datasets_from_function
    distribute_values_from_function elastic experimental_distribute_dataset
    experimental_distribute_values_from_function experimental_local_results experimental_run_v2
    gather is_chief local_results num_replicas_in_sync reduce run scope
"""
VARIABLE = """
    aggregation assign assign_add assign_sub create_slot distribute_strategy dtype name ndim numpy
    read_value scatter_add scatter_sub scatter_update shape size synchronization trainable value
    values
"""
OBJECTS = {
    "strategy": (nd.get_strategy, STRATEGY),
    "central strategy": (nd.CentralStorageStrategy, f"{STRATEGY} parameter_device"),
    "multi-worker strategy": (nd.MultiWorkerMirroredStrategy, STRATEGY),
    "strategy of servers": (
        nd.ParameterServerStrategy,
        f"{STRATEGY} delete lost_updates save_snapshots staleness timeout_seconds",
    ),
    "variable": (lambda: nd.Variable(1.0), VARIABLE),
    "variable of each replica": (lambda: nd.Variable(1.0, synchronization="on_read"), VARIABLE),
    "context": (
        nd.get_replica_context,
        "all_gather all_reduce communicator device local_replica_id merge_call "
        "num_replicas_in_sync replica_id_in_sync_group rng strategy",
    ),
    "dataset": (
        lambda: nd.Dataset.range(3),
        "apply batch cache cardinality choose_from_datasets concatenate counter element_spec "
        "enumerate filter flat_map from_files from_generator from_tensor_slices from_tensors "
        "interleave list_files map padded_batch prefetch range rebatch reduce "
        "rejection_resample repeat sample_from_datasets scan shard shuffle skip take take_while "
        "unbatch window with_options zip",
    ),
    "distributed dataset": (
        lambda: nd.get_strategy().distribute_dataset(nd.Dataset.range(3).batch(1)),
        "cardinality divided_among element_spec",
    ),
    "optimizer": (
        nd.optimizers.SGD,
        "apply apply_gradients build finalize_variable_values from_config get_config iterations "
        "learning_rate minimize name rule scale_loss slots variables",
    ),
    "values": (lambda: nd.PerReplica([1]), "numpy values"),
}


def public(thing):
    return [name for name in dir(thing) if not name.startswith("_")]


def test_the_package_shows_what_it_exports():
    assert set(public(nd)) == {name for name in nd.__all__ if not name.startswith("_")}
    assert nd.cluster.Server is nd.Server


@pytest.mark.parametrize(
    "name", [name for name in nd.__all__ if inspect.ismodule(getattr(nd, name))]
)
def test_its_modules_show_what_they_export(name):
    module = getattr(nd, name)
    assert public(module) == sorted(module.__all__)
    assert [each for each in module.__all__ if not hasattr(module, each)] == []
    if name not in ("estimator", "graph", "models", "optimizers"):
        assert not any(inspect.ismodule(getattr(module, each)) for each in public(module))


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_shows_what_users_call(name):
    make, names = OBJECTS[name]
    made = make()
    assert public(made) == sorted(names.split())
    assert [each for each in public(made) if not hasattr(made, each)] == []
    if isinstance(made, nd.Strategy):
        made.close()


def test_a_variable_on_servers_shows_its_shards_beside():
    with nd.ParameterServerStrategy():
        assert public(nd.Variable(np.zeros(2))) == sorted([*VARIABLE.split(), "variables"])


def test_the_signature_of_a_variable_is_what_users_pass():
    parameters = inspect.signature(nd.Variable).parameters
    assert {name: each.default for name, each in parameters.items()} == {
        "initial_value": inspect.Parameter.empty,
        "trainable": None,
        "name": None,
        "dtype": None,
        "synchronization": "auto",
        "aggregation": "none",
    }
