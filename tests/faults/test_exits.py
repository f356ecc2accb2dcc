"""A process that ends by itself, in whatever way: the others end too, with the reason."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.faults.jobs import job

# The worker whose index is in FATE ends between two steps; the others run until they are told.
BODY = """
    import os, sys
    import ndistribute as nd
    from tests.faults import steps

    rank = steps.strategy().cluster_resolver.task_id
    steps.worked(rank, 2, 1)
    if rank == 1:
        {ending}
    steps.until_told(rank, 2)
"""

# A connection that ends with bytes unread is "broken", another "closed without a word".
ENDINGS = {
    "sys.exit(3)": (3, "has finished"),
    "os._exit(4)": (4, "was lost: it"),
    "raise KeyError('lesson')": (1, "ended with KeyError: 'lesson'"),
    "raise KeyboardInterrupt": (-2, "ended with KeyboardInterrupt"),
    "os.abort()": (-6, "was lost: it"),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_others_are_told_how_a_process_ended_outside_of_a_step(
    ending: str, tmp_path: Path
) -> None:
    code, reason = ENDINGS[ending]
    with job(tmp_path, BODY.format(ending=ending)) as started:
        other, victim = started.ended()
    assert victim.code == code, victim.output
    assert other.code == 1, other.output
    last = other.output.rstrip().splitlines()[-3:]
    assert any("WorkerLostError" in line and reason in line for line in last), other.output
    assert any("worker 1 (" in line for line in last)


def test_a_process_that_never_closes_anything_says_good_bye_all_the_same(tmp_path: Path) -> None:
    body = """
        from tests.faults import steps
        rank = steps.strategy().cluster_resolver.task_id
        print(steps.worked(rank, 2))
    """
    with job(tmp_path, body) as started:
        for ended in started.ended():
            assert (ended.code, ended.output.strip()) == (0, "True")


def test_an_uncaught_exception_in_a_step_ends_all_with_its_reason(tmp_path: Path) -> None:
    body = """
        from tests.faults import steps
        rank = steps.strategy().cluster_resolver.task_id
        steps.failed(rank, 2, 1, "between")
    """
    with job(tmp_path, body) as started:
        other, victim = started.ended()
    assert (other.code, victim.code) == (1, 1)
    assert "ValueError: boom" in victim.output
    assert "worker 1 failed: ValueError: boom" in other.output


FORKS = """
    import os, signal, sys
    from tests.faults import steps

    rank = steps.strategy().cluster_resolver.task_id
    steps.worked(rank, 2, 1)
    child = os.fork()
    if child == 0:
        {child}
    print("child", child, flush=True)
    {parent}
"""


def test_a_fork_that_ends_takes_nothing_with_it_and_can_not_run_steps(tmp_path: Path) -> None:
    body = FORKS.format(
        child="""
        try:
            steps.worked(rank, 2)
        except RuntimeError as error:
            print(error)
        sys.exit()
        """,
        parent="""
    os.waitpid(child, 0)
    print(steps.worked(rank, 2))
    """,
    )
    with job(tmp_path, body) as started:
        for index, ended in enumerate(started.ended()):
            assert ended.code == 0, ended.output
            assert f"of worker {index} of 2 was made by process" in ended.output
            assert "of which this one is a fork" in ended.output
            assert ended.output.rstrip().endswith("True")


def test_a_killed_process_is_noticed_at_once_although_a_fork_of_it_lives_on(
    tmp_path: Path,
) -> None:
    body = FORKS.format(
        child="signal.sigwait([signal.SIGTERM])",
        parent="""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        steps.until_told(rank, 2)
    except steps.nd.WorkerLostError as error:
        print(error)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    """,
    ).replace("import os, signal, sys", "import os, signal, sys\n    signal.alarm(60)")
    with job(tmp_path, body, [{"NDISTRIBUTE_HEARTBEAT_SECONDS": "20"}] * 2) as started:
        started.processes[1].wait(50.0)
        os.kill(int(started.said(1).split()[1]), signal.SIGKILL)
        started.processes[0].wait(50.0)
        output = started.said(0)
    assert "worker 1 (" in output
    assert "was lost: it" in output
