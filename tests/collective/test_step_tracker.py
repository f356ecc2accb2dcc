"""Who is waited for in vain, when messages about it overtake the data."""

from __future__ import annotations

from ndistribute.collective.control import END, StepTracker


def inside(step: int) -> StepTracker:
    """Return the tracker of a process inside a step."""
    where = StepTracker()
    where.position = step
    return where


def test_whoever_left_after_it_made_the_call_is_not_gone_for_it() -> None:
    where = inside(3)
    where.note_departed(1, "has finished", made=(3, 2))
    assert where.gone((3, 2)) == set()
    assert where.gone((3, 3)) == {1}


def test_whoever_left_in_an_earlier_step_is_gone() -> None:
    where = inside(3)
    where.note_departed(1, "has finished", made=(1, 9))
    assert where.gone((3, 1)) == {1}


def test_a_call_that_was_made_was_not_skipped_although_the_step_is_over() -> None:
    where = inside(3)
    where.made = (3, 1)
    where.position = 4
    assert where.has_made((3, 1)) is True
    assert where.has_made((3, 2)) is False
    assert inside(3).has_made((3, 2)) is None, "it may still come"


def test_whoever_has_left_a_step_has_skipped_its_end_also_when_it_makes_calls_of_the_next() -> None:
    where = inside(3)
    where.made = (3, 1)
    assert where.has_made((3, END)) is None
    where.position, where.made = 5, (5, 1)
    assert where.has_made((3, END)) is False


def test_an_answer_about_an_earlier_step_does_not_count() -> None:
    where = inside(3)
    where.note(1, (3, 1), made=False)
    assert where.gone((3, 1)) == {1}
    where.position = 4
    where.begin_step()
    assert where.gone((5, 1)) == set()
    assert not where.anyone_gone


def test_a_wait_names_those_that_nobody_has_heard_of_and_not_those_who_wait_too() -> None:
    where = inside(1)
    call = 1, 1
    where.note(1, call, made=True)
    assert where.late(call, absent=[1], others=[0, 1]) == [0]
    assert where.late(call, absent=[0, 1], others=[0, 1]) == [0]
    where.note(0, call, made=True)
    assert where.late(call, absent=[1], others=[0, 1]) == [1], "its data does not come"
