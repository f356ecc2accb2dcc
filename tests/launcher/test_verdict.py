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
    """Return tasks: ``ps`` runs, ``worker=0`` ended well, ``worker=1?`` lost another.

    ``worker=1~`` may not have joined before the work was done, and ``worker=1-`` was removed.
    """
    found = []
    for word in text.split():
        name, _, code = word.partition("=")
        number = code.rstrip("?~-")
        found.append(task(name, int(number) if number else None, code.endswith("?")))
        found[-1].late, found[-1].removed = code.endswith("~"), code.endswith("-")
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


@pytest.mark.parametrize(
    ("job", "restarts", "expected"),
    [
        ("worker=137 worker", 1, Verdict.AGAIN),
        ("worker=1? worker", 1, Verdict.AGAIN),
        # Enough others go on, or too few do.
        ("worker=137 worker worker worker=1", 0, Verdict.GO_ON),
        ("worker=137 worker worker=1", 0, Verdict.FAIL),
        ("worker=1? worker worker=1", 0, Verdict.WAIT),
        # It handed over: that is no failure.
        ("worker=143 worker", 0, Verdict.AGAIN),
        ("worker=143- worker worker", 9, Verdict.GO_ON),
        ("worker=137- worker worker", 9, Verdict.GO_ON),
        ("worker=143- worker", 9, Verdict.FAIL),
        # The work is done when the first has ended well: the others still write what they have.
        ("worker=0 worker worker", 9, Verdict.GO_ON),
        ("worker=0 worker=0 worker=1", 9, Verdict.FINISH),
        ("worker=0 worker=~ worker=143", 9, Verdict.FINISH),
        ("worker=0 worker=~ worker", 9, Verdict.GO_ON),
        ("worker=143 worker=0", 9, Verdict.FINISH),
        ("worker=1~ worker=0 worker", 9, Verdict.GO_ON),
        ("worker=1~ worker=0 worker=~", 9, Verdict.FINISH),
        ("worker=1 worker=0 worker", 9, Verdict.FAIL),
        ("worker=1? worker=0 worker", 9, Verdict.WAIT),
    ],
)
def test_the_verdict_on_a_worker_of_an_elastic_job_of_two_at_least(job, restarts, expected):
    states = tasks(job)
    assert verdict(states[0], states, restarts, min_workers=2) is expected


@given(TASKS, CODES.filter(bool), st.booleans(), st.integers(0, 3))
def test_only_a_failure_fails_the_job_and_that_of_a_chief_always(others, code, victim, restarts):
    ended = task("worker", 0)
    assert verdict(ended, [ended, *others], restarts) in (Verdict.GO_ON, Verdict.FINISH)
    chief = task("chief", code, victim)
    for failed in (chief, *(other for other in others if other.code)):
        expected = Verdict.WAIT if failed.reports_loss else Verdict.FAIL
        assert verdict(failed, [chief, *others], restarts) is expected
