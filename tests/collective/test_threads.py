"""Collectives over replica threads against NumPy, to the last bit, and who owns which array."""

import functools
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ndistribute as nd
from ndistribute import tree
from ndistribute.collective import threads
from ndistribute.collective.backend import Call, Update
from ndistribute.collective.communicator import SMALL_BYTES as SMALL_OUTPUT
from ndistribute.collective.communicator import Outputs
from ndistribute.collective.threads import BLOCK_BYTES, SMALL_BYTES, Meeting, Rendezvous
from tests.kinds import closing, context, cpus, mirrored, rank

UFUNCS = {
    "SUM": np.add,
    "MEAN": np.add,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "PROD": np.multiply,
}
DTYPES = "bool uint8 int64 float16 float32 float64 complex64".split()
LARGE = SMALL_OUTPUT // 8

ops = st.sampled_from(sorted(UFUNCS))
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**32 - 1)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
# One element below and above what the last to arrive reduces alone, and above a block.
large = st.sampled_from([SMALL_BYTES - 1, SMALL_BYTES + 1, 2 * SMALL_BYTES + 77, 3 * BLOCK_BYTES])


@pytest.fixture(scope="module", params=[1, 2, 3])
def strategy(request):
    with closing(mirrored(request.param)) as made:
        made.run(lambda: None)  # Threads start here, not in a test that would seem to leave them.
        yield made


def draw(seed, replica, shape, dtype):
    """Return numbers of a replica, of many magnitudes where the dtype has them."""
    rng = np.random.default_rng([seed, replica])
    kind = np.dtype(dtype).kind
    if kind in "biu":
        return rng.integers(0, 2 if kind == "b" else 100, size=shape).astype(dtype)
    numbers = rng.normal(size=shape) * 10.0 ** rng.integers(-3, 3, size=shape)
    if kind == "c":
        numbers = numbers + 1j * rng.normal(size=shape)
    return np.asarray(numbers.astype(dtype))


def reference(op, arrays):
    """Reduce in replica order: 16-bit floats in 32 bits, a mean of integers in 64."""
    dtype = arrays[0].dtype
    if op == "MEAN" and dtype.kind in "iub":
        dtype = np.dtype(np.float64)
    wide = np.dtype(np.float32) if dtype == np.float16 else dtype
    total = functools.reduce(UFUNCS[op], [array.astype(wide) for array in arrays])
    return (total / wide.type(len(arrays)) if op == "MEAN" else total).astype(dtype)


def agrees(result, op, arrays):
    """Compare with the reference to the bit; complex products as close as NumPy's own loops are."""
    with np.errstate(all="ignore"):
        wanted = np.asarray(reference(op, [np.asarray(array) for array in arrays]))
    result = np.asarray(result)
    if op == "PROD" and wanted.dtype.kind == "c":
        # With an output in place, NumPy rounds them in another way than without.
        alike = (result.dtype, result.shape) == (wanted.dtype, wanted.shape)
        return alike and np.allclose(result, wanted, rtol=1e-5, atol=1e-5)
    return bits(result) == bits(wanted)


def bits(nest):
    return [(a.dtype, a.shape, a.tobytes()) for a in map(np.asarray, tree.flatten(nest))]


def run_twice(strategy, step, *args):
    """Run a step twice; all replicas and both runs must agree to the bit."""
    with np.errstate(all="ignore"):
        results = [strategy.local_results(strategy.run(step, args)) for _ in range(2)]
    first = bits(results[0][0])
    assert all(bits(one) == first for result in results for one in result)
    return results[0][0]


def per_replica(strategy, make):
    return nd.PerReplica([make(i) for i in range(strategy.num_replicas_in_sync)])


