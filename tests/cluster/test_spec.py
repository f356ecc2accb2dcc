"""A cluster's description, as `tf.train.ClusterSpec` gives and refuses it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndistribute.cluster import ClusterSpec

ADDRESS = st.from_regex(r"[a-z]{1,8}:[1-9][0-9]{0,3}", fullmatch=True)
TASKS = st.lists(ADDRESS) | st.dictionaries(st.integers(0, 50), ADDRESS)
JOBS = st.sampled_from(["chief", "worker", "ps", "evaluator"])


def are_distinct(description):
    addresses = []
    for tasks in description.values():
        addresses += tasks.values() if isinstance(tasks, dict) else tasks
    return len(set(addresses)) == len(addresses)


@given(st.dictionaries(JOBS, TASKS).filter(are_distinct))
def test_a_cluster_has_the_jobs_and_tasks_that_describe_it(description):
    cluster = ClusterSpec(description)
    assert ClusterSpec(cluster.as_dict()) == cluster == ClusterSpec(cluster)
    assert cluster.jobs == list(description)
    assert bool(cluster) == bool(description)
    for job in cluster.jobs:
        tasks = cluster.job_tasks(job)
        assert cluster.num_tasks(job) == len(description[job]) == sum(t is not None for t in tasks)
        for index in cluster.task_indices(job):
            assert cluster.task_address(job, index) == description[job][index] == tasks[index]


def test_dense_tasks_are_a_list_and_sparse_ones_a_dictionary():
    cluster = ClusterSpec({"worker": {1: "b:1", 0: "a:1"}, "ps": {2: "c:1"}, "chief": []})
    assert cluster.as_dict() == {"worker": ["a:1", "b:1"], "ps": {2: "c:1"}, "chief": {}}
    assert cluster.task_indices("worker") == [0, 1]
    assert (cluster.job_tasks("ps"), cluster.job_tasks("chief")) == ([None, None, "c:1"], [])
    assert cluster.addresses() == ["c:1", "a:1", "b:1"]
    assert "ClusterSpec({'worker': ['a:1', 'b:1']" in repr(cluster)
    assert ClusterSpec({b"worker": [b"a:1"]}) == ClusterSpec({"worker": ["a:1"]})


def test_a_change_of_what_described_it_does_not_change_it():
    description = {"worker": {0: "a:1"}}
    cluster = ClusterSpec(description)
    description["worker"][1] = "b:1"
    assert cluster.num_tasks("worker") == 1


def test_only_addresses_that_are_not_known_yet_may_be_equal():
    ClusterSpec({"worker": ["a:1", "", ""], "ps": ["localhost:0", "localhost:0"]})
    for cluster, others in (
        ({"worker": ["a:1", "b:1", "a:1"]}, "worker:0 and worker:2"),
        ({"chief": ["a:1"], "worker": {3: "grpc://A:1"}}, "chief:0 and worker:3"),
        ({"ps": ["localhost:1"], "worker": ["127.0.0.1:1"]}, "ps:0 and worker:0"),
    ):
        with pytest.raises(ValueError, match=f"{others} have the same address .* own host or port"):
            ClusterSpec(cluster)


@pytest.mark.parametrize(
    ("method", "task", "message"),
    [
        ("num_tasks", ["ps"], "No such job in cluster: 'ps'"),
        ("task_indices", ["ps"], "No such job in cluster: 'ps'"),
        ("job_tasks", ["ps"], "No such job in cluster: 'ps'"),
        ("task_address", ["ps", 0], "No such job in cluster: 'ps'"),
        ("task_address", ["worker", 1], "No task with index 1 in job 'worker'"),
    ],
)
def test_an_unknown_task_is_an_error(method, task, message):
    with pytest.raises(ValueError, match=message):
        getattr(ClusterSpec({"worker": ["a:1"]}), method)(*task)


@pytest.mark.parametrize(
    ("description", "error", "message"),
    [
        (["a:1"], TypeError, "must be a dictionary"),
        ({"worker": "a:1"}, TypeError, "must be a list or a dictionary from integers"),
        ({"worker": {"0": "a:1"}}, TypeError, "task keys must be integers"),
        ({"worker": {-1: "a:1"}}, ValueError, "0 or more"),
        ({"worker": [1]}, TypeError, "task addresses must be bytes or unicode"),
        ({1: ["a:1"]}, TypeError, "job names must be bytes or unicode"),
    ],
)
def test_another_form_is_refused(description, error, message):
    with pytest.raises(error, match=message):
        ClusterSpec(description)
