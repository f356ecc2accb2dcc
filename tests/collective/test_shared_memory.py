"""The shared-memory backend over real processes: right to the last bit, and what goes wrong."""

import functools
import os
import random
import resource
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from ndistribute.collective import segment
from ndistribute.collective.backend import Call
from ndistribute.collective.reduce_op import ReduceOp, reduce_arrays
from ndistribute.collective.shared_memory import (
    WHOLE_BYTES,
    WINDOW_BYTES,
    SharedMemoryBackend,
)
from ndistribute.errors import CollectiveTimeoutError, DistributeError
from tests.jobs.backend_calls import (
    TIMEOUT,
    all_gathered,
    all_reduced,
    broadcasted,
    digest,
    group_backend,
    joined_peers,
    reduce_updated,
    reduced_in_place,
)
from tests.processes import Ranks

SHARED = {"CALLS_MEET": "shared"}
LARGE = 2 * WINDOW_BYTES + 77 * 16


@pytest.fixture(scope="module", params=[2, 3], ids="{} ranks".format)
def ranks(request):
    with Ranks(request.param, environ=SHARED) as ranks:
        yield ranks


@functools.cache
def normal(rank):
    # A prime number of them, so that what is shifted by blocks is not the same again.
    return np.random.default_rng(rank).standard_normal(4099) * 3


def noise(rank, count, dtype=np.float32):
    values = normal(rank)
    values = np.abs(values) if np.dtype(dtype).kind == "u" else values
    return np.resize(values.astype(dtype), count)


def agreed(ranks, function, *args):
    """Run a function on all ranks and return what all of them returned."""
    first, *others = ranks.results(function, *args)
    assert all(other == first for other in others)
    return first


def check_many_leaves(rank, size):
    seen = np.zeros(5000)

    def update(prepared, leaf, start, stop, total):
        seen[leaf] = total[0]

    for factor in (1, 2):
        arrays = [np.full(1, rank + factor * leaf, np.float32) for leaf in range(len(seen))]
        reduce_updated(group_backend(), arrays, ReduceOp.MAX, update=update)
        assert seen.tolist() == [size - 1 + factor * leaf for leaf in range(len(seen))]
    reduce_updated(group_backend(), [], ReduceOp.SUM)
    assert not [*all_reduced(group_backend(), []), *all_gathered(group_backend(), [])]
    return digest([seen])


def test_a_call_may_have_thousands_of_leaves_or_none(ranks):
    agreed(ranks, check_many_leaves)


