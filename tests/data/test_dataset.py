"""Every transformation does to a dataset what a few lines of plain Python do to a list.

Files become elements by their reader, in an order that is the same wherever they are read.
"""

import collections
import dataclasses
import gc
import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ndistribute import tree
from ndistribute.data import (
    AUTOTUNE,
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    Dataset,
    InputOptions,
)
from ndistribute.data.pipeline import Epoch

Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Pair:
    x: object
    y: object


def listed(dataset):
    """Turn the elements into plain Python."""
    return [plain(element) for element in dataset]


def plain(element):
    if isinstance(element, tuple):
        return tuple(plain(item) for item in element)
    return np.asarray(element).tolist()


def from_arrays(n):
    return Dataset.from_tensor_slices((np.arange(n), 10 * np.arange(n)))


def from_a_generator(n):
    return Dataset.from_generator(lambda: ((i, 10 * i) for i in range(n)))


def batches_of(items, size):
    return [items[i : i + size] for i in range(0, len(items), size)]


def interleaved(lists, cycle, block):
    """Return what lists in `cycle` slots give in turns; the next list takes an ended one's."""
    waiting, slots, out = [*lists], [None] * cycle, []
    while waiting or any(slot is not None for slot in slots):
        for at in range(cycle):
            if slots[at] is None and waiting:
                slots[at] = waiting.pop(0)
            if slots[at] is not None:
                taken, rest = slots[at][:block], slots[at][block:]
                slots[at] = rest if len(taken) == block else None
                out += taken
    return out


def windows_of(items, size, shift, stride, drop):
    every = [
        items[at : at + (size - 1) * stride + 1 : stride] for at in range(0, len(items), shift)
    ]
    return [window for window in every if len(window) == size or not drop]


