"""What is wrong is refused where it is written, with what was passed and what to write instead."""

import numpy as np
import pytest

from ndistribute.data import AutoShardPolicy, Dataset, InputContext, InputOptions
from tests.data.test_dataset import Frame
from tests.data.workers import cpus, distribute, distribute_from_function


def generated(*elements):
    return Dataset.from_generator(lambda: iter(elements))


NUMBERS = Dataset.range(4)
UNBATCHED = r"unbatched.*call dataset\.batch\(global_batch_size\)"
NO_BATCH = r"leading length.*call dataset\.batch\(global_batch_size\)"

WRONG = [
    (lambda: NUMBERS.batch(0), "batch: n must be at least 1, got 0"),
    (lambda: NUMBERS.batch("8"), "batch: n must be an integer, got '8'"),
    (lambda: NUMBERS.shuffle(0), "shuffle: buffer_size must be at least 1"),
    (lambda: NUMBERS.shuffle(3, seed="a"), "shuffle: seed must be an integer, got 'a'"),
    (lambda: NUMBERS.shard(2, 2), "shard: index must be 0 to 1, got 2"),
    (lambda: NUMBERS.take(-2), "take: count must be at least -1"),
    (lambda: NUMBERS.repeat(1.5), "repeat: count must be an integer, got 1.5"),
    (lambda: NUMBERS.prefetch(-2), "prefetch: n must be at least -1"),
    (lambda: NUMBERS.map(abs, 0), "num_parallel_calls must be at least 1"),
    (lambda: NUMBERS.map(3), "map: fn must be a function, got 3"),
    (lambda: NUMBERS.with_options(None), "needs an InputOptions"),
    (lambda: NUMBERS.concatenate(3), "got int. Pass an object that can be iterated repeatedly"),
    (lambda: NUMBERS.concatenate(np.zeros(3)), "from_tensor_slices"),
    (lambda: Dataset.zip(()), "at least one dataset"),
    (lambda: Dataset.range(1.5), "range: each argument must be an integer, got 1.5"),
    (lambda: Dataset.from_tensor_slices([[1, 2], [3]]), "not rectangular"),
    (lambda: Dataset.from_tensors(np.array([[1], [2, 3]], object)), "not rectangular"),
    (lambda: Dataset.from_tensor_slices(Frame()), r"frame\[name\]\.to_numpy"),
    (lambda: Dataset.from_generator(iter(range(2))), "generator function itself"),
    (lambda: Dataset.from_files(3), "paths or patterns, got 3"),
    (lambda: Dataset.from_files([]), "at least one path"),
    (lambda: Dataset.from_files("none-*.npy"), r"no file matches 'none-.*Every worker must"),
    (lambda: Dataset.from_files("a.tfrecord"), r"no reader for 'a\.tfrecord'.*Pass reader=fn"),
    (lambda: list(NUMBERS.map(lambda x: None)), "returns its result"),
    (lambda: list(generated([1], [1, 2]).batch(2)), r"\(1,\), \(2,\) cannot be stacked"),
    (lambda: list(generated({"a": 1}, {"b": 1}).batch(2)), "differ in structure"),
    (lambda: list(generated((1,), (1, 2)).batch(2)), "differ in structure"),
    (lambda: list(NUMBERS.unbatch()), "Batch the dataset before unbatch"),
    (lambda: list(NUMBERS.flat_map(lambda x: x)), "flat_map: map_func must return a Dataset, got"),
    (lambda: NUMBERS.interleave(Dataset.range, 0), "interleave: cycle_length must be at least 1"),
    (lambda: list(NUMBERS.scan(0, lambda s, x: s)), r"must return \(state, output\), got"),
    (lambda: NUMBERS.reduce((0, 0), lambda s, x: s[0]), "reduce_func returned the state"),
    (lambda: NUMBERS.apply(len), "apply: transformation_func must return a Dataset, got 4"),
    (lambda: NUMBERS.cache("a.bin"), "cache keeps elements in memory, not in the file 'a.bin'"),
    (lambda: NUMBERS.window(2, 0), "window: shift must be at least 1"),
    (lambda: list(NUMBERS.padded_batch(2, [3])), r"shapes \(\) cannot be padded to \(3,\)"),
    (lambda: list(generated([1, 2]).padded_batch(2, [1])), r"\(2,\) cannot be padded to \(1,\)"),
    (lambda: NUMBERS.rebatch([0]), "rebatch: batch_size must contain a number above 0"),
    (lambda: Dataset.list_files("none-*"), "list_files: no file matches 'none-"),
    (lambda: Dataset.list_files("none"), "list_files: no file matches 'none'"),
    (
        lambda: list(Dataset.sample_from_datasets([NUMBERS], [1, 2])),
        r"for each dataset; got \[1, 2\] for 1 dataset\.",
    ),
    (lambda: Dataset.sample_from_datasets([]), "at least one dataset"),
    (lambda: Dataset.choose_from_datasets([], NUMBERS), "at least one dataset"),
    (
        lambda: list(Dataset.choose_from_datasets([NUMBERS], NUMBERS)),
        "the choice .*1.* is not the number of a dataset, from 0 to 0",
    ),
    (lambda: generated().element_spec, "element_spec: the dataset is empty"),
    (
        lambda: NUMBERS.concatenate([1]).map(abs).element_spec,
        "a loader does not say what it yields",
    ),
    (
        lambda: Dataset.from_generator(iter, "int8", output_signature="int8"),
        "output_types, or output_signature, not both",
    ),
    (lambda: InputOptions(auto_shard_policy="hint"), "AUTO, DATA, FILE, OFF"),
    (lambda: InputOptions(prefetch=-1), "InputOptions: prefetch must be at least 0, got -1"),
    (
        lambda: InputContext(num_replicas_in_sync=3).get_per_replica_batch_size(64),
        "not a multiple of the 3 replicas",
    ),
    (lambda: distribute({"x": np.zeros(4)}, cpus(1)), "got dict"),
    (lambda: distribute(Frame(), cpus(1)), r"frame\[name\]\.to_numpy"),
    (lambda: distribute(distribute(NUMBERS.batch(1), cpus(1)), cpus(1)), "already distributed"),
    (lambda: distribute(NUMBERS.batch(2), cpus(1), "file"), "InputOptions.* 'file'"),
    (lambda: distribute(NUMBERS.batch(2), cpus(1), InputOptions("file"), 2), "reads none"),
    (lambda: distribute(NUMBERS, cpus(2)), UNBATCHED),
    (lambda: distribute(NUMBERS.batch(2).unbatch(), cpus(2)), UNBATCHED),
    (lambda: distribute(Dataset.zip((NUMBERS, NUMBERS.batch(1))), cpus(2)), UNBATCHED),
    (lambda: list(distribute(NUMBERS.map(abs), cpus(2))), NO_BATCH),
    (lambda: list(distribute(generated((np.zeros((28, 28)), 3)), cpus(2))), NO_BATCH),
    (lambda: list(distribute([[[1, 2], [3]]], cpus(2))), "not rectangular"),
    (
        lambda: distribute(NUMBERS.batch(2), cpus(1), worker_index=1, replica_counts=(1, 2)),
        r"replica_counts is \(1, 2\).*has 1 device",
    ),
    (lambda: distribute(NUMBERS.batch(2), cpus(1), None, 2, 2), "worker_index must be 0 to 1"),
    (lambda: distribute_from_function(NUMBERS, cpus(1)), "needs a function"),
    (lambda: distribute_from_function(lambda _: None, cpus(2)), "got NoneType"),
    (lambda: distribute_from_function(list, cpus(1), 3), "InputOptions.* got 3"),
    (lambda: list(distribute_from_function(lambda _: Dataset.range(3), cpus(2))), "Empty batches"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message for _, message in WRONG])
