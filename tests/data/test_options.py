"""Options are checked when they are made, and say what would have been right."""

from __future__ import annotations

import pytest

from ndistribute.data import AutoShardPolicy, InputContext, InputOptions


@pytest.mark.parametrize("name", ["off", "OFF", "Off", AutoShardPolicy.OFF])
def test_a_policy_is_named_in_any_case(name):
    assert InputOptions(auto_shard_policy=name).auto_shard_policy is AutoShardPolicy.OFF


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="AUTO, DATA, FILE, OFF"):
        InputOptions(auto_shard_policy="hint")


def test_prefetch_is_not_negative():
    with pytest.raises(ValueError, match="InputOptions: prefetch must be at least 0, got -1"):
        InputOptions(prefetch=-1)


def test_a_replica_gets_its_share_of_the_global_batch():
    assert InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(64) == 16


def test_a_global_batch_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="not a multiple of the 3 replicas"):
        InputContext(num_replicas_in_sync=3).get_per_replica_batch_size(64)
