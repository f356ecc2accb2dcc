"""Threads work ahead within bounds, hand errors over in their place, and always end."""

import pickle
import subprocess
import threading
import traceback

import pytest

from ndistribute.data import Dataset
from ndistribute.data.prefetch import Ahead
from tests.data.workers import DEADLINE_SECONDS, all_threads_end
from tests.processes import python_says


class Source:
    """Counts without end, says how far it got, and whether it was closed."""

    def __init__(self):
        self.made = 0
        self.reached = threading.Condition()
        self.closed = threading.Event()

    def __iter__(self):
        return self

    def __next__(self):
        with self.reached:
            self.made += 1
            self.reached.notify_all()
        return self.made - 1

    def close(self):
        self.closed.set()

    def has_made(self, count):
        with self.reached:
            return self.reached.wait_for(lambda: self.made >= count, DEADLINE_SECONDS)


def test_elements_are_made_before_they_are_asked_for_and_not_without_bound():
    source = Source()
    ahead = Ahead(source, depth=3)
    assert source.has_made(4)  # Three wait, and one is on its way.
    assert [next(ahead) for _ in range(5)] == [0, 1, 2, 3, 4]
    assert source.has_made(9)
    assert source.made == 9
    ahead.close()
    assert list(ahead) == []
    assert source.closed.wait(DEADLINE_SECONDS)
    assert all_threads_end()


PIPELINES = {
    "prefetch": lambda d: d.prefetch(2),
    "prefetch twice": lambda d: d.prefetch(1).map(lambda x: x).prefetch(1),
    "parallel map, prefetch": lambda d: d.map(lambda x: x, num_parallel_calls=3).prefetch(2),
    "in each repetition": lambda d: d.take(2).prefetch(2).repeat(),
    "in both parts": lambda d: Dataset.zip((d.prefetch(1), d.prefetch(1))),
}


@pytest.mark.parametrize("build", PIPELINES.values(), ids=PIPELINES)
@pytest.mark.parametrize("taken", [0, 5])
def test_no_thread_is_left_when_an_iteration_is_left(build, taken):
    iterator = iter(build(Dataset.from_generator(Source)))
    for _ in range(taken):
        next(iterator)
    del iterator
    assert all_threads_end()


@pytest.mark.parametrize("build", PIPELINES.values(), ids=PIPELINES)
def test_no_thread_is_left_by_an_error_that_somebody_keeps(build):
    def fail(*element):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as kept:
        list(build(Dataset.from_generator(Source)).map(fail))
    assert all_threads_end()
    assert kept.tb is not None


@pytest.mark.parametrize("calls", [None, 3])
def test_a_map_fails_at_the_element_that_failed(calls):
    def fails(number):
        return 1 // (4 - int(number))

    def ends(number):  # No end of the data.
        return int(number) if number < 4 else next(iter(()))

    for fn, error in ((fails, ZeroDivisionError), (ends, RuntimeError)):
        iterator = iter(Dataset.range(1, 9).map(fn, num_parallel_calls=calls))
        assert len([next(iterator) for _ in range(3)]) == 3
        with pytest.raises(error, match=r"division|map: fn raised StopIteration") as caught:
            next(iterator)
        names = [frame.name for frame in traceback.extract_tb(caught.tb)]
        assert "fails" in names or fn is ends
        iterator.close()
        assert all_threads_end()


AFTER_MAP = {
    "map": lambda numbers: numbers,
    "map twice": lambda numbers: numbers.map(lambda x: x),
    "prefetch": lambda numbers: numbers.prefetch(2),
    "map on threads": lambda numbers: numbers.map(lambda x: x, num_parallel_calls=3),
    "filter": lambda numbers: numbers.filter(lambda x: x >= 0),
    "scan": lambda numbers: numbers.scan(0, lambda state, x: (state, x)),
    "shuffle": lambda numbers: numbers.shuffle(2, 1, reshuffle_each_iteration=False),
    "shuffle, map": lambda numbers: numbers.shuffle(1).map(lambda x: x),
    "batch": lambda numbers: numbers.batch(1),
    "batch twice": lambda numbers: numbers.batch(1).batch(2),
    "unbatch": lambda numbers: numbers.batch(2).unbatch(),
    "flat map": lambda numbers: numbers.flat_map(Dataset.from_tensors),
    "repeat": lambda numbers: numbers.repeat(2),
}


