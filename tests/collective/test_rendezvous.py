"""Threads that meet: what the contract tests of strategies cannot time."""

from __future__ import annotations

import threading

import pytest

import ndistribute as nd
from ndistribute.collective import rendezvous
from ndistribute.collective.backend import Call
from ndistribute.collective.rendezvous import Meeting, Rendezvous

DEADLINE = 20.0


def test_an_abort_releases_who_is_just_about_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Rendezvous(2)
    aborting = threading.Thread(target=place.abort, args=(ValueError("elsewhere"),))

    def begun_while_another_aborts(owner: Rendezvous) -> Meeting:
        aborting.start()
        aborting.join(0.2)  # It may wait for what this thread holds, or be over.
        return Meeting(owner)

    monkeypatch.setattr(rendezvous, "Meeting", begun_while_another_aborts)
    with pytest.raises(nd.WorkerLostError, match="elsewhere"):
        place.exchange(0, Call(1, "merge_call"), None, len, DEADLINE)
    aborting.join(DEADLINE)
    assert not aborting.is_alive()
