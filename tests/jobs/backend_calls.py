"""What processes call of the backends between them; the tests beside it say what must come out."""

import atexit
import functools
import gc
import json
import os
import sys
import zlib

import numpy as np
import pytest

from ndistribute.cluster import MPIClusterResolver
from ndistribute.collective.backend import Call, Update
from ndistribute.collective.bootstrap import info_from_addresses, info_from_exchange
from ndistribute.collective.communicator import CommunicationOptions
from ndistribute.collective.control_plane import ControlPlane
from ndistribute.collective.mpi import MpiTransport, exchange_over_mpi
from ndistribute.collective.reduce_op import ReduceOp, reduce_arrays
from ndistribute.collective.ring import RingBackend
from ndistribute.collective.shared_memory import SharedMemoryBackend
from ndistribute.collective.tcp import TcpTransport
from ndistribute.errors import CollectiveMismatchError

TIMEOUT = 20.0
SIZES = (0, 1, 2, 3, 1000, 16_385, 600_001)
OPS = tuple(ReduceOp)


@functools.cache
def joined_peers():
    """Return this process's view of its group; it says good-bye when the process ends."""
    if "TF_CONFIG" in os.environ:
        config = json.loads(os.environ["TF_CONFIG"])
        addresses, rank = config["cluster"]["worker"], config["task"]["index"]
        info = info_from_addresses(addresses, rank)
    else:
        info = info_from_exchange(exchange_over_mpi, MPIClusterResolver().task_id)
    peers = ControlPlane(info, timeout=30.0)
    atexit.register(peers.close)
    return peers


@functools.cache
def group_backend(bytes_per_pack=0, wire_dtype=None, ranks=None):
    """Return this process's backend among all, or some: in shared memory, or a ring."""
    peers = joined_peers()
    if os.environ.get("CALLS_MEET") == "shared":
        return SharedMemoryBackend(peers, ranks=ranks)
    transport = TcpTransport if "TF_CONFIG" in os.environ else MpiTransport
    options = CommunicationOptions(bytes_per_pack, wire_dtype=wire_dtype)
    return RingBackend(peers, functools.partial(transport, peers), ranks, options)


def dtype_named(name):
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def small_numbers(rank, length, dtype):
    """Return numbers whose sums and products every dtype holds exactly."""
    return ((np.arange(length) * 7 + rank * 3) % 4).astype(dtype)


def noise(rank, length, dtype=np.float32):
    return np.random.default_rng([rank, length]).standard_normal(length).astype(dtype)


def call_of(kind, op, arrays, sequence=1, timeout=TIMEOUT):
    return Call(sequence, kind, op, tuple((a.dtype, a.shape) for a in arrays), timeout=timeout)


def all_reduced(backend, arrays, op=ReduceOp.SUM, sequence=1, timeout=TIMEOUT):
    outputs = [np.empty_like(a) for a in arrays]
    call = call_of("all_reduce", op.name, arrays, sequence, timeout)
    backend.all_reduce(call, arrays, outputs, op)
    return outputs


def reduced_in_place(backend, arrays, op=ReduceOp.SUM):
    backend.all_reduce(call_of("all_reduce", op.name, arrays), arrays, arrays, op)


def reduce_updated(backend, arrays, op, prepare=lambda: None, update=lambda *_: None):
    call = call_of("reduce_update", op.name, arrays)
    return backend.reduce_update(call, arrays, op, Update(prepare, update))


def all_gathered(backend, arrays):
    signature = tuple((a.dtype, ("*", *a.shape[1:])) for a in arrays)
    call = Call(1, "all_gather", "axis=0", signature, timeout=TIMEOUT)
    return backend.all_gather(call, arrays)


def broadcasted(backend, buffers, root):
    backend.broadcast(call_of("broadcast", f"root={root}", buffers), buffers, root)


def updated(backend, arrays, op):
    """Return what `reduce_update` hands out; spoil what was handed out."""
    results = [np.empty_like(a) for a in arrays]

    def update(prepared, leaf, start, stop, total):
        assert prepared == "ready"
        assert total.dtype == results[leaf].dtype
        results[leaf][start:stop] = total
        total[...] = 0

    reduce_updated(backend, arrays, op, lambda: "ready", update)
    return results


def digest(arrays):
    """Return a number that equals that of another rank exactly if all bits do."""
    return zlib.crc32(b"".join(a.tobytes() for a in arrays))


def every_op_and_size(rank, size, name):
    dtype = dtype_named(name)
    results = []
    for op in OPS:
        if op is ReduceOp.MEAN and dtype.kind in "iub":
            continue  # The communicator passes such means as float64.
        for length in SIZES:
            everyone = [small_numbers(r, length, dtype) for r in range(size)]
            everyone[rank].flags.writeable = False
            (total,) = all_reduced(group_backend(), [everyone[rank]], op)
            np.testing.assert_array_equal(total, reduce_arrays(op, everyone))
            np.testing.assert_array_equal(everyone[rank], small_numbers(rank, length, dtype))
            results.append(total)
    return digest(results)


