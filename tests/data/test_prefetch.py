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
        if fn is fails:
            assert list(iterator) == [-1] * 4
        with pytest.raises(StopIteration if fn is fails else error):
            next(iterator)
        iterator.close()
        assert all_threads_end()


def fail_at(*bad):
    def check(number):
        if int(number) in bad:
            raise ValueError(f"bad {number}")
        return number

    return check


RESUMABLE = {
    "map": lambda dataset: dataset,
    "map after map": lambda dataset: dataset.map(lambda x: x),
    "prefetch": lambda dataset: dataset.prefetch(2),
    "map on threads": lambda dataset: dataset.map(lambda x: x, num_parallel_calls=3),
    "filter": lambda dataset: dataset.filter(lambda x: x >= 0),
    "scan": lambda dataset: dataset.scan(0, lambda state, x: (state, x)),
}
PASSING_ON = {
    "batch": lambda batches: batches,
    "take": lambda batches: batches.take(9),
    "repeat": lambda batches: batches.repeat(1),
    "prefetch": lambda batches: batches.prefetch(2),
    "map": lambda batches: batches.map(lambda batch: batch),
}


@pytest.mark.parametrize("calls", [None, 3])
@pytest.mark.parametrize("name", PASSING_ON)
def test_a_batch_with_an_element_that_fails_fails_and_the_next_one_follows(name, calls):
    batches = Dataset.range(9).map(fail_at(1, 5), num_parallel_calls=calls).batch(2)
    iterator, values, errors = iter(PASSING_ON[name](batches)), [], []
    for _ in range(5):
        try:
            values.append(next(iterator).tolist())
        except ValueError as error:
            errors.append(str(error))
    assert (values, errors) == ([[2, 3], [6, 7], [8]], ["bad 1", "bad 5"]), name
    assert not list(iterator)
    with pytest.raises(ValueError, match="state_dict: map: fn has failed"):
        iterator.state_dict()
    assert [batch.tolist() for batch in batches.ignore_errors()] == values


@pytest.mark.parametrize("calls", [None, 3])
@pytest.mark.parametrize("name", RESUMABLE)
def test_an_iterator_goes_on_after_an_error_in_a_function_or_leaves_the_element_out(name, calls):
    numbers = Dataset.range(8).shuffle(3, 1, reshuffle_each_iteration=False)
    dataset = numbers.map(fail_at(2, 5, 7), num_parallel_calls=calls)
    iterator, values, errors = iter(RESUMABLE[name](dataset)), [], []
    for _ in range(8):
        try:
            values.append(int(next(iterator)))
        except ValueError as error:
            errors.append(str(error))
    assert sorted(values) == [0, 1, 3, 4, 6]
    assert sorted(errors) == ["bad 2", "bad 5", "bad 7"]
    assert not list(iterator)
    with pytest.raises(ValueError, match="state_dict: map: fn has failed"):
        iterator.state_dict()
    ignoring = RESUMABLE[name](dataset.ignore_errors())
    assert [int(x) for x in ignoring] == values
    half = iter(ignoring)
    assert [int(next(half)) for _ in range(3)] == values[:3]
    rest = iter(ignoring)
    rest.load_state_dict(half.state_dict())
    assert [int(x) for x in rest] == values[3:]
    half.close()


DYING = {
    "shuffle": lambda dataset: dataset.shuffle(1),
    "batches": lambda dataset: dataset.batch(1).batch(1),
    "unbatch": lambda dataset: dataset.batch(1).unbatch(),
    "shuffled batches": lambda dataset: dataset.shuffle(1).batch(1),
    "flat map": lambda dataset: dataset.flat_map(Dataset.from_tensors),
}


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("name", DYING)
def test_an_iteration_that_cannot_go_on_after_an_error_says_so_at_each_attempt(name, filtered):
    dataset = DYING[name](Dataset.range(8).map(fail_at(4)))
    dataset = dataset.filter(lambda _: True) if filtered else dataset
    if not filtered:
        with pytest.raises(ValueError, match=r"directly after the map or filter"):
            dataset.ignore_errors()
    for iterator in (iter(dataset), iter(dataset.ignore_errors() if filtered else dataset)):
        assert next(iterator).item() == 0
        with pytest.raises(ValueError, match="bad 4") as caught:
            list(iterator)
        assert str(pickle.loads(pickle.dumps(caught.value))) == "bad 4"
        with pytest.raises(RuntimeError, match=r"ended with an error.*ignore_errors"):
            next(iterator)


def test_an_error_of_a_source_is_not_ignored(caplog):
    def numbers():
        yield from (0, 1, 2)
        raise OSError("disk")

    dataset = Dataset.from_generator(numbers).map(fail_at(1))
    for rest in (lambda dataset: dataset, lambda dataset: dataset.map(lambda x: x)):
        iterator = iter(rest(dataset.ignore_errors(log_warning=True)))
        assert [int(next(iterator)), int(next(iterator))] == [0, 2]
        assert "bad 1" in caplog.text
        with pytest.raises(OSError, match="disk"):
            next(iterator)
        assert iterator.state_dict()["count"] == 2
        with pytest.raises(RuntimeError, match="ended with an error"):
            next(iterator)


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
