"""A shuffle is a permutation, keeps the window of its buffer, and follows its seed alone."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ndistribute import context
from ndistribute.data import Dataset
from ndistribute.data.elements import Rows
from ndistribute.data.pipeline import Epoch
from ndistribute.data.shuffling import _DRAWN, through_buffer


def order_of(dataset):
    return [int(x) for x in dataset]


def not_vectorised(dataset):
    return dataset.map(lambda x: x)


def window(seed, length, buffer_size, rows):
    whole = Rows.of(np.arange(length), length)
    pieces = (whole[first : first + rows] for first in range(0, length, rows))
    chunks = through_buffer(pieces, np.random.default_rng(seed), buffer_size)
    return [int(element) for chunk in chunks for element in chunk]


def one_at_a_time(seed, length, buffer_size):
    """Run the buffer as its definition says, on the numbers that `through_buffer` draws."""
    rng = np.random.default_rng(seed)
    buffer = list(range(min(buffer_size, length)))
    for first in range(len(buffer), length, _DRAWN):
        chunk = range(first, min(first + _DRAWN, length))
        for entering, slot in zip(chunk, rng.integers(buffer_size, size=len(chunk)), strict=True):
            yield buffer[slot]
            buffer[slot] = entering
    yield from (buffer[slot] for slot in rng.permutation(len(buffer)))


sizes = st.one_of(st.integers(0, 60), st.just(2 * _DRAWN + 7))


@given(st.integers(0, 99), sizes, st.integers(1, 70), st.sampled_from([60, _DRAWN, 1 << 20]))
@example(0, (1 << 16) + 51, (1 << 16) + 1, 1 << 20)  # Slots of more than 16 bits.
@example(1, 2 * _DRAWN + 7, 50, 1)
def test_the_vectorised_window_is_the_buffer_run_element_by_element(
    seed, length, buffer_size, rows
):
    """However many chunks the rows come in."""
    order = window(seed, length, buffer_size, rows)
    assert order == list(one_at_a_time(seed, length, buffer_size))


def test_rows_of_another_array_between_pass_the_window_in_their_place():
    first, other = Rows.of(np.arange(10), 10), Rows.of(np.arange(100, 104), 4)
    chunks = through_buffer(iter([first, first, other, first]), np.random.default_rng(1), 10)
    order = [int(element) for chunk in chunks for element in chunk]
    assert Counter(order) == Counter([*range(10)] * 3 + [*range(100, 104)])
    assert all(value < 100 for value in order[:11])


@given(st.integers(0, 99), st.integers(0, 60), st.integers(1, 70))
def test_no_element_comes_out_before_the_buffer_has_seen_it(seed, length, buffer_size):
    for dataset in (Dataset.range(length), not_vectorised(Dataset.range(length))):
        order = order_of(dataset.shuffle(buffer_size, seed=seed))
        assert sorted(order) == list(range(length))
        assert all(at >= element - buffer_size + 1 for at, element in enumerate(order))


@pytest.mark.parametrize("buffer_size", [10, 100])
def test_all_elements_reach_all_places_alike(buffer_size):
    dataset = Dataset.range(20).shuffle(buffer_size, seed=3)
    first = np.bincount([order_of(dataset)[0] for _ in range(2000)], minlength=20)
    reachable = min(buffer_size, 20)
    assert first[reachable:].sum() == 0
    assert abs(first[:reachable] - 2000 / reachable).max() < 6 * np.sqrt(2000 / reachable)


@pytest.mark.parametrize("buffer_size", [5, 50])
@pytest.mark.parametrize("source", [Dataset.range, lambda n: not_vectorised(Dataset.range(n))])
def test_a_seed_gives_the_same_sequence_of_different_orders(source, buffer_size):
    def epochs(seed):
        dataset = source(30).shuffle(buffer_size, seed=seed)
        twice = order_of(dataset.repeat(2))
        return [order_of(dataset), order_of(dataset.batch(3).unbatch()), twice[:30], twice[30:]]

    orders = [*epochs(7), *epochs(-1), *epochs(2**40)]
    assert epochs(7) == orders[:4]
    assert len(set(map(tuple, orders))) == 12
    assert all(sorted(order) == list(range(30)) for order in orders)


@pytest.mark.parametrize("seed", [None, 7])
def test_without_reshuffling_every_iteration_has_the_same_order(seed):
    dataset = Dataset.range(30).shuffle(30, seed=seed, reshuffle_each_iteration=False)
    assert order_of(dataset) == order_of(dataset)
    assert order_of(dataset.repeat(2)) == 2 * order_of(dataset)


def test_rows_of_several_arrays_stay_together():
    pairs = Dataset.from_tensor_slices((np.arange(50), np.arange(50) * 3)).shuffle(20)
    assert all(y == 3 * x for x, y in pairs)
    separate = Dataset.zip((Dataset.range(50).shuffle(50, seed=1), Dataset.range(50)))
    batches = list(separate.batch(7))  # A batch stays as it was when later ones are made.
    assert np.concatenate([second for _, second in batches]).tolist() == list(range(50))


def test_set_seed_decides_the_different_orders_of_shuffles_without_a_seed():
    def orders():
        return [order_of(Dataset.range(50).shuffle(50)) for _ in range(2)]

    unseeded = orders()
    context.set_seed(5)
    first = orders()
    context.set_seed(5)
    assert orders() == first
    assert len(set(map(tuple, unseeded + first))) == 4


SHUFFLED = {
    "window": lambda d: d.shuffle(6, seed=1),
    "repeated window": lambda d: d.shuffle(6, seed=1).repeat(3),
    "shuffled repetition": lambda d: d.repeat(3).shuffle(200, seed=1),
    "shuffled repetition of shuffled": lambda d: d.shuffle(40, seed=2).repeat(3).shuffle(9, seed=1),
    "full over window": lambda d: d.shuffle(6, seed=1).shuffle(40, seed=2),
    "endless reshuffled": lambda d: d.shuffle(40, seed=2).repeat().shuffle(60, seed=1).take(99),
    "sliced": lambda d: d.shuffle(6, seed=1).skip(5).take(20).shard(3, 1),
    "joined": lambda d: d.shuffle(40, seed=1).concatenate(d).shuffle(70, seed=2),
    "joined windows": lambda d: d.shuffle(7, seed=1).concatenate(d.shuffle(9, seed=1)).repeat(2),
    "zipped": lambda d: (
        Dataset.zip((d, d.shuffle(4, seed=3))).shuffle(8, seed=1).map(lambda a, b: b)
    ),
}


@pytest.mark.parametrize("source", [Dataset.range, lambda n: not_vectorised(Dataset.range(n))])
@pytest.mark.parametrize("shuffle", SHUFFLED.values(), ids=SHUFFLED)
def test_a_pass_can_begin_at_any_element_and_batches_have_the_same_order(shuffle, source):
    node = shuffle(source(40))._node
    current = Epoch.begin(node)
    whole = order_of(node.iterate(current))
    for start in (0, 1, 6, 39, 40, 41, len(whole) - 1, len(whole)):
        assert order_of(node.iterate(current, start)) == whole[start:]
    batches = [batch.tolist() for batch in shuffle(source(40)).batch(7)]
    assert list(itertools.chain(*batches)) == whole