# A transformation of a dataset, and the same of a list.
STEPS = {
    "take": (lambda d, n: d.take(n), lambda x, n: x[:n]),
    "skip": (lambda d, n: d.skip(n), lambda x, n: x[n:]),
    "shard": (lambda d, n: d.shard(n + 1, n // 2), lambda x, n: x[n // 2 :: n + 1]),
    "repeat": (lambda d, n: d.repeat(n % 3), lambda x, n: x * (n % 3)),
    "endless": (lambda d, n: d.repeat().take(n), lambda x, n: (x * n)[:n]),
    "append": (
        lambda d, n: d.concatenate(from_arrays(n)),
        lambda x, n: x + [(i, 10 * i) for i in range(n)],
    ),
    "itself": (lambda d, n: d.concatenate(d), lambda x, n: x + x),
    "zip": (
        lambda d, n: Dataset.zip((d, from_arrays(n))).map(lambda a, b: (a[0], b[1])),
        lambda x, n: [(a[0], 10 * i) for i, a in zip(range(n), x, strict=False)],
    ),
    "cache": (lambda d, n: d.cache(), lambda x, n: x),
    "prefetch": (lambda d, n: d.prefetch(n), lambda x, n: x),
    "rebatch": (lambda d, n: d.batch(n + 1).unbatch(), lambda x, n: x),
    "map": (lambda d, n: d.map(lambda a, b: (a + n, b)), lambda x, n: [(a + n, b) for a, b in x]),
    "filter": (
        lambda d, n: d.filter(lambda a, b: a % (n + 1) == 0),
        lambda x, n: [(a, b) for a, b in x if a % (n + 1) == 0],
    ),
    "ahead": (lambda d, n: d.map(lambda a, b: (a, b), AUTOTUNE).prefetch(AUTOTUNE), lambda x, n: x),
    "enumerate": (
        lambda d, n: d.enumerate(n).map(lambda i, x: (x[0] + i, x[1])),
        lambda x, n: [(a + i, b) for i, (a, b) in enumerate(x, n)],
    ),
    "flat map": (
        lambda d, n: d.flat_map(lambda a, b: Dataset.from_tensors((a, b)).repeat(int(a) % (n + 1))),
        lambda x, n: [(a, b) for a, b in x for _ in range(a % (n + 1))],
    ),
    "interleave": (
        lambda d, n: d.interleave(
            lambda a, b: Dataset.from_tensors((a, b)).repeat(int(a) % 4),
            *(n + 1, n // 2 + 1, AUTOTUNE if n % 2 else None),
        ),
        lambda x, n: interleaved([[each] * (each[0] % 4) for each in x], n + 1, n // 2 + 1),
    ),
    "window": (
        lambda d, n: d.window(n + 1, n // 2 + 1, 2, n % 2 == 0).flat_map(Dataset.zip),
        lambda x, n: [each for w in windows_of(x, n + 1, n // 2 + 1, 2, n % 2 == 0) for each in w],
    ),
    "resize": (lambda d, n: d.batch(3).rebatch([n + 1, n // 3]).unbatch(), lambda x, n: x),
    "take while": (
        lambda d, n: d.take_while(lambda a, b: a < n),
        lambda x, n: list(itertools.takewhile(lambda pair: pair[0] < n, x)),
    ),
    "scan": (
        lambda d, n: d.scan(n, lambda s, x: (s + x[0], (s, x[1]))),
        lambda x, n: [
            (s, b)
            for s, (_, b) in zip(itertools.accumulate([n, *(a for a, _ in x)]), x, strict=False)
        ],
    ),
    "choose": (
        lambda d, n: Dataset.choose_from_datasets(
            [d, from_arrays(n)], Dataset.range(2).repeat(), stop_on_empty_dataset=False
        ),
        lambda x, n: interleaved([x, [(i, 10 * i) for i in range(n)]], 2, 1),
    ),
    "sample": (
        lambda d, n: Dataset.sample_from_datasets([d, from_arrays(5)], [1, 0], seed=n),
        lambda x, n: x,
    ),
    "options": (lambda d, n: d.with_options(InputOptions()), lambda x, n: x),
}

pipelines = st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 7)), max_size=4)


@pytest.mark.parametrize("source", [from_arrays, from_a_generator])
@given(length=st.integers(0, 9), steps=pipelines, size=st.integers(1, 4), drop=st.booleans())
@example(length=0, steps=[("endless", 1), ("append", 1)], size=1, drop=False)
@example(length=0, steps=[("endless", 1), ("append", 1), ("repeat", 2)], size=1, drop=False)
def test_a_pipeline_does_what_it_does_to_a_list(source, length, steps, size, drop):
    dataset, expected = source(length), [(i, 10 * i) for i in range(length)]
    for name, number in steps:
        on_dataset, on_list = STEPS[name]
        dataset, expected = on_dataset(dataset, number), on_list(expected, number)
    assert listed(dataset) == expected
    assert listed(dataset) == expected
    if "endless" not in dict(steps):  # It may be nothing that is repeated without end.
        assert dataset.cardinality() in (UNKNOWN_CARDINALITY, len(expected))
    whole = [b for b in batches_of(expected, size) if len(b) == size or not drop]
    assert listed(dataset.batch(size, drop)) == [
        tuple(map(list, zip(*b, strict=True))) for b in whole
    ]
    for start in range(len(expected) + 2):
        begun = dataset._node.iterate(Epoch.begin(dataset._node), start)
        assert listed(begun) == expected[start:]


def test_range_takes_what_the_builtin_takes():
    assert listed(Dataset.range(3)) == [0, 1, 2]
    assert listed(Dataset.range(2, 5)) == [2, 3, 4]
    assert listed(Dataset.range(9, 0, -4).batch(2)) == [[9, 5], [1]]
    assert next(iter(Dataset.range(10**15).skip(10**14).batch(2))).tolist() == [10**14, 10**14 + 1]


@pytest.mark.parametrize(
    "nest",
    [
        np.arange(4),
        (np.arange(4), np.ones((4, 2), np.float32)),
        {"b": np.arange(4), "a": {"z": np.arange(4) + 10}},
        Point(np.arange(4), (np.arange(4) + 10,)),
        Pair(np.arange(4), np.arange(4)),
    ],
    ids=["array", "tuple", "dict", "namedtuple", "dataclass"],
)
def test_rows_and_batches_have_the_structure_of_the_arrays(nest):
    dataset = Dataset.from_tensor_slices(nest).shuffle(4)
    mapped = dataset.map(lambda *e: e if type(nest) is tuple else e[0])
    rows = [*dataset, *dataset.batch(2).unbatch(), *mapped, *mapped.batch(2).unbatch()]
    assert len(rows) == 16
    for row in rows:
        assert type(row) is type(nest) or np.isscalar(row)
        number = int(tree.flatten(row)[0]) % 10
        picked = tree.map_leaves(lambda leaf, at=number: leaf[at], nest)
        assert all(map(np.array_equal, tree.flatten(row), tree.flatten(picked)))


def test_a_tuple_becomes_separate_arguments_and_a_dict_does_not_and_dtypes_are_kept():
    arrays = (np.zeros(2, np.float16), np.arange(2, dtype=np.uint8), np.array(["a", "b"]))
    dataset = Dataset.from_tensor_slices(arrays).shuffle(2).map(lambda *each: each)
    (batch,) = dataset.batch(2)
    assert [leaf.dtype for leaf in batch] == [array.dtype for array in arrays]
    named = Dataset.from_tensor_slices({"x": np.arange(2)})
    assert listed(named.map(lambda element: element["x"])) == [0, 1]


@pytest.mark.parametrize("rows", [0, 5, 12, 30])
def test_zip_puts_rows_and_elements_of_any_chunks_side_by_side(rows):
    """Rows come from arrays, one list from the end of a shuffle, single elements from a map."""
    arrays = Dataset.range(rows).concatenate(Dataset.range(12).map(lambda x: x + rows))
    elements = Dataset.range(20).map(lambda x: x)
    shuffled = elements.shuffle(20, seed=1, reshuffle_each_iteration=False)
    order = [int(x) for x in shuffled]
    zipped = Dataset.zip((arrays, shuffled, Dataset.range(20)))
    expected = list(zip(range(rows + 12), order, range(20), strict=False))
    assert [tuple(map(int, element)) for element in zipped] == expected


def test_zip_takes_any_nest_of_datasets_and_of_re_iterables():
    zipped = Dataset.zip({"x": Dataset.range(3), "y": (Dataset.range(5, 9), Dataset.range(7, 9))})
    assert [(int(e["x"]), *map(int, e["y"])) for e in zipped] == [(0, 5, 7), (1, 6, 8)]
    assert [b["x"].tolist() for b in zipped.batch(2)] == [[0, 1]]
    assert listed(Dataset.range(2).concatenate([np.int64(7)])) == [0, 1, 7]


def test_a_batch_takes_rows_of_arrays_and_single_elements_and_later_ones_are_views_again():
    array = np.arange(10)
    single = Dataset.range(10, 13).map(lambda x: x)
    batches = [*single.concatenate(Dataset.from_tensor_slices(array)).concatenate(single).batch(4)]
    assert [b.tolist() for b in batches] == [
        [10, 11, 12, 0],
        [1, 2, 3, 4],
        [5, 6, 7, 8],
        [9, 10, 11, 12],
    ]
    assert [np.shares_memory(batch, array) for batch in batches] == [False, True, True, False]


def test_datasets_of_other_dtypes_or_structures_are_concatenated_as_they_are():
    both = Dataset.range(1).concatenate(Dataset.from_tensor_slices([0.5]))
    assert [element.dtype for element in both] == [np.int64, np.float64]
    numbers = Dataset.range(2)
    both = Dataset.zip((numbers, numbers)).concatenate(Dataset.zip([numbers, numbers]))
    assert {type(element) for element in both.shuffle(4)} == {tuple, list}


class Spec:
    def __init__(self, shape, dtype):
        self.shape, self.dtype = shape, dtype


def test_a_signature_casts_and_checks():
    def pairs():
        yield [1, 2], 3
        yield [1, 2, 3], 4

    dataset = Dataset.from_generator(pairs, (Spec((None,), np.float32), "int8"))
    assert [(x.dtype, y.dtype) for x, y in dataset] == [(np.float32, np.int8)] * 2
    with pytest.raises(ValueError, match=r"shape \(3,\) where output_signature says \(2,\)"):
        list(Dataset.from_generator(pairs, (Spec((2,), np.float32), np.int8)))
    with pytest.raises(ValueError, match="structure differs"):
        list(Dataset.from_generator(pairs, np.float32))


def test_cache_calls_the_function_once_for_each_element():
    calls = []
    dataset = Dataset.range(3).map(lambda x: calls.append(int(x)) or x).cache()
    assert next(iter(dataset)) == 0  # An iteration that is left early fills nothing.
    assert listed(dataset) == listed(dataset) == [0, 1, 2]
    assert calls == [0, 0, 1, 2]


def test_an_endless_repetition_of_nothing_ends():
    nothing = Dataset.from_generator(lambda: iter(()))
    files = Dataset.from_files("a", lambda path: np.zeros(0))
    for empty in (Dataset.range(0), nothing, nothing.shuffle(3), files):
        assert listed(empty.repeat()) == []


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (Dataset.range(9).repeat().batch(4), INFINITE_CARDINALITY),
        (Dataset.range(9).repeat().take(5), 5),
        (Dataset.range(9).filter(bool), UNKNOWN_CARDINALITY),
        (Dataset.range(9).filter(bool).repeat(), INFINITE_CARDINALITY),
        (Dataset.range(9).filter(bool).take(0), 0),
        (Dataset.range(9).take(-1), 9),
        (Dataset.range(9).skip(-1), 0),
        (Dataset.zip((Dataset.range(9), Dataset.range(9).repeat())), 9),
        (Dataset.range(9).concatenate(Dataset.range(2).repeat()), INFINITE_CARDINALITY),
    ],
)
def test_cardinality(dataset, expected):
    assert dataset.cardinality() == expected


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (
            Dataset.zip((Dataset.range(4), Dataset.range(2).concatenate(Dataset.range(3))))
            .batch(2, drop_remainder=True)
            .take(1),
            "zip(range(0, 4), range(0, 2).concatenate(range(0, 3)))"
            ".batch(2, drop_remainder=True).take(1): 1 batches of 2, (int64[2], int64[2])",
        ),
        (
            Dataset.from_generator(itertools.count, np.float32).unbatch().map(abs).repeat(),
            "from_generator(count).unbatch().map(abs).repeat(): endless elements, type unknown",
        ),
    ],
)
def test_a_repr_tells_the_calls_and_what_is_known_of_the_elements(dataset, expected):
    assert repr(dataset) == f"<Dataset {expected}>"


def test_len_is_the_cardinality_where_it_is_known():
    assert len(Dataset.range(9).batch(2)) == 5
    assert Dataset.range(0)  # Not false, although it is empty.
    with pytest.raises(TypeError, match="infinite"):
        len(Dataset.range(9).repeat())


def test_the_users_arrays_can_not_be_changed_through_a_batch():
    array = np.arange(4.0)
    for dataset in (
        Dataset.from_tensor_slices(array).batch(2),
        Dataset.from_tensors(array),
        Dataset.from_files("x", lambda path: array).batch(2),
    ):
        batch = next(iter(dataset))
        assert np.shares_memory(batch, array)
        with pytest.raises(ValueError, match="read-only"):
            batch += 1
    assert array.flags.writeable


def save_numbers(folder, lengths):
    """Write files of the numbers from 0 on, so many to each."""
    paths = [folder / f"part-{index:03}.npy" for index in range(len(lengths))]
    stops = np.cumsum(lengths)
    for path, length, stop in zip(paths, lengths, stops, strict=True):
        np.save(path, np.arange(stop - length, stop, dtype=np.int32))
    return paths


def test_the_rows_of_npy_files_are_elements_file_after_file(tmp_path):
    paths = save_numbers(tmp_path, [3, 0, 2])
    dataset = Dataset.from_files(paths)
    assert [int(x) for x in dataset] == [0, 1, 2, 3, 4]
    assert [batch.tolist() for batch in dataset.batch(2)] == [[0, 1], [2, 3], [4]]
    assert next(iter(dataset)).dtype == np.int32
    assert dataset.cardinality() == UNKNOWN_CARDINALITY


def test_the_arrays_of_an_npz_file_stay_together(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(4.0).reshape(2, 2), y=np.arange(2))
    (batch,) = Dataset.from_files(tmp_path / "a.npz").batch(4)
    assert {name: leaf.tolist() for name, leaf in batch.items()} == {
        "x": [[0.0, 1.0], [2.0, 3.0]],
        "y": [0, 1],
    }


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        ("1,2\n3.5,-4\n\n", [[1, 2], [3.5, -4]]),
        ("\ufeff1,2\n", [[1, 2]]),  # A byte order mark is no header.
        ("width,height\n1,2\n", [[1, 2]]),
        ("# by hand; in metres\n", []),
        ("\n", []),
        ("", []),
    ],
)
def test_the_lines_of_a_csv_file_are_rows_of_numbers(tmp_path, content, rows):
    (tmp_path / "a.csv").write_text(content, encoding="utf-8")
    assert [row.tolist() for row in Dataset.from_files(tmp_path / "a.csv")] == rows


class Frame:
    """Imitates a DataFrame of polars: has columns, and iterating gives those."""

    columns = ("x", "y")

    def __getitem__(self, name):
        return SimpleNamespace(to_numpy=lambda: np.array([f"{name}0", f"{name}1"]))

    def __iter__(self):
        return iter(self[name] for name in self.columns)

    def to_numpy(self):
        return np.stack([column.to_numpy() for column in self], 1)


def test_a_reader_may_return_a_dataframe():
    rows = list(Dataset.from_files("a.csv", lambda path: Frame()))
    assert rows == [{"x": "x0", "y": "y0"}, {"x": "x1", "y": "y1"}]


def test_a_reader_may_yield_elements_one_by_one(tmp_path):
    def read(path):
        for word in Path(path).read_text().split():
            yield np.int64(word), path.endswith("b.txt")

    for name, text in (("a.txt", "1 2"), ("b.txt", "3")):
        (tmp_path / name).write_text(text)
    dataset = Dataset.from_files(str(tmp_path / "*.txt"), read)
    assert [(int(x), bool(y)) for x, y in dataset] == [(1, False), (2, False), (3, True)]


def test_a_file_that_is_left_half_way_is_closed(tmp_path):
    (tmp_path / "a.txt").write_text("1\n2\n3\n")
    opened = []

    def read(path):
        with open(path) as lines:
            opened.append(lines)
            yield from lines

    iterator = iter(Dataset.from_files(tmp_path / "a.txt", read).map(int))
    assert next(iterator) == 1
    del iterator
    gc.collect()
    assert opened[0].closed


def test_a_pattern_is_its_files_sorted_and_a_list_keeps_its_order(tmp_path):
    first, second = save_numbers(tmp_path, [1, 1])
    for paths, order in (
        (str(tmp_path / "part-*.npy"), [0, 1]),
        ([second, first], [1, 0]),
        ([tmp_path / "part-*1.npy", first], [1, 0]),
    ):
        assert [int(x) for x in Dataset.from_files(paths)] == order
    np.save(tmp_path / "a[0].npy", np.arange(2))  # It looks like a pattern, and is a file.
    assert len(list(Dataset.from_files(tmp_path / "a[0].npy"))) == 2


def test_an_error_names_the_file(tmp_path):
    (tmp_path / "a.npy").write_bytes(b"no array")
    uneven = Dataset.from_files("a.npy", lambda path: (np.zeros(2), np.zeros(3)))
    for dataset, message in (
        (Dataset.from_files(tmp_path / "a.npy"), "pickle"),
        (uneven, "Return arrays of equally many rows"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            list(dataset)
        assert "a.npy' was read" in caught.value.__notes__[0]


@pytest.mark.parametrize("initial", [None, [0.25, 0.75]])
def test_resampling_gives_classes_the_frequencies_of_a_distribution(initial):
    numbers = Dataset.range(8000).rejection_resample(
        lambda x: int(x % 4 > 0), [0.5, 0.5], initial, 7
    )
    kinds = [int(kind) for kind, x in numbers if (x % 4 > 0) == kind]
    assert 3500 < len(kinds) < 4500
    assert 0.45 < np.mean(kinds) < 0.55
    with pytest.raises(ValueError, match="must be 0 to 1, got 2"):
        list(Dataset.range(3).rejection_resample(lambda x: 2, [0.5, 0.5]))
    with pytest.raises(ValueError, match="a frequency for each class"):
        Dataset.range(3).rejection_resample(abs, [0.5, 0.5], [1.0])


def test_a_generator_and_bytes_are_not_changed_silently():
    def reuses():
        buffer = np.zeros(2, int)
        for number in range(4):
            buffer[:] = number
            yield {"x": buffer}

    wanted = [{"x": [n, n]} for n in range(4)]
    for dataset in (lambda d: d, lambda d: d.prefetch(4), lambda d: d.cache()):
        elements = dataset(Dataset.from_generator(reuses))
        assert [{"x": e["x"].tolist()} for e in elements] == wanted
    ended = [b"a\0", b"b"]
    (batch,) = Dataset.from_tensor_slices(ended).map(lambda x: x).batch(2)
    assert list(batch) == ended
    (nested,) = Dataset.from_tensors([[b"a\0"], [b"b"]])
    assert nested.tolist() == [[b"a\0"], [b"b"]]
    with pytest.raises(TypeError, match="cannot contain both text and numbers"):
        list(Dataset.range(2).map(lambda x: "a" if x else 1).batch(2))
    with pytest.raises(TypeError, match="contains a set, but each leaf must be an array"):
        Dataset.from_tensors({1, 2})


def test_numbers_are_counted_endlessly():
    counter = Dataset.counter(5, -2, np.float32)
    assert [x.item() for x in counter.skip(1).take(3)] == [3.0, 1.0, -1.0]
    assert (counter.cardinality(), repr(counter.element_spec)) == (-1, "float32[]")
    optional = iter(Dataset.range(1))
    assert optional.get_next_as_optional().get_value() == 0
    assert not optional.get_next_as_optional().has_value()


def test_a_signature_says_what_is_one_array():
    def pairs():
        yield (1,), [(2, 3), (4, 5)]

    signature = (np.zeros(1, np.int8), np.zeros((2, 2), np.float32))
    (element,) = Dataset.from_generator(pairs, output_signature=signature)
    assert [(leaf.dtype.name, leaf.tolist()) for leaf in element] == [
        ("int8", [1]),
        ("float32", [[2, 3], [4, 5]]),
    ]


def test_methods_that_only_tensorflow_has_are_refused_with_what_to_use():
    for name, instead in (("save", "from_files"), ("ragged_batch", "padded_batch")):
        with pytest.raises(AttributeError, match=f"has no {name}: use .*{instead}"):
            getattr(Dataset.range(2), name)
    with pytest.raises(ValueError, match="from_files"):
        Dataset.range(2).cache("file")
    with pytest.raises(AttributeError, match="no attribute 'bach'"):
        Dataset.range(2).bach(2)