def check_allocated(rank, size, large):
    leaves = [(np.dtype(t), n) for t, n in [("f4", large), ("i8", 0), ("f2", large // 10)]]
    arrays = [group_backend().allocate(dtype, (n,)) for dtype, n in leaves]
    for op in (ReduceOp.SUM, ReduceOp.MAX):
        everyone = [[noise(r, n, dtype) for dtype, n in leaves] for r in range(size)]
        for array, values in zip(arrays, everyone[rank], strict=True):
            array[...] = values
        reduced_in_place(group_backend(), arrays, op)
        for total, *terms in zip(arrays, *everyone, strict=True):
            assert total.tobytes() == reduce_arrays(op, terms).tobytes()
    return digest(arrays)


def test_allocated_arrays_are_reduced_where_they_are(ranks):
    for large in (LARGE // 4, 100):
        agreed(ranks, check_allocated, large)


def check_reuse(rank, size):
    floats = np.dtype(np.float32), (100, 1000)
    first = group_backend().allocate(*floats)
    held, address = first[5:], first.ctypes.data
    del first
    assert group_backend().allocate(*floats).ctypes.data != address  # Somebody holds a part of it.
    del held
    assert group_backend().allocate(*floats).ctypes.data == address
    assert group_backend().allocate(np.dtype(np.int8), (1 << 60,)) is None


def test_allocated_memory_is_used_again_once_nobody_holds_it(ranks):
    agreed(ranks, check_reuse)


def check_allocated_alone(rank, size):
    arrays = [noise(rank, n) for n in (LARGE // 4, LARGE // 8)]
    if rank == 0:
        lent = group_backend().allocate(arrays[0].dtype, arrays[0].shape)
        lent[...] = arrays[0]
        arrays[0] = lent
    reduced_in_place(group_backend(), arrays)
    for total in arrays:
        expected = reduce_arrays(ReduceOp.SUM, [noise(r, total.size) for r in range(size)])
        assert total.tobytes() == expected.tobytes()
    return digest(arrays)


def test_arrays_that_only_some_ranks_could_allocate_are_reduced_all_the_same(ranks):
    agreed(ranks, check_allocated_alone)


def check_update(rank, size, count, lending):
    """Update twice; the first ranks lend arrays that lie in their buckets."""
    variables = [np.zeros(count, np.float32), np.zeros(5, np.float64)]
    events = []

    def prepare():
        events.append("prepare")
        return "ready"

    def update(prepared, leaf, start, stop, total):
        events.append("update")
        assert prepared == "ready"
        assert total.shape == (stop - start,)
        variables[leaf][start:stop] += total
        total[...] = np.nan  # It is the callee's.

    for _ in range(2):
        inputs = [noise(rank, count), noise(rank, 5, np.float64)]
        if rank < lending:
            lent = group_backend().allocate(inputs[0].dtype, (count,))
            lent[...] = inputs[0]
            inputs[0] = lent
        assert reduce_updated(group_backend(), inputs, ReduceOp.MEAN, prepare, update) == "ready"
        assert inputs[0].tobytes() == noise(rank, count).tobytes()
        inputs[0][...] = np.nan  # The others have read it.
    means = [
        reduce_arrays(ReduceOp.MEAN, [noise(r, v.size, v.dtype) for r in range(size)])
        for v in variables
    ]
    for variable, expected in zip(variables, means, strict=True):
        np.testing.assert_array_equal(variable, expected + expected)
    assert events.count("prepare") == 2
    assert events[0] == "prepare"
    return digest(variables)


@pytest.mark.parametrize("count", [100, LARGE // 4, WHOLE_BYTES // 4 + 5])
def test_an_update_sees_every_element_of_the_total_once(ranks, count):
    for lending in (0, 1, 3):
        agreed(ranks, check_update, count, lending)


def check_long_items(rank, size):
    """Gather items each of which is longer than half a window."""
    (joined,) = all_gathered(group_backend(), [np.array([[str(rank) * 200_000]] * 6)])
    assert [text[0] for (text,) in joined.tolist()] == [
        str(r) for r in range(size) for _ in "sixsix"
    ]
    return digest([joined])


def test_items_longer_than_a_window_are_gathered(ranks):
    agreed(ranks, check_long_items)


def share_objects(rank, size):
    all_gathered(group_backend(), [np.array([[object()]])])


def test_objects_are_refused_on_every_rank(ranks):
    errors = [outcome.error for outcome in ranks.run(share_objects)]
    assert "TypeError" in errors
    assert set(errors) <= {"TypeError", "WorkerLostError"}
    ranks.results(recover)


def check_fenced(rank, size):
    native = segment.platform.machine
    segment.platform.machine = lambda: "aarch64"
    try:
        weak = SharedMemoryBackend(joined_peers())
    finally:
        segment.platform.machine = native
    array = noise(rank, LARGE // 4)
    reduced_in_place(weak, [array])
    expected = reduce_arrays(ReduceOp.SUM, [noise(r, LARGE // 4) for r in range(size)])
    assert array.tobytes() == expected.tobytes()
    weak.close()
    return digest([array])


def test_processors_that_reorder_stores_are_fenced(ranks):
    agreed(ranks, check_fenced)


def check_random_calls(rank, size, seed):
    plan, own = random.Random(seed), random.Random(seed * 1000 + rank)
    results = []
    for _ in range(150):
        count = int(2 ** plan.uniform(0, 19.5))
        kind, root, op = plan.randrange(4), plan.randrange(size), plan.choice(list(ReduceOp))
        if own.random() < 0.1:
            time.sleep(own.uniform(0, 3e-3))  # Ranks come at different times.
        everyone = [noise(r, count) for r in range(size)]
        if kind < 2:
            results += all_reduced(group_backend(), [everyone[rank]], op)
            expected = reduce_arrays(op, everyone)
        elif kind == 2:
            results += all_gathered(group_backend(), [everyone[rank][rank:, None]])
            expected = np.concatenate([part[r:, None] for r, part in enumerate(everyone)])
        else:
            results.append(everyone[rank])
            broadcasted(group_backend(), results[-1:], root)
            expected = noise(root, count)
        assert results[-1].tobytes() == expected.tobytes()
    return digest(results)


def test_random_calls_at_random_moments_are_right(ranks):
    agreed(ranks, check_random_calls, 20)


def recover(rank, size):
    joined_peers().recover(group_backend().reset, TIMEOUT)


def blocked():
    """Return how often this thread has given its core up to sleep."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def wait_in_vain(rank, size):
    group_backend()  # All processes make it together.
    before = blocked()
    if rank == 0:
        with pytest.raises(CollectiveTimeoutError):
            all_reduced(group_backend(), [noise(rank, 3)], timeout=1.0)
    return blocked() - before


def test_who_waits_long_wakes_up_rarely(ranks):
    assert ranks.run(wait_in_vain)[0].result() < 200
    ranks.results(recover)


def wait_for_a_late_one(rank, size, calls):
    group_backend()
    before, since = blocked(), time.monotonic()
    for call in range(calls):
        if rank == call % size:
            time.sleep(0.02)  # It computes.
        all_reduced(group_backend(), [noise(rank, 3)])
    checks = (time.monotonic() - since) / 0.05
    return blocked() - before - 2 * checks


def test_of_many_who_wait_for_one_each_is_woken_once():
    with Ranks(12, environ=SHARED) as many:
        # A few block on locks, too.
        assert max(many.results(wait_for_a_late_one, 24)) < 4 * 24


def check_unknown_system_call(rank, size):
    group_backend()
    native, segment._NUMBER = segment._NUMBER, None
    try:
        for call in range(size):
            if rank == call:
                time.sleep(0.01)  # It computes.
            (total,) = all_reduced(group_backend(), [noise(rank, 3)])
    finally:
        segment._NUMBER = native
    return digest([total])


def test_who_cannot_be_woken_wakes_up_by_itself(ranks):
    agreed(ranks, check_unknown_system_call)


def die_once_all_have_come(rank, size):
    seen = np.zeros(LARGE // 4, np.float32)

    def prepare():
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def update(prepared, leaf, start, stop, total):
        seen[start:stop] = total

    reduce_updated(group_backend(), [np.ones_like(seen)], ReduceOp.SUM, prepare, update)
    return int(seen.sum())


@pytest.mark.parametrize("size", [2, 3])
def test_an_update_is_finished_though_a_rank_dies_in_its_own(size):
    with Ranks(size, environ=SHARED) as mortals:
        outcomes = mortals.run(die_once_all_have_come)
    assert outcomes[1].error == "Lost"
    assert [outcomes[rank].result() for rank in (0, *range(2, size))] == [size * (LARGE // 4)] * (
        size - 1
    )


def check_closing(rank, size):
    def held():
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), maps.count("/memfd:ndistribute")

    group_backend()
    before = held()
    for _ in range(3):
        another = SharedMemoryBackend(joined_peers())
        reduced_in_place(another, [np.ones(LARGE)])
        assert held()[0] == before[0] + 1  # One file is the memory of all.
        assert held()[1] > before[1]
        another.close()
        another.close()
        assert held() == before


def test_the_memory_of_all_is_one_file_which_closing_gives_back(ranks):
    agreed(ranks, check_closing)


def check_little_room(rank, size, megabytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (megabytes << 20, resource.RLIM_INFINITY))
    try:
        small = SharedMemoryBackend(joined_peers())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    array = np.ones(16 << 20, np.int8)
    reduced_in_place(small, [array])
    assert array[-1] == size
    call = Call(2, "all_gather", "axis=0", ((array.dtype, ("*", 1)),))
    (joined,) = small.all_gather(call, [array[:, None]])
    assert joined.shape == (size << 24, 1)
    small.close()


def test_large_arrays_need_no_more_room_than_small_ones(ranks):
    agreed(ranks, check_little_room, 64)


def test_a_lack_of_room_is_an_error_on_every_rank(ranks):
    outcomes = ranks.run(check_little_room, 4)
    assert all("bytes of shared memory" in outcome.text for outcome in outcomes)
    ranks.results(recover)


def make_without_files(rank, size):
    joined_peers()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # Those are taken: no file opens.
    try:
        group_backend()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_memory_that_can_not_be_made_is_an_error_on_every_rank():
    with Ranks(3, environ=SHARED) as ranks:
        outcomes = ranks.run(make_without_files)
    assert outcomes[0].error == "DistributeError"
    assert all("cannot be created" in outcome.text for outcome in outcomes)


def test_memory_that_is_not_the_peers_is_refused():
    fd = os.memfd_create("stranger")
    try:
        os.ftruncate(fd, 1 << 16)
        card = {"pid": os.getpid(), "fd": fd, "nonce": "ab" * 16}
        with pytest.raises(DistributeError, match=r"not what it shared.*NDISTRIBUTE_HOST_ID"):
            segment._map(card, 1 << 16, 1, 0)
        with pytest.raises(DistributeError, match=r"worker 0 cannot map .* of worker 1 \(pid"):
            segment._map({**card, "fd": 1 << 20}, 1 << 16, 1, 0)
        with pytest.raises(DistributeError, match="greater than file size"):
            segment._map(card, 1 << 17, 1, 0)
    finally:
        os.close(fd)