@pytest.mark.parametrize("calls", [None, 3])
@pytest.mark.parametrize("of_source", [False, True])
@pytest.mark.parametrize("name", AFTER_MAP)
def test_an_error_ends_an_iteration_whose_state_another_continues(name, of_source, calls):
    bad = {4, 7}

    def check(number):
        if int(number) in bad:
            raise ValueError(f"bad {number}")
        return number

    numbers = Dataset.from_generator(lambda: map(check, range(8)))
    numbers = numbers if of_source else Dataset.range(8).map(check, num_parallel_calls=calls)
    dataset, given = AFTER_MAP[name](numbers), []
    iterator = iter(dataset)
    with pytest.raises(ValueError, match="bad 4") as caught:
        given.extend(map(repr, iterator))
    assert str(pickle.loads(pickle.dumps(caught.value))) == "bad 4"
    with pytest.raises(RuntimeError, match="an error has ended"):
        next(iterator)
    bad.clear()
    resumed = iter(dataset)
    resumed.load_state_dict(iterator.state_dict())
    assert given + [*map(repr, resumed)] == [*map(repr, dataset)]


@pytest.mark.parametrize("batched", [False, True])
def test_an_interrupt_leaves_no_element_out(batched):
    def interrupted(number):
        if number == 2 and not interrupts:
            interrupts.append(number)
            raise KeyboardInterrupt
        return number

    interrupts = []
    dataset = Dataset.range(6).map(interrupted)
    dataset = dataset.batch(2) if batched else dataset
    iterator, expected = iter(dataset), [[2, 3], [4, 5]] if batched else [2, 3, 4, 5]
    for _ in range(1 if batched else 2):
        next(iterator)
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    state = iterator.state_dict()
    with pytest.raises(RuntimeError, match=r"interrupted in an element|an error has ended"):
        next(iterator)
    resumed = iter(dataset)
    resumed.load_state_dict(state)
    assert [each.tolist() for each in resumed] == expected


@pytest.mark.parametrize("ahead", ["map", "prefetch", "interleave"])
def test_an_error_of_an_element_that_nobody_takes_is_none(ahead):
    failed = threading.Event()

    def check(number):
        if int(number) == 3:
            failed.set()
            raise ValueError("bad")
        return number

    numbers = {
        "map": lambda: Dataset.range(8).map(check, num_parallel_calls=8),
        "prefetch": lambda: Dataset.range(8).map(check).prefetch(8),
        "interleave": lambda: Dataset.range(1).interleave(
            lambda _: Dataset.range(8).map(check), 2, 8, num_parallel_calls=1
        ),
    }[ahead]()
    iterator = iter(numbers.map(lambda x: x).take(2))
    assert next(iterator) == 0
    assert failed.wait(DEADLINE_SECONDS)
    assert list(iterator) == [1]


def test_a_parallel_map_calls_the_function_on_several_threads_at_once():
    meeting = threading.Barrier(3)

    def meet(x):
        meeting.wait(DEADLINE_SECONDS)
        return x

    assert [int(x) for x in Dataset.range(6).map(meet, num_parallel_calls=3)] == [*range(6)]


def test_a_generator_stays_on_one_thread_under_a_parallel_map():
    threads = set()

    def numbers():
        for number in range(40):
            threads.add(threading.current_thread())
            yield number

    doubled = Dataset.from_generator(numbers).map(lambda x: 2 * x, num_parallel_calls=4)
    assert [int(x) for x in doubled] == [*range(0, 80, 2)]
    assert len(threads) == 1
    assert all_threads_end()


def test_the_interpreter_ends_while_threads_wait():
    program = (
        "import itertools\n"
        "from ndistribute.data import Dataset\n"
        "dataset = Dataset.from_generator(itertools.count).map(abs, num_parallel_calls=2)\n"
        "iterators = [iter(dataset.prefetch(1)) for _ in range(20)]\n"
        "assert [next(iterator) for iterator in iterators] == [0] * 20\n"
    )
    assert python_says("-c", program, stderr=subprocess.STDOUT) == ""
