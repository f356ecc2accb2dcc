"""What can be wrong when a job starts: every process ends in time and says what it was."""

import pytest

from tests.jobs.clusters import Scripts
from tests.processes import free_addresses, tf_config
from tests.transport.ends import authority, tls_environ

BODY = """
    import ndistribute as nd
    options = nd.CommunicationOptions(timeout_seconds=2)
    with nd.MultiWorkerMirroredStrategy(communication_options=options) as strategy:
        print("joined")
"""


def failed(folder, *environs, body=BODY):
    """Return how workers ended that must not join."""
    with Scripts(folder, body, environs) as started:
        ended = started.ended()
    assert [one.code for one in ended] == [1] * len(ended)
    return ended


def place(addresses, index):
    return {"TF_CONFIG": tf_config({"worker": addresses}, "worker", index)}


def test_a_wrong_secret_is_an_error_on_both_sides(tmp_path):
    right, wrong = failed(tmp_path, {}, {"NDISTRIBUTE_SECRET": "quite another secret"})
    assert "AuthenticationError" in wrong.output, wrong.output
    assert "secret" in wrong.output.splitlines()[-1]
    assert "CollectiveTimeoutError: worker 0 waited 2 s for worker 1" in right.output
    assert "with the same secret" in right.output


@pytest.mark.parametrize("what", ["TLS with the peer", "has another secret than this process"])
def test_all_workers_are_told_of_one_with_a_wrong_secret_or_certificate(tmp_path, what):
    environs = [{}, {}, {"NDISTRIBUTE_SECRET": "quite another secret"}]
    if "TLS" in what:
        folders = [tmp_path / name for name in ("ours", "theirs")]
        for folder in folders:
            folder.mkdir()
        ours, theirs = (tls_environ(authority(folder)) for folder in folders)
        environs = [{**files, "NDISTRIBUTE_UNIX_SOCKETS": "0"} for files in (ours, ours, theirs)]
    right, other, wrong = failed(tmp_path, *environs)
    assert "AuthenticationError" in wrong.output, wrong.output
    for one in (right, other):
        assert "Worker 0 refused a process: " in one.output, one.output
        assert what in one.output, one.output


def test_another_cluster_size_is_an_error_on_both_sides(tmp_path):
    two = free_addresses({"worker": 2})["worker"]
    first, other = failed(tmp_path, place(two, 0), place([*two, "127.0.0.1:0"], 2))
    assert "it is worker 2 of 3, but this is worker 0 of 2" in other.output, other.output
    assert "give every process the same cluster" in other.output
    assert "worker 0 waited 2 s for worker 1" in first.output


def test_two_processes_with_one_index_are_told_of_each_other(tmp_path):
    three = free_addresses({"worker": 3})["worker"]
    # On another host its address would be free; so it is here, on another port.
    moved = [three[0], "127.0.0.1:0", three[2]]
    places = [place(three, 0), place(three, 1), place(moved, 1)]
    first, *both = failed(tmp_path, *({**one, "NDISTRIBUTE_JOB_ID": "one"} for one in places))
    refused = [end for end in both if "refused this process" in end.output]
    assert refused, both
    assert all("two processes are worker 1, pid " in end.output for end in [*refused, first])


def test_processes_of_two_jobs_never_mix(tmp_path):
    jobs = [{"NDISTRIBUTE_JOB_ID": "first"}, {"NDISTRIBUTE_JOB_ID": "second"}]
    first, second = failed(tmp_path, *jobs)
    assert "it belongs to job second, but worker 0 belongs to job first" in second.output, (
        second.output
    )
    assert "it belongs to job second" in first.output, first.output


def test_an_index_that_is_not_that_of_the_inherited_port_is_refused(tmp_path):
    inherit = """
    import os, socket
    inherited = socket.create_server(("127.0.0.1", 0))
    os.environ["NDISTRIBUTE_LISTEN_FD"] = str(inherited.fileno())
    """
    wrong = place(["127.0.0.1:1", "127.0.0.1:2"], 1)
    (ended,) = failed(tmp_path, wrong, body=inherit + BODY)
    assert "but the cluster has 127.0.0.1:2 for this process" in ended.output
