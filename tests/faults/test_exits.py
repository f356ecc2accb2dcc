"""A process that ends by itself, in whatever way: the others end too, with the reason."""

import os
import signal

import pytest

from tests.jobs.clusters import Scripts

# Worker 1 ends; the other one runs until it is told.
BODY = """
    import os, sys
    import ndistribute as nd
    from tests.jobs import steps

    rank = steps.strategy().cluster_resolver.task_id
    steps.worked(rank, 2, 1)
    if rank == 1:
        {ending}
    steps.until_told(rank, 2)
"""
# A connection that ends with bytes unread is "broken", another "closed without a word".
ENDINGS = {
    "sys.exit(3)": (3, "worker 1 (", "has finished"),
    "os._exit(4)": (4, "worker 1 (", "was lost: it"),
    "raise KeyError('lesson')": (1, "worker 1 (", "ended with KeyError: 'lesson'"),
    "raise KeyboardInterrupt": (-2, "worker 1 (", "ended with KeyboardInterrupt"),
    "os.abort()": (-6, "worker 1 (", "was lost: it"),
    "steps.strategy().run(steps.boom)": (1, "worker 1 failed: ", "ValueError: boom"),
}
FORKS = """
    import os, signal, sys, warnings
    from tests.jobs import steps

    # Python 3.12 and later print one where a process with threads forks.
    warnings.simplefilter("ignore", DeprecationWarning)
    signal.alarm(60)
    rank = steps.strategy().cluster_resolver.task_id
    steps.worked(rank, 2, 1)
    child = os.fork()
    if child == 0:
        {child}
    print("child", child, flush=True)
    {parent}
"""


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_others_are_told_how_a_process_ended(ending, tmp_path):
    code, who, why = ENDINGS[ending]
    with Scripts(tmp_path, BODY.format(ending=ending)) as started:
        other, victim = started.ended()
    assert (victim.code, other.code) == (code, 1), victim.output + other.output
    last = " ".join(other.output.rstrip().splitlines()[-3:])
    assert "WorkerLostError" in last
    assert who in last, last
    assert why in last, last


def test_a_fork_that_ends_takes_nothing_with_it_and_can_not_run_steps(tmp_path):
    """Nor is an error what ends without closing anything."""
    child = """
        try:
            steps.worked(rank, 2)
        except RuntimeError as error:
            print(error)
        sys.exit()
    """
    parent = """
    os.waitpid(child, 0)
    print(steps.worked(rank, 2))
    """
    with Scripts(tmp_path, FORKS.format(child=child, parent=parent)) as started:
        for index, ended in enumerate(started.ended()):
            assert ended.code == 0, ended.output
            assert f"of worker {index} of 2 was made by process" in ended.output
            assert "This process is a fork of it" in ended.output
            assert ended.output.rstrip().endswith("True")


def test_a_killed_process_is_noticed_at_once_although_a_fork_of_it_lives_on(
    tmp_path,
):
    child = "signal.sigwait([signal.SIGTERM])"
    parent = """
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        steps.until_told(rank, 2)
    except steps.nd.WorkerLostError as error:
        print(error)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    """
    environ = {"NDISTRIBUTE_HEARTBEAT_SECONDS": "20"}
    with Scripts(tmp_path, FORKS.format(child=child, parent=parent), [environ] * 2) as started:
        assert started.code("worker", 1) == -signal.SIGKILL
        os.kill(int(started.said("worker:1").split()[1]), signal.SIGKILL)
        assert started.code("worker", 0) == 0
        output = started.said("worker:0")
    assert "worker 1 (" in output
    assert "was lost: it" in output
