"""What can be wrong when a job starts: every process ends in time and says what it was."""

from __future__ import annotations

from pathlib import Path

from tests.faults.jobs import config, job

BODY = """
    import ndistribute as nd
    options = nd.CommunicationOptions(timeout_seconds=2)
    with nd.MultiWorkerMirroredStrategy(communication_options=options) as strategy:
        print("joined")
"""


def test_a_wrong_secret_is_an_error_on_both_sides(tmp_path: Path) -> None:
    with job(tmp_path, BODY, [{}, {"NDISTRIBUTE_SECRET": "quite another secret"}]) as started:
        right, wrong = started.ended()
    assert (right.code, wrong.code) == (1, 1)
    assert "AuthenticationError" in wrong.output, wrong.output
    assert "secret" in wrong.output.splitlines()[-1]
    assert "CollectiveTimeoutError: worker 0 waited 2 s for worker 1" in right.output
    assert "with the same secret" in right.output


def test_another_cluster_size_is_an_error_on_both_sides(tmp_path: Path) -> None:
    with job(tmp_path, BODY) as started:
        addresses = started.addresses
        started.processes[1].kill()
        larger = config([*addresses, "127.0.0.1:1"], 2)
        environ = {"TF_CONFIG": larger, "NDISTRIBUTE_LISTEN_FD": ""}
        with job(tmp_path, BODY, [{**environ, "TF_CONFIG": larger.replace(':1"', ':0"')}]) as odd:
            (other,) = odd.ended()
        first = started.ended()[0]
    assert (first.code, other.code) == (1, 1)
    expected = "it is worker 2 of 3, here is worker 0 of 2"
    assert expected in other.output, other.output
    assert "give every process the same cluster" in other.output
    assert "worker 0 waited 2 s for worker 1" in first.output


def test_two_processes_with_one_index_are_told_of_each_other(tmp_path: Path) -> None:
    one = {"NDISTRIBUTE_JOB_ID": "one"}
    with job(tmp_path, BODY, [one, one, one]) as started:
        addresses = started.addresses
        started.processes[2].kill()
        # On another host its address would be free; so it is here, on another port.
        second = config([addresses[0], "127.0.0.1:0", addresses[2]], 1)
        environ = {**one, "TF_CONFIG": second, "NDISTRIBUTE_LISTEN_FD": ""}
        with job(tmp_path, BODY, [environ]) as odd:
            (double,) = odd.ended()
        first, second_first, _ = started.ended()
    assert (first.code, second_first.code, double.code) == (1, 1, 1)
    refused = [end for end in (second_first, double) if "refused this process" in end.output]
    assert refused, second_first.output + double.output
    assert all("two processes are worker 1, pid " in end.output for end in [*refused, first])


def test_processes_of_two_jobs_never_mix(tmp_path: Path) -> None:
    environs = [{"NDISTRIBUTE_JOB_ID": "first"}, {"NDISTRIBUTE_JOB_ID": "second"}]
    with job(tmp_path, BODY, environs) as started:
        first, second = started.ended()
    assert (first.code, second.code) == (1, 1)
    assert "it belongs to job second, worker 0 to job first" in second.output, second.output
    assert "it belongs to job second" in first.output, first.output


def test_an_index_that_is_not_that_of_the_inherited_port_is_refused(tmp_path: Path) -> None:
    with job(tmp_path, BODY, [{"TF_CONFIG": config(["127.0.0.1:1", "127.0.0.1:2"], 1)}]) as started:
        (ended,) = started.ended()
    assert ended.code == 1
    assert "but the cluster has 127.0.0.1:2 for this process" in ended.output
