"""A shelf and its readers: never half a change, and nobody is held up by one who is unwell."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndistribute.cluster.shelf import layout as shelf_layout
from ndistribute.cluster.shelf.layout import HEAD_BYTES, WORD_BYTES, Layout
from ndistribute.cluster.shelf.reader import ShelfReader
from ndistribute.cluster.shelf.shelf import Shelf
from ndistribute.cluster.shelf.shelved import Shelved
from tests.cluster.shelf_child import Child, open_shelf

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="anonymous files are Linux's")

SECONDS = 20.0


@pytest.fixture(scope="module")
def readers() -> Iterator[list[Child]]:
    children = [Child(), Child()]
    yield children
    for child in children:
        child.kill()


@contextlib.contextmanager
def shelved(*arrays: np.ndarray, patience: float = 0.05) -> Iterator[tuple[Shelf, list[Shelved]]]:
    shelf = Shelf(patience)
    try:
        yield shelf, [shelf.put(array, version=1) for array in arrays]
    finally:
        shelf.close()


@contextlib.contextmanager
def reading(shelf: Shelf) -> Iterator[ShelfReader]:
    with contextlib.closing(ShelfReader(shelf.shared_file())) as reader:
        yield reader


def change(shelf: Shelf, held: list[Shelved], number: int) -> None:
    shelf.begin()
    for one in held:
        one.array[...] = number
        one.version = number
    shelf.end()


def path_of(shelf: Shelf) -> str:
    return f"/proc/{os.getpid()}/fd/{shelf.shared_file()}"


def places_of(held: list[Shelved]) -> list[list[int]]:
    return [[one.place.slot, one.place.offset, one.place.nbytes] for one in held]


@given(st.lists(st.integers(0, 3 << 20) | st.integers(0, 300 << 20), max_size=60))
def test_places_are_apart_aligned_and_in_one_region_each(sizes):
    layout = Layout()
    places = [layout.place(size) for size in sizes]
    spans = [(place.offset, place.offset + place.nbytes) for place in places]
    spans += [(WORD_BYTES * place.slot, WORD_BYTES * (place.slot + 1)) for place in places]
    filled = sorted(span for span in spans if span[0] < span[1])
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(filled))
    assert all(start >= HEAD_BYTES for start, _ in spans)
    assert all(place.offset % 64 == 0 for place in places)
    for start, stop in spans:
        assert any(r.offset <= start and stop <= r.offset + r.nbytes for r in layout.regions)
    ends = [region.offset + region.nbytes for region in layout.regions]
    assert [region.offset for region in layout.regions] == [0, *ends[:-1]]
    assert ends[-1] == layout.size


@pytest.mark.parametrize("dtype", ["float32", "float16", "bool", "complex128"])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3)])
def test_what_is_read_is_what_lies_there(dtype, shape):
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    with shelved(array) as (shelf, [held]), reading(shelf) as reader:
        copy = np.zeros_like(array)
        assert reader.read([held.place], [lambda: copy]) == (1,)
        np.testing.assert_array_equal(copy, array)


def test_only_what_changed_is_copied():
    with shelved(np.zeros(2), np.zeros(3)) as (shelf, held), reading(shelf) as reader:
        places, outs = [one.place for one in held], [np.zeros(2), np.zeros(3)]
        change(shelf, held[1:], 7)
        called = []
        gives = [lambda i=i: called.append(i) or outs[i] for i in range(2)]
        assert reader.read(places, gives, known=[1, 1]) == (1, 7)
        assert called == [1]
        assert outs[1].tolist() == [7.0] * 3
        assert reader.read(places, gives, known=[1, 7]) == (1, 7)
        assert called == [1]
        assert reader.versions([place.slot for place in places]) == (1, 7)


def test_a_shelf_grows_while_it_is_mapped_and_nothing_moves(monkeypatch):
    monkeypatch.setattr(shelf_layout, "_REGION_BYTES", 1 << 16)
    with shelved(np.zeros(1000)) as (shelf, held), reading(shelf) as reader:
        address = held[0].array.ctypes.data
        for number in range(2, 700):  # More than one page of versions, and several regions.
            held.append(shelf.put(np.full(100, number), version=number))
        change(shelf, held[:1], 5)
        outs = [np.zeros_like(one.array) for one in held]
        versions = reader.read([one.place for one in held], [out.view for out in outs])
        assert versions == (5, *range(2, 700))
        assert all((out == version).all() for out, version in zip(outs, versions, strict=True))
        assert held[0].array.ctypes.data == address


@pytest.mark.parametrize("patience", [0.05, 0.0])
def test_no_reader_sees_half_a_change_of_three_variables(readers, patience):
    arrays = np.ones(120_000), np.ones(1), np.ones(30_000)
    with shelved(*arrays, patience=patience) as (shelf, held):
        start_reading(readers, shelf, held, enough=0)
        deadline = time.monotonic() + 0.5
        number = 1
        while time.monotonic() < deadline:
            number += 1
            change(shelf, held, number)
        assert stop_reading(readers) == [number, number]


def test_busy_readers_and_a_busy_writer_get_their_turns(readers):
    with shelved(np.ones(340_000)) as (shelf, held):
        start_reading(readers, shelf, held, enough=20)
        end = time.monotonic() + SECONDS
        number = 1
        while number < 20 or not all(child.has_said_more for child in readers):
            number += 1
            change(shelf, held, number)
            assert time.monotonic() < end
        assert [child.end() for child in readers] == ["enough", "enough"]
        assert stop_reading(readers) == [number, number]


def start_reading(readers: list[Child], shelf: Shelf, held: list[Shelved], enough: int) -> None:
    """Let readers read all the time; each says so when it has seen enough changes."""
    for child in readers:
        assert child.tell("read", path_of(shelf), places_of(held), enough) == "reading"


def stop_reading(readers: list[Child]) -> list[int]:
    """Return the last change that each reader has seen, once all are found to be whole."""
    for child in readers:
        child.begin("stop")
    counts = [child.end() for child in readers]
    assert [count["torn"] for count in counts] == [0, 0]
    return [count["last"] for count in counts]


def test_a_reader_that_is_killed_while_it_reads_holds_nobody_up():
    child = Child()
    try:
        with shelved(np.ones(3), patience=10 * SECONDS) as (shelf, held):
            assert child.tell("hold", path_of(shelf))
            child.kill()
            start = time.monotonic()
            change(shelf, held, 2)
            assert time.monotonic() - start < SECONDS
    finally:
        child.kill()


def test_a_reader_that_is_stopped_is_waited_for_once_and_not_for_long(readers):
    child = readers[0]
    with shelved(np.ones(3), patience=0.2) as (shelf, held), reading(shelf) as other:
        assert child.tell("hold", path_of(shelf))
        os.kill(child.pid, signal.SIGSTOP)
        try:
            start = time.monotonic()
            for number in range(2, 500):
                change(shelf, held, number)
            assert time.monotonic() - start < SECONDS  # 100 s, if it were waited for each time.
            out = np.zeros(3)
            assert other.read([held[0].place], [lambda: out]) == (499,)
            assert out.tolist() == [499.0] * 3
        finally:
            os.kill(child.pid, signal.SIGCONT)
        child.tell("release")
        change(shelf, held, 500)
        assert not shelf._turns._in_vain  # It is polite again.


def test_who_reads_while_a_change_takes_long_gives_up_at_its_deadline():
    with shelved(np.ones(3)) as (shelf, [held]), reading(shelf) as reader:
        shelf.begin()
        assert reader.read([held.place], [lambda: np.zeros(3)], timeout=0.01) is None
        assert reader.versions([held.place.slot], timeout=0.01) is None
        shelf.end()
        assert reader.versions([held.place.slot]) == (1,)


def test_the_shelf_of_a_process_that_is_no_more_is_not_read():
    child = Child()
    try:
        path, slot = child.tell("keep")
        with contextlib.closing(open_shelf(path)) as reader:
            assert reader.versions([slot]) == (1,)
            child.kill()
            assert reader.versions([slot], timeout=SECONDS) is None
    finally:
        child.kill()


def test_a_shelf_that_was_closed_is_not_read():
    with shelved(np.ones(3)) as (shelf, [held]), reading(shelf) as reader:
        shelf.close()
        assert reader.versions([held.place.slot], timeout=SECONDS) is None
        assert held.array.tolist() == [1.0] * 3


def test_a_reader_can_neither_write_nor_cut_the_file():
    with shelved(np.ones(3)) as (shelf, _):
        with pytest.raises(OSError, match="Invalid argument"):
            os.ftruncate(shelf.shared_file(), 0)
        fd = os.open(path_of(shelf), os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                os.ftruncate(fd, HEAD_BYTES)
        finally:
            os.close(fd)


def test_what_is_no_shelf_is_refused(tmp_path):
    path = tmp_path / "other"
    path.write_bytes(bytes(HEAD_BYTES))
    with pytest.raises(ValueError, match="no shelf"):
        open_shelf(str(path))


@pytest.mark.parametrize("out", [np.zeros(4), np.zeros(6)[::2]])
def test_an_array_that_does_not_fit_is_refused(out):
    with shelved(np.ones(3)) as (shelf, [held]), reading(shelf) as reader:
        with pytest.raises(ValueError, match="contiguous"):
            reader.read([held.place], [lambda: out])
        change(shelf, [held], 2)  # The turn was given back.
        assert reader.versions([held.place.slot]) == (2,)
