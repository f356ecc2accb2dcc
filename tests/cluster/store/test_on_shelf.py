"""A store whose variables lie on a shelf does all that another does, and readers see it whole."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ndistribute.cluster.protocol.replies import Located
from ndistribute.cluster.protocol.requests import Add, Assign, Create, Enqueue, Locate, Origin, Read
from ndistribute.cluster.shelf.shelf import make_shelf
from ndistribute.cluster.store import Store
from tests.cluster.store.calls import Calls, content, one
from tests.cluster.store.test_once import program, setting


class Watched:
    """A shelf that notes how often it was written to."""

    def __init__(self, shelf):
        self._shelf = shelf
        self.begun = self.ended = 0

    def put(self, array, version):
        return self._shelf.put(array, version)

    def begin(self):
        self.begun += 1
        self._shelf.begin()

    def end(self):
        self._shelf.end()
        self.ended += 1


@pytest.fixture(scope="module")
def shelf():
    made = make_shelf()
    if made is None:
        pytest.skip("this system has no memory files")
    with contextlib.closing(made):
        yield made


def on_shelf(shelf):
    """Return a store with the variables of `setting` on a shelf."""
    calls = Calls(Store(shelf=shelf))
    calls.create(v=np.zeros(3), w=np.zeros(()), m=np.zeros(()), s=np.zeros(()), n=np.array(0))
    return calls


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_store_on_a_shelf_answers_as_another(shelf, data):
    requests = [(c, request) for c in "abc" for request in program(c, data.draw)]
    there, here = on_shelf(shelf), setting()
    for client, request in data.draw(st.permutations(requests)):
        held = there.ask("reader", Read("v")).array
        before = held.tolist()
        assert str(there.ask(client, request)) == str(here.ask(client, request))
        assert held.tolist() == before
    assert content(there.store) == content(here.store)


def test_places_are_told_and_hold_what_was_written(shelf):
    calls = on_shelf(shelf)
    calls.ask("a", one(Origin("a", 1), Add("v", np.ones(3)), Assign("w", np.array(4.0))))
    located = calls.ask("a", Locate(("w", "v", "w")))
    assert isinstance(located, Located)
    assert located.nbytes == (8, 24, 8)
    assert located.offsets[0] == located.offsets[2] != located.offsets[1]
    assert len(set(located.slots)) == 2
    assert calls.ask("a", Locate(("v", "none"))).kind == "unknown"


def test_each_transaction_that_writes_variables_is_one_change_to_readers(shelf):
    watched = Watched(shelf)
    calls = on_shelf(watched)
    add = Add("v", np.ones(3))
    calls.ask("a", one(Origin("a", 1), add, add, Enqueue("q", (1,))))
    assert (watched.begun, watched.ended) == (1, 1)
    calls.ask("a", one(Origin("a", 1), add, add, Enqueue("q", (1,))))
    calls.ask("a", one(Origin("a", 2), add, Add("none", np.ones(3))))
    calls.ask("a", one(Origin("a", 3), Enqueue("q", (1,))))
    calls.ask("a", Create("v", np.zeros(3)))
    assert (watched.begun, watched.ended) == (1, 1)


def test_a_snapshot_is_restored_onto_a_shelf(shelf):
    calls = on_shelf(shelf)
    calls.ask("a", one(Origin("a", 1), Add("v", np.ones(3))))
    head, tensors = calls.store.snapshot()
    copy = Calls(Store.restore(head, tensors, shelf=shelf))
    calls.ask("a", one(Origin("a", 2), Add("v", np.ones(3))))
    assert isinstance(copy.ask("a", Locate(("v",))), Located)
    assert copy.value("v").tolist() == [1, 1, 1]
    assert calls.value("v").tolist() == [2, 2, 2]
