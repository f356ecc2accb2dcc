"""What the end of one task means for the job: decisions, without a process."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndistribute.launcher.supervisor import Start, Task, Verdict, verdict


def task(kind: str, code: int | None, reports_loss: bool = False) -> Task:
    return Task(Start(kind, (), {}, kind), code, reports_loss)


CODES = st.one_of(st.none(), st.sampled_from([0, 1, 137]))
TASKS = st.lists(
    st.builds(task, st.sampled_from(["worker", "ps"]), CODES, st.booleans()), max_size=4
)


def tasks(text: str) -> list[Task]:
    """Return tasks: ``ps`` runs, ``worker=0`` ended well, ``worker=1?`` lost another."""
    found = []
    for word in text.split():
        name, _, code = word.partition("=")
        found.append(task(name, int(code.rstrip("?")) if code else None, code.endswith("?")))
    return found


# The first of the tasks is the one that ended last.
@pytest.mark.parametrize(
    ("job", "restarts", "expected"),
    [
        # Ranks: workers alone.
        ("worker=0 worker", 0, Verdict.GO_ON),
        ("worker=0 worker=0", 0, Verdict.FINISH),
        ("worker=1 worker", 0, Verdict.FAIL),
        ("worker=1? worker", 0, Verdict.WAIT),
        # Servers and workers with loops of their own.
        ("ps=0 worker", 0, Verdict.GO_ON),
        ("ps=137 worker", 1, Verdict.AGAIN),
        ("worker=137 worker=0 ps", 1, Verdict.AGAIN),
        ("worker=1? ps", 1, Verdict.AGAIN),
        ("ps=137 worker", 0, Verdict.FAIL),
        # A server that stumbles over its own end does not spoil work that is done.
        ("ps=1 worker=0 worker=0", 3, Verdict.FINISH),
        # A chief.
        ("chief=0 worker ps", 0, Verdict.FINISH),
        ("worker=0 worker=0 chief ps", 0, Verdict.GO_ON),
        ("worker=137 chief ps", 2, Verdict.AGAIN),
        ("worker=137 chief ps", 0, Verdict.FAIL),
        ("worker=1? chief=137 ps", 5, Verdict.WAIT),
        ("ps=1? chief=0 worker", 5, Verdict.FINISH),
    ],
)
def test_the_verdict_on_a_task_that_ended(job, restarts, expected):
    states = tasks(job)
    assert verdict(states[0], states, restarts) is expected


@given(TASKS, CODES.filter(bool), st.booleans(), st.integers(0, 3))
def test_only_a_failure_fails_the_job_and_that_of_a_chief_always(others, code, victim, restarts):
    ended = task("worker", 0)
    assert verdict(ended, [ended, *others], restarts) in (Verdict.GO_ON, Verdict.FINISH)
    chief = task("chief", code, victim)
    for failed in (chief, *(other for other in others if other.code)):
        expected = Verdict.WAIT if failed.reports_loss else Verdict.FAIL
        assert verdict(failed, [chief, *others], restarts) is expected
