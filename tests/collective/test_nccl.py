"""Claims about the NCCL backend: NumPy's values, and no GPU that waits for a launch.

They are checked over an imitation of NCCL in host memory, which takes the same calls by address and
refuses what NCCL would, and over NCCL itself with the marker `gpu`, on all GPUs that are visible.
"""

from __future__ import annotations

import gc
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import numpy as np
import pytest

from ndistribute.collective import nccl, nccl_plan
from ndistribute.collective.backend import Call
from ndistribute.collective.nccl_plan import Launch, Wire, gather_launches, reduction_wire
from ndistribute.collective.reduce_op import ReduceOp, reduce_arrays, result_dtype
from ndistribute.collective.rendezvous import Rendezvous
from ndistribute.device import Device, copy_to, list_devices, to_host
from ndistribute.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    MissingDependencyError,
    WorkerLostError,
)
from ndistribute.stream import Stream
from tests.collective.fake_nccl import FakeComm, FakeError, FakeNccl
from tests.processes import AT_ONCE

Array = Any
SUM, MEAN, MIN, MAX, PROD = ReduceOp
DTYPES = (
    "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64 "
    "complex64 complex128"
).split()
CALLS = [(op, dtype) for op, dtype in itertools.product(ReduceOp, DTYPES)]


class Replicas:
    """The replicas of a test, and a thread for each."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.size = len(devices)
        self.streams = [Stream(device) for device in devices]
        self.rendezvous = Rendezvous(self.size)
        self.backends = nccl.make_nccl_backends(self.rendezvous, self.streams)

    def arrays(self, hosts: Sequence[np.ndarray[Any, Any]]) -> list[Array]:
        """Place each replica's array on its device."""
        return [copy_to(host, s.device) for host, s in zip(hosts, self.streams, strict=True)]

    def run(self, body: Callable[[nccl.NcclBackend], Any]) -> list[Any]:
        """Run a body on each replica; return what it returned or raised."""

        def replica(backend: nccl.NcclBackend) -> Any:
            stream = self.streams[backend.rank]
            try:
                with stream.use():
                    stream.begin()
                    result = body(backend)
                    stream.synchronize()
                return result
            except Exception as error:
                return error

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(replica, self.backends))

    def must(self, body: Callable[[nccl.NcclBackend], Any]) -> list[Any]:
        """Run a body on each replica, which must not raise."""
        results = self.run(body)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results


@pytest.fixture(scope="module", params=["fake", pytest.param("gpu", marks=pytest.mark.gpu)])
def kind(request: pytest.FixtureRequest) -> str:
    """Name what stands below the backend; CUDA's own files are opened before leaks are counted."""
    if request.param == "gpu":
        Replicas(list_devices("gpu"))
        gc.collect()
    return str(request.param)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNccl:
    """Put the imitation in the place of NCCL."""
    world = FakeNccl()
    monkeypatch.setattr(nccl, "nccl_library", lambda: world)
    monkeypatch.setattr(nccl, "_is_done", lambda stream: True)
    monkeypatch.setattr(nccl_plan, "address", lambda array: array.ctypes.data)
    return world


@pytest.fixture
def replicas(kind: str, request: pytest.FixtureRequest) -> Iterator[Replicas]:
    """Three replicas over the imitation, or one on each GPU."""
    if kind == "fake":
        request.getfixturevalue("fake")
        yield Replicas([Device(f"cpu:{index}") for index in range(3)])
    else:
        yield Replicas(list_devices("gpu"))


def call(number: int, name: str, op: str | None = None) -> Call:
    return Call(number, name, op)


def numbers(dtype: str, size: int, seed: int = 0, length: int = 37) -> list[Array]:
    """Return per replica numbers of a dtype: negative ones, and integers that overflow."""
    rng = np.random.default_rng([seed, size, length])
    data = rng.uniform(-300, 300, (size, length)) + 1j * rng.uniform(-9, 9, (size, length))
    if dtype.startswith("complex"):
        return list(data.astype(dtype))
    if dtype == "bool":
        return list(rng.random((size, length)) < 0.5)
    if dtype == "float16":  # Its largest number is 65504.
        data = data / 16
    return list(data.real.astype(np.int64).astype(dtype))


