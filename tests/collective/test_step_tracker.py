"""Who is waited for in vain, when messages about it overtake the data."""

from __future__ import annotations

from ndistribute.collective.backend import Call
from ndistribute.collective.step_tracker import StepTracker


def inside(step: int) -> StepTracker:
    """Return the tracker of a process inside a step."""
    where = StepTracker()
    where.position = step
    return where


def test_whoever_left_after_it_made_the_call_is_not_gone_for_it() -> None:
    where = inside(3)
    where.note_departed(1, "has finished", made=(3, 2))
    assert where.gone(Call(2, "all_reduce")) == frozenset()
    assert where.gone(Call(3, "all_reduce")) == {1}


def test_whoever_left_in_an_earlier_step_is_gone() -> None:
    where = inside(3)
    where.note_departed(1, "has finished", made=(1, 9))
    assert where.gone(Call(1, "all_reduce")) == {1}


def test_a_call_that_was_made_was_not_skipped_although_the_step_is_over() -> None:
    where = inside(3)
    where.made = (3, 1)
    where.position = 4
    assert not where.has_skipped((3, 1))
    assert where.has_skipped((3, 2))
    assert not inside(3).has_skipped((3, 2)), "it may still come"


def test_an_answer_about_an_earlier_step_does_not_count() -> None:
    where = inside(3)
    where.note_seen((3, 1), reached=[], skipped=[1])
    assert where.gone(Call(1, "all_reduce")) == {1}
    where.position = 4
    where.begin_step()
    assert where.gone(Call(1, "all_reduce")) == frozenset()


def test_a_wait_names_those_that_nobody_has_heard_of_and_not_those_who_wait_too() -> None:
    where = inside(1)
    call = Call(1, "all_reduce")
    where.note_seen((1, 1), reached=[1], skipped=[])
    assert where.late(call, absent=[1], others=[0, 1]) == [0]
    assert where.late(call, absent=[0, 1], others=[0, 1]) == [0]
    where.note_seen((1, 1), reached=[0], skipped=[])
    assert where.late(call, absent=[1], others=[0, 1]) == [1], "its data does not come"