def test_what_is_wrong_is_refused_with_what_to_write(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("x,y\n1,2\n\n3,4;5\n", r"a\.csv, line 4: column 2 is '4;5', which is not a number"),
        ("1,2\n3,\n", r"a\.csv, line 2: column 2 is ''"),
        ("NA,NA\n1,2\n", r"a\.csv, line 1: 'NA,NA' contains no value.*reader=fn"),
        (",\n1,2\n", r"a\.csv, line 1: ',' contains no value"),
        ("1;2\n", r"a\.csv, line 1: '1;2' is not separated by commas.*reader=fn"),
        ("x\ty\n1\t2\n", r"a\.csv, line 1: 'x\\ty' is not separated by commas"),
        ("1,2\n3,4\n5\n", r"a\.csv, line 3: 1 column, but the lines before it have 2"),
    ],
)
def test_an_error_in_a_csv_file_names_the_file_and_the_line(tmp_path, content, message):
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(ValueError, match=message):
        list(Dataset.from_files(tmp_path / "a.csv"))


@pytest.mark.parametrize("name", ["off", "OFF", "Off", AutoShardPolicy.OFF])
def test_a_policy_is_named_in_any_case(name):
    assert InputOptions(auto_shard_policy=name).auto_shard_policy is AutoShardPolicy.OFF