@pytest.mark.parametrize(("op", "dtype"), CALLS)
def test_reductions_give_numpys_values(replicas: Replicas, op: ReduceOp, dtype: str) -> None:
    hosts = numbers(dtype, replicas.size)
    if hosts[0].dtype.kind == "f" and op in (MIN, MAX):
        hosts[-1][5] = np.nan
    inputs = replicas.arrays(hosts)
    outputs = replicas.arrays([np.empty(37, result_dtype(op, dtype)) for _ in hosts])

    def body(backend: nccl.NcclBackend) -> Any:
        rank = backend.rank
        backend.all_reduce(call(1, "all_reduce"), [inputs[rank]], [outputs[rank]], op, 9)
        return to_host(outputs[rank])

    expected = reduce_arrays(op, hosts)
    for rank, result in enumerate(replicas.must(body)):
        assert result.dtype == expected.dtype
        np.testing.assert_allclose(result, expected, rtol=1e-3 if dtype == "float16" else 1e-5)
        np.testing.assert_array_equal(to_host(inputs[rank]), hosts[rank])


def test_many_leaves_of_many_dtypes_go_in_one_call(replicas: Replicas) -> None:
    columns = {dtype: numbers(dtype, replicas.size, length=n) for n, dtype in enumerate(DTYPES)}

    def body(backend: nccl.NcclBackend) -> Any:
        device = replicas.streams[backend.rank].device
        inputs = [copy_to(column[backend.rank], device) for column in columns.values()]
        outputs = [copy_to(np.empty_like(to_host(array)), device) for array in inputs]
        backend.all_reduce(call(1, "all_reduce"), inputs, outputs, SUM, 9)
        return [to_host(array) for array in outputs]

    for result in replicas.must(body):
        for total, column in zip(result, columns.values(), strict=True):
            np.testing.assert_allclose(total, reduce_arrays(SUM, column), rtol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ragged", [False, True])
def test_all_gather_joins_rows_in_replica_order(
    replicas: Replicas, dtype: str, ragged: bool
) -> None:
    hosts = [
        numbers(dtype, 1, rank, 3 * (rank if ragged else 2))[0].reshape(-1, 3)
        for rank in range(replicas.size)
    ]
    inputs = replicas.arrays(hosts)

    def body(backend: nccl.NcclBackend) -> Any:
        (joined,) = backend.all_gather(call(1, "all_gather"), [inputs[backend.rank]], 9)
        return to_host(joined)

    for result in replicas.must(body):
        np.testing.assert_array_equal(result, np.concatenate(hosts))


@pytest.mark.parametrize("dtype", DTYPES)
def test_broadcast_copies_from_the_root(replicas: Replicas, dtype: str) -> None:
    hosts = numbers(dtype, replicas.size)
    root = replicas.size - 1
    buffers = replicas.arrays([host.copy() for host in hosts])

    def body(backend: nccl.NcclBackend) -> Any:
        empty = buffers[backend.rank][:0]
        backend.broadcast(call(1, "broadcast"), [buffers[backend.rank], empty], root, 9)
        return to_host(buffers[backend.rank])

    for result in replicas.must(body):
        np.testing.assert_array_equal(result, hosts[root])


def test_every_replica_updates_its_whole_copy(replicas: Replicas) -> None:
    hosts = numbers("float32", replicas.size)
    prepared: list[str] = []

    def prepare() -> str:
        prepared.append("once")
        return "prepared"

    def body(backend: nccl.NcclBackend) -> Any:
        device = replicas.streams[backend.rank].device
        inputs = [copy_to(hosts[backend.rank], device), copy_to(hosts[backend.rank][:0], device)]
        updates = []

        def update(given: str, leaf: int, start: int, stop: int, total: Array) -> None:
            updates.append((given, leaf, start, stop, to_host(total)))

        returned = backend.reduce_update(call(1, "reduce_update"), inputs, MEAN, prepare, update, 9)
        assert (backend.owner, backend.owners) == (0, 1)
        assert returned == "prepared"
        return updates

    for first, empty in replicas.must(body):
        assert first[:4] == ("prepared", 0, 0, 37)
        np.testing.assert_allclose(first[4], reduce_arrays(MEAN, hosts), rtol=1e-5)
        assert empty[1:4] == (1, 0, 0)
    assert prepared == ["once"]


def test_merge_combines_once_in_replica_order(replicas: Replicas) -> None:
    results = replicas.must(lambda b: b.merge(call(1, "merge_call"), b.rank, tuple, 9))
    assert results == [tuple(range(replicas.size))] * replicas.size


def test_a_mismatch_launches_nothing(fake: FakeNccl) -> None:
    replicas = Replicas([Device("cpu:0"), Device("cpu:1")])
    data = np.ones(3)

    def body(backend: nccl.NcclBackend) -> Any:
        name = ["SUM", "MAX"][backend.rank]
        backend.all_reduce(call(1, "all_reduce", name), [data], [data.copy()], SUM, 9)

    assert [type(e) for e in replicas.run(body)] == [CollectiveMismatchError] * 2
    assert fake.launched == []


def test_a_missing_replica_is_a_timeout_and_launches_nothing(fake: FakeNccl) -> None:
    replicas = Replicas([Device("cpu:0"), Device("cpu:1")])
    data = np.ones(3)

    def body(backend: nccl.NcclBackend) -> Any:
        if backend.rank == 0:
            backend.broadcast(call(1, "broadcast"), [data], 0, 0.05)

    assert [type(e) for e in replicas.run(body)] == [CollectiveTimeoutError, type(None)]
    assert fake.launched == []


def test_after_a_failure_of_nccl_the_next_call_connects_again(fake: FakeNccl) -> None:
    replicas = Replicas([Device("cpu:0"), Device("cpu:1")])
    buffers = [np.zeros(3), np.ones(3)]
    lost = fake.comms

    def body(backend: nccl.NcclBackend) -> None:
        backend.broadcast(call(1, "broadcast"), [buffers[backend.rank]], 1, 9)

    fake.fail = True
    first, second = replicas.run(body)
    assert isinstance(first, WorkerLostError)
    assert isinstance(second, WorkerLostError)
    assert "a link is down" in str(first)
    assert [comm.state for comm in lost] == ["aborted"] * 2
    fake.fail = False
    replicas.rendezvous.reset()
    replicas.must(body)
    assert buffers[0].tolist() == [1, 1, 1]


def test_work_that_never_ends_is_a_timeout(fake: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = Replicas([Device("cpu:0"), Device("cpu:1")])
    monkeypatch.setattr(nccl, "_is_done", lambda stream: False)
    started = time.monotonic()
    with pytest.raises(CollectiveTimeoutError, match="GPU of replica 0 did not finish"):
        replicas.backends[0].merge(call(1, "merge_call"), None, list, 0.02)
    assert time.monotonic() - started < AT_ONCE
    assert {comm.state for comm in fake.comms} == {"aborted"}


def test_an_error_of_nccl_ends_the_wait_for_a_gpu(
    fake: FakeNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(comm: FakeComm) -> NoReturn:
        raise FakeError("remote access")

    replicas = Replicas([Device("cpu:0"), Device("cpu:1")])
    monkeypatch.setattr(nccl, "_is_done", lambda stream: False)
    monkeypatch.setattr(FakeComm, "check_async_error", failed)
    with pytest.raises(WorkerLostError, match="remote access"):
        replicas.backends[1].merge(call(1, "merge_call"), None, list, 9)


def test_communicators_end_with_their_backends(fake: FakeNccl) -> None:
    replicas = Replicas([Device("cpu:0"), Device("cpu:1")])
    del replicas
    gc.collect()
    assert {comm.state for comm in fake.comms} == {"destroyed"}


def test_one_group_launches_all_leaves(fake: FakeNccl) -> None:
    replicas = Replicas([Device("cpu:0"), Device("cpu:1")])

    def body(backend: nccl.NcclBackend) -> None:
        inputs = [np.ones(4, np.float32), np.ones(0, np.float32), np.ones(4, np.complex64)]
        outputs = [np.empty_like(array) for array in inputs]
        backend.all_reduce(call(1, "all_reduce"), inputs, outputs, PROD, 9)

    replicas.must(body)
    assert fake.launched == ["allReduce", "allGather"]


def test_connecting_says_what_failed(fake: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: FakeNccl, devices: list[int]) -> NoReturn:
        raise FakeError("no peer access")

    monkeypatch.setattr(FakeNccl, "initAll", refuse)
    with pytest.raises(WorkerLostError, match=r"GPUs \[0, 1\]: no peer access"):
        Replicas([Device("cpu:0"), Device("cpu:1")])


def test_without_cupy_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    monkeypatch.setattr(nccl, "nccl_library", nccl.nccl_library.__wrapped__)
    assert not nccl.nccl_available()
    with pytest.raises(MissingDependencyError, match=r"ndistribute\[cuda12\]"):
        nccl.make_nccl_backends(Rendezvous(1), [Stream(Device("cpu:0"))])


@pytest.mark.parametrize(
    ("op", "dtype", "expected"),
    [
        (SUM, "float16", Wire(np.dtype("float32"), "NCCL_FLOAT32", 1, "NCCL_SUM")),
        (MEAN, "float16", Wire(np.dtype("float32"), "NCCL_FLOAT32", 1, "NCCL_SUM")),
        (MEAN, "int32", Wire(np.dtype("float64"), "NCCL_FLOAT64", 1, "NCCL_SUM")),
        (SUM, "bool", Wire(np.dtype("bool"), "NCCL_UINT8", 1, "NCCL_MAX")),
        (PROD, "bool", Wire(np.dtype("bool"), "NCCL_UINT8", 1, "NCCL_MIN")),
        (MIN, "bool", Wire(np.dtype("bool"), "NCCL_UINT8", 1, "NCCL_MIN")),
        (MEAN, "bool", Wire(np.dtype("float64"), "NCCL_FLOAT64", 1, "NCCL_SUM")),
        (SUM, "int16", Wire(np.dtype("int32"), "NCCL_INT32", 1, "NCCL_SUM")),
        (MAX, "uint16", Wire(np.dtype("uint32"), "NCCL_UINT32", 1, "NCCL_MAX")),
        (SUM, "complex64", Wire(np.dtype("complex64"), "NCCL_FLOAT32", 2, "NCCL_SUM")),
        (MEAN, "complex128", Wire(np.dtype("complex128"), "NCCL_FLOAT64", 2, "NCCL_SUM")),
        (PROD, "complex64", None),
        (MIN, "complex64", None),
        (MIN, "float32", None),
        (MAX, "float16", None),
        (MIN, "int64", Wire(np.dtype("int64"), "NCCL_INT64", 1, "NCCL_MIN")),
        (SUM, "longdouble", None),
    ],
)
def test_the_wire_of_a_reduction(op: ReduceOp, dtype: str, expected: Wire | None) -> None:
    assert reduction_wire(op, dtype) == expected


def test_bfloat16_is_reduced_in_float32() -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    assert reduction_wire(SUM, bfloat16) == reduction_wire(SUM, np.float16)


def test_equal_parts_are_gathered_in_one_operation() -> None:
    assert gather_launches([8, 8], 1, 500, 100) == [
        Launch("allGather", (500, 100, 8, "NCCL_UINT8"))
    ]
    assert gather_launches([0, 0], 1, 500, 100) == []