@given(ops, dtypes, st.one_of(shapes, large), seeds)
@settings(max_examples=40)
def test_an_array_is_reduced_and_inputs_stay(strategy, op, dtype, shape, seed):
    if isinstance(shape, int):
        shape = (-(-shape // np.dtype(dtype).itemsize),)
    given = per_replica(strategy, lambda i: draw(seed, i, shape, dtype))
    before = bits(given.values)
    result = run_twice(strategy, lambda x: context().all_reduce(op, x), given)
    assert agrees(result, op, given.values)
    assert bits(given.values) == before


def test_rows_are_summed_in_a_dtype_that_holds_the_sum(strategy):
    def step():
        integers = nd.IndexedSlices(np.array([[1], [2]]), np.array([0, rank()]), (4, 1))
        halves = np.full(
            (3, 2), 1 if rank() else 2048, np.float16
        )  # There, neighbours are 2 apart.
        rows = nd.IndexedSlices(halves, np.arange(3), (4, 2))
        mean = context().all_reduce("mean", integers).to_dense()
        return mean, context().all_reduce("sum", rows).values

    dense, values = run_twice(strategy, step)
    size = strategy.num_replicas_in_sync
    assert dense.dtype == np.float64
    assert np.isclose(dense.sum(), 3)
    assert np.isclose(dense[0, 0], 1 + 2 / size)
    assert values.dtype == np.float16
    assert (values == np.float16(2048 + size - 1)).all()


@pytest.mark.parametrize("count", [1, 3])
def test_every_cross_device_op_gives_the_same_bits(count):
    leaves = [(7, dtype) for dtype in DTYPES]
    leaves += [(SMALL_BYTES // 4, dtype) for dtype in ("float16", "float32", "complex64")]
    given = [[draw(5, i, (size,), dtype) for size, dtype in leaves] for i in range(count)]
    seen = []
    for kind in (
        nd.NcclAllReduce,
        nd.RingAllReduce,
        nd.HierarchicalCopyAllReduce,
        nd.ReductionToOneDevice,
    ):
        with nd.MirroredStrategy(cpus(count), cross_device_ops=kind()) as strategy:
            step = lambda values: [context().all_reduce(op, values) for op in UFUNCS]  # noqa: E731
            with np.errstate(all="ignore"):
                results = strategy.run(step, (nd.PerReplica(given),))
            seen += [bits(result) for result in strategy.local_results(results)]
    assert all(one == seen[0] for one in seen)


def test_a_cross_device_op_is_an_object():
    for wrong in ("nccl", nd.NcclAllReduce, 3):
        with pytest.raises(TypeError, match="RingAllReduce"):
            nd.MirroredStrategy(["cpu:0"], cross_device_ops=wrong)


def read_only(x):
    x.flags.writeable = False
    return x


LAYOUTS = {
    "fortran": np.asfortranarray,
    "strided": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "reversed": lambda x: x[::-1, ::-1],
    "read-only": read_only,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_of_an_array_does_not_matter(strategy, layout):
    for shape in ((3, 5), (120, 150)):
        given = per_replica(strategy, lambda i, s=shape: LAYOUTS[layout](draw(1, i, s, "float64")))
        result = run_twice(strategy, lambda x: context().all_reduce("sum", x), given)
        assert np.array_equal(result, reference("SUM", list(given.values)))
        gathered = run_twice(strategy, lambda x: context().all_gather(x, axis=1), given)
        assert np.array_equal(gathered, np.concatenate(given.values, axis=1))


@pytest.mark.parametrize("sizes", [(1,), (5, 0, 17), (SMALL_BYTES // 8, 3, SMALL_BYTES // 4)])
def test_reduce_update_touches_every_element_once(strategy, sizes):
    targets = [np.zeros(size) for size in sizes]
    touched = [np.zeros(size, int) for size in sizes]

    def update(prepared, leaf, start, stop, total):
        assert prepared == "ready"
        assert len(total) == stop - start
        targets[leaf][start:stop] += total
        touched[leaf][start:stop] += 1
        total[:] = np.nan  # It may be changed.

    def step():
        arrays = [np.arange(size) + float(rank()) for size in sizes]
        return context().communicator.reduce_update("sum", arrays, Update(lambda: "ready", update))

    count = strategy.num_replicas_in_sync
    assert set(strategy.local_results(strategy.run(step))) == {"ready"}
    for target, size in zip(targets, sizes, strict=True):
        assert np.array_equal(target, count * np.arange(size) + count * (count - 1) / 2)
    assert all((one == 1).all() for one in touched)


def test_parts_of_rows_cover_them_once(strategy):
    for count in (0, 1, 2, 7, 100):
        run = strategy.run(lambda count=count: context().communicator.owned_part(count))
        parts = strategy.local_results(run)
        assert [row for part in parts for row in range(count)[part]] == list(range(count))


def test_what_cannot_be_reduced_is_refused(strategy):
    rows = nd.IndexedSlices(np.ones((1, 2)), np.array([0]), (3, 2))
    for op, value, error, text in (
        ("sum", None, TypeError, "SUM of"),
        ("sum", "text", TypeError, "SUM of"),
        ("sum", object(), TypeError, "SUM of"),
        ("sum", np.array(["a"]), TypeError, "SUM of"),
        ("max", [rows], ValueError, "only SUM and MEAN"),
    ):
        with pytest.raises(error, match=text):
            strategy.run(lambda op=op, value=value: context().all_reduce(op, value))


def test_rows_of_different_tables_are_refused():
    def step():
        rows = nd.IndexedSlices(np.ones((1, 2)), np.array([0]), (5 + rank(), 2))
        context().all_reduce("sum", rows)

    with mirrored(2) as strategy, pytest.raises(nd.CollectiveMismatchError):
        strategy.run(step)


def test_numbers_nests_without_leaves_and_names_of_ops_are_taken(strategy):
    size = strategy.num_replicas_in_sync

    def step():
        assert context().all_reduce("sum", {"a": []}) == {"a": []}
        assert context().all_gather((), axis=0) == ()
        total, mean = context().all_reduce("sum", 2), context().all_reduce("mean", 2)
        assert (total, total.dtype, mean, mean.dtype) == (2 * size, np.int64, 2, np.float64)
        for name in ("sum", "Sum", "SUM", "ReduceOp.SUM", nd.ReduceOp.SUM):
            assert context().all_reduce(name, 1) == size

    strategy.run(step)


def address(array):
    return int(array.ctypes.data)


@pytest.mark.parametrize(
    "hold",
    [
        lambda array: array,
        lambda array: array.reshape(2, -1)[1, 3:],
        lambda array: memoryview(array)[5:],
        lambda array: np.asarray(memoryview(array)),
        lambda array: [{"deep": array[::2].T}],
    ],
)
def test_memory_of_a_result_is_used_again_once_nobody_holds_it(hold):
    outputs, like = Outputs(), [np.zeros(LARGE)]
    array = outputs.like(like)[0]
    held, where = hold(array), address(array)
    del array
    others = [outputs.like(like)[0] for _ in range(3)]
    assert where not in map(address, others)
    assert held is not None
    del held
    assert address(outputs.like(like)[0]) == where
    assert len(set(map(address, outputs.like(like * 3)))) == 3


def test_an_abort_releases_who_is_just_about_to_wait(monkeypatch):
    place = Rendezvous(2)
    aborting = threading.Thread(target=place.abort, args=(ValueError("elsewhere"),))

    def begun_while_another_aborts(size):
        aborting.start()
        aborting.join(0.2)  # It may wait for what this thread holds, or be over.
        return Meeting(size)

    monkeypatch.setattr(threads, "Meeting", begun_while_another_aborts)
    with pytest.raises(nd.WorkerLostError, match="elsewhere"):
        place.exchange(0, Call(1, "merge_call", timeout=20.0), None, len)
    aborting.join(20.0)
    assert not aborting.is_alive()