def many_leaves(rank, size, bytes_per_pack, wire_dtype):
    lengths = (5, 0, 70_000, 1, 300, 0, 400_000, 64, 2000, 0)
    names = ("float32", "float64", "float32", "int32", "float16")
    leaves = [
        [small_numbers(r + i, n, dtype_named(names[i % 5])) for i, n in enumerate(lengths)]
        for r in range(size)
    ]
    expected = [reduce_arrays(ReduceOp.SUM, parts) for parts in zip(*leaves, strict=True)]
    backend = group_backend(bytes_per_pack, wire_dtype)
    totals = []
    for reduce in (all_reduced, updated, updated, all_reduced):
        totals = reduce(backend, leaves[rank], ReduceOp.SUM)
        for total, correct in zip(totals, expected, strict=True):
            np.testing.assert_array_equal(total, correct)
    return digest(totals)


def noisy_sums(rank, size, wire_dtype):
    """Return a digest of sums, and the largest error relative to the largest sum."""
    backend = group_backend(wire_dtype=wire_dtype)
    worst = 0.0
    results = []
    for length in (1, 5, 1000, 70_001, 700_001):
        exact = np.sum([noise(r, length, np.float64) for r in range(size)], axis=0)
        for reduce in (all_reduced, updated):
            once = reduce(backend, [noise(rank, length)], ReduceOp.SUM)
            again = reduce(backend, [noise(rank, length)], ReduceOp.SUM)
            assert digest(once) == digest(again)
            results += once
            worst = max(worst, float(abs(once[0] - exact).max() / abs(exact).max()))
        (mean,) = all_reduced(backend, [noise(rank, length)], ReduceOp.MEAN)
        worst = max(worst, float(abs(mean * size - exact).max() / abs(exact).max()))
        results.append(mean)
    return digest(results), worst


def arrays_let_go(rank, size):
    """Check after each call, without the help of a collector, that nobody holds its arrays."""
    gc.disable()
    try:
        for length in (10, 700_001):
            array, output = noise(rank, length), np.empty(length, np.float32)
            held = sys.getrefcount(array), sys.getrefcount(output)
            call = call_of("all_reduce", "SUM", [array])
            group_backend().all_reduce(call, [array], [output], ReduceOp.SUM)
            assert (sys.getrefcount(array), sys.getrefcount(output)) == held
            updated(group_backend(), [array], ReduceOp.SUM)
            broadcasted(group_backend(), [array], 0)
            gathered(rank, size, [((3,), 2, "float32")])
            assert sys.getrefcount(array) == held[0]
    finally:
        gc.enable()


def sums_in_rank_order(rank, size):
    everyone = [noise(r, 1000) for r in range(size)]
    (total,) = all_reduced(group_backend(), [everyone[rank]], ReduceOp.SUM)
    np.testing.assert_array_equal(total, reduce_arrays(ReduceOp.SUM, everyone))


def doubles_beside_a_wire_dtype(rank, size):
    everyone = [noise(r, 5000, np.float64) for r in range(size)]
    (total,) = all_reduced(group_backend(wire_dtype="float16"), [everyone[rank]], ReduceOp.SUM)
    np.testing.assert_allclose(total, np.sum(everyone, axis=0), rtol=1e-12)


def gathered(rank, size, shapes):
    """Gather matrices; `shapes` give each rank's rows, the width and the dtype."""
    everyone = [
        [
            small_numbers(r + 1, rows[r % len(rows)] * width, dtype_named(name)).reshape(-1, width)
            if width
            else np.empty((rows[r % len(rows)], 0), dtype_named(name))
            for rows, width, name in shapes
        ]
        for r in range(size)
    ]
    joined = all_gathered(group_backend(), everyone[rank])
    assert len(joined) == len(shapes)
    for whole, parts in zip(joined, zip(*everyone, strict=True), strict=True):
        assert whole.dtype == parts[0].dtype
        np.testing.assert_array_equal(whole, np.concatenate(parts))


def copied_from_each(rank, size):
    for root in range(size):
        for length in (0, 1, 1000, 700_001):
            correct = [noise(root, length), small_numbers(root, 3, np.dtype(np.int8))]
            buffers = [np.zeros_like(a) if rank != root else a.copy() for a in correct]
            broadcasted(group_backend(), buffers, root)
            for buffer, values in zip(buffers, correct, strict=True):
                np.testing.assert_array_equal(buffer, values)


def among_some(rank, size, members):
    """Use a group of some processes; return what a mismatch among these says."""
    others = tuple(r for r in range(size) if r not in members)
    backend = group_backend(ranks=members if rank in members else others)
    if rank in others:
        return ""
    assert (backend.rank, backend.size) == (members.index(rank), len(members))
    for length in (10, 300_001):
        everyone = [small_numbers(r, length, np.dtype(np.float32)) for r in members]
        (total,) = all_reduced(backend, [everyone[backend.rank]], ReduceOp.SUM)
        np.testing.assert_array_equal(total, reduce_arrays(ReduceOp.SUM, everyone))
    with pytest.raises(CollectiveMismatchError) as caught:
        all_reduced(backend, [np.ones(5 + rank)], ReduceOp.SUM)
    return str(caught.value)


def recovered_sum(rank, size):
    """Make the group whole again, and use it."""
    backend = group_backend()
    joined_peers().recover(backend.reset, timeout=40.0)
    (total,) = all_reduced(backend, [np.full(100_000, rank, np.float64)], ReduceOp.SUM)
    return float(total[-1])


def failing_update(rank, size, failing):
    """Fail in the update on one rank; the others meet the failure in the next call."""

    def prepare():
        if rank == failing:
            raise ValueError("no room")

    array = np.ones(1000, np.float32)
    reduce_updated(group_backend(), [array], ReduceOp.SUM, prepare)
    all_reduced(group_backend(), [array], ReduceOp.SUM)
