"""What a copy of a shard decides, and whom the witness lets lead: at most one copy leads."""

import contextlib
import os
import random

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.parameter_server.copies import Witness, next_step, witness_of
from ndistribute.parameter_server.messages import Beat, Vote
from ndistribute.transport.reach import look_for
from tests.kinds import closing
from tests.processes import free_addresses

NOBODY = Beat()


def beat(role, epoch=5, total=0, *, whole=False):
    return Beat(role, whole, epoch, total)


@pytest.mark.parametrize(
    ("mine", "other", "step"),
    [
        (beat("new", 0), NOBODY, "wait"),
        (beat("new", 0), beat("new", 0), "lead"),  # The first copy, of two that are equal.
        (beat("new", 5, 9), beat("new", 5, 10), "wait"),  # Who has more on its disk leads.
        (beat("new", 5, 9), beat("new", 4, 10), "lead"),
        (beat("new", 9), beat("follows", 5), "wait"),  # It lives, and will lead.
        (beat("new", 0), beat("joins", 0), "lead"),
        (beat("new", 9), beat("leads", 5), "join"),
        (beat("joins", 5), beat("leads", 5), "join"),
        (beat("joins", 0), beat("new", 0), "wait"),
        (beat("joins", 0), NOBODY, "wait"),
        (beat("follows"), beat("leads"), "wait"),
        (beat("follows"), beat("leads", 6), "join"),
        (beat("follows"), beat("new", 0), "lead"),
        (beat("follows"), NOBODY, "wait"),
        (beat("leads"), NOBODY, "wait"),  # Alone.
        (beat("leads"), beat("joins", 0), "wait"),  # It is being filled.
        (beat("leads"), beat("joins"), "fill"),
        (beat("leads", whole=True), beat("follows"), "wait"),
        (beat("leads", whole=True), beat("joins", 0), "dismiss"),
        (beat("leads", whole=True), beat("new", 0), "lead"),
        (beat("leads", whole=True), beat("leads", 6), "join"),
    ],
)
def test_a_copy_decides_by_what_both_say(mine, other, step):
    assert next_step(mine, other, 0, dead=False, silent=False) == step


@pytest.mark.parametrize("mine", [beat("follows"), beat("leads", whole=True)])
def test_silence_needs_a_vote_and_death_needs_none(mine):
    assert next_step(mine, NOBODY, 0, dead=False, silent=True) == "vote"
    assert next_step(mine, NOBODY, 0, dead=True, silent=False) == "lead"
    # It may have led before it died, without the word of this copy.
    for other in (NOBODY, beat("new", 0), beat("joins", 0)):
        assert next_step(mine, other, 0, dead=True, silent=True) == "vote"


@pytest.mark.parametrize("mine", [beat("new"), beat("joins")])
def test_a_copy_that_may_lack_changes_never_leads_because_the_other_is_dead(mine):
    assert next_step(mine, NOBODY, 0, dead=True, silent=True) == "wait"


def says(witness, copy, epoch, *, asks=True):
    return witness.handle(None, 0, Vote(0, copy, epoch, asks)).value


def test_a_witness_agrees_with_one_copy_in_an_epoch():
    witness = Witness()
    assert [says(witness, copy, 5, asks=False) for copy in (0, 1)] == [0, 1]
    assert [says(witness, 1, 5), says(witness, 0, 5), says(witness, 1, 5)] == [1, 2, 1]
    assert [says(witness, 0, 5), says(witness, 1, 6), says(witness, 0, 6)] == [2, 1, 2]


def test_a_witness_that_was_started_again_waits_until_it_knows_both_copies():
    witness = Witness()
    assert says(witness, 0, 5) == 0  # The other one may lead already.
    assert says(witness, 1, 6, asks=False) == 1
    assert says(witness, 0, 5) == 2


@pytest.mark.parametrize("seed", range(20))
def test_no_epoch_has_two_leaders_however_votes_and_restarts_mix(seed):
    """Each copy follows in an epoch, and leads the next one if the witness says so."""
    rng, witness, leaders = random.Random(seed), Witness(), {}
    epochs = [5, 5]
    for _ in range(300):
        copy = rng.randrange(2)
        if rng.random() < 0.1:
            witness = Witness()
        asks = rng.random() < 0.5
        answer = says(witness, copy, epochs[copy], asks=asks)
        if asks and answer == 1:
            epochs[copy] += 1
            assert leaders.setdefault(epochs[copy], copy) == copy
        if epochs[copy] < epochs[1 - copy] and rng.random() < 0.2:  # The other one fills it.
            epochs[copy] = epochs[1 - copy]
    assert len(leaders) > 5


@pytest.mark.parametrize(
    ("cluster", "shards"),
    [
        ({"ps": ["a:1", "b:1", "c:1"]}, [("ps", 2), ("ps", 0), ("ps", 1)]),
        ({"ps": ["a:1", "b:1"], "worker": {3: "c:1"}}, [("worker", 3)] * 2),
        ({"ps": ["a:1", "b:1"], "chief": ["c:1"]}, [None, None]),
    ],
)
def test_the_witness_is_a_third_server_or_else_a_worker(cluster, shards):
    spec = nd.cluster.ClusterSpec(cluster)
    assert [witness_of(spec, shard) for shard in spec.task_indices("ps")] == shards


@pytest.mark.parametrize(
    ("servers", "options", "why"),
    [
        (2, {"replicas": 3}, "replicas must be 1 or 2"),
        (1, {"replicas": 2}, "the cluster has 1 server: start another server"),
        (2, {"replicas": 2, "max_staleness": 1}, "replicas=2 needs asynchronous updates"),
        (2, {"replicas": 2, "replicas_to_aggregate": 1}, "replicas=2 needs asynchronous updates"),
    ],
)
def test_what_two_copies_cannot_do_is_refused_at_the_start(servers, options, why):
    cluster = free_addresses({"worker": 1, "ps": servers})
    resolver = nd.SimpleClusterResolver(cluster, task_type="worker", task_id=0)
    with pytest.raises(ValueError, match=why):
        nd.ParameterServerStrategy(resolver, **options)
    with pytest.raises(ValueError, match="the cluster has 0"):
        nd.ParameterServerStrategy(nd.SimpleClusterResolver({}), replicas=2)


def test_servers_of_jobs_with_one_copy_make_no_other(monkeypatch, tmp_path):
    monkeypatch.setenv("NDISTRIBUTE_SECRET", "a secret of thirty-two characters")
    cluster = free_addresses({"worker": 1, "ps": 2})
    resolver = nd.SimpleClusterResolver(cluster, task_type="worker", task_id=0)
    servers = [nd.Server(cluster, "ps", i, snapshot_directory=tmp_path) for i in range(2)]
    strategy = nd.ParameterServerStrategy(resolver)
    with servers[0], servers[1], closing(strategy), strategy.scope():
        nd.Variable(np.zeros(3)).assign_add(np.ones(3))
    assert {name.split(".")[0] for name in os.listdir(tmp_path)} == {"ps-0", "ps-1"}


@pytest.mark.parametrize("durability", ["snapshot", "log"])
@pytest.mark.parametrize("before", [1, 2])
def test_snapshots_of_another_number_of_copies_are_refused(
    monkeypatch, tmp_path, before, durability
):
    monkeypatch.setenv("NDISTRIBUTE_SECRET", "a secret of thirty-two characters")

    def train(replicas):
        cluster = free_addresses({"worker": 1, "ps": 2})
        resolver = nd.SimpleClusterResolver(cluster, task_type="worker", task_id=0)
        servers = [nd.Server(cluster, "ps", i, snapshot_directory=tmp_path) for i in range(2)]
        with servers[0], servers[1], contextlib.ExitStack() as opened:
            strategy = nd.ParameterServerStrategy(resolver, **how, replicas=replicas)
            opened.enter_context(closing(strategy))
            with strategy.scope():
                variable = nd.Variable(np.zeros(3), name="w")
            return variable.assign_add(np.ones(3)).numpy()[0]

    how = {"durability": durability, "timeout_seconds": 20}
    assert [train(before), train(before)] == [1, 2]
    other = 3 - before
    with pytest.raises(
        ValueError, match=f"was written with replicas={before}, and .* has replicas={other}"
    ):
        train(other)
    assert train(before) == 3


def test_a_witness_serves_until_the_last_strategy_of_its_process_is_closed(monkeypatch):
    monkeypatch.setenv("NDISTRIBUTE_SECRET", "a secret of thirty-two characters")
    cluster = free_addresses({"worker": 1, "ps": 2})
    resolver = nd.SimpleClusterResolver(cluster, task_type="worker", task_id=0)
    with nd.Server(cluster, "ps", 0), nd.Server(cluster, "ps", 1):
        strategies = [nd.ParameterServerStrategy(resolver, replicas=2) for _ in range(2)]
        for strategy in strategies:
            assert look_for(cluster["worker"][0]) == ""
            strategy.close()
        assert "nothing listens there" in look_for(cluster["worker"][0])
