"""NCCL between the GPUs of one process: NumPy's values, and no wait that has no end.

Over the imitation, and with the marker `gpu` over NCCL itself, on all GPUs that are visible.
"""

import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import ndistribute as nd
from ndistribute import devices
from ndistribute.collective import nccl
from ndistribute.collective.backend import Call
from ndistribute.collective.nccl import Wire, reduction_wire
from ndistribute.collective.reduce_op import ReduceOp
from ndistribute.collective.threads import Rendezvous
from ndistribute.devices import Device, copy_to, list_devices, to_host
from ndistribute.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    MissingDependencyError,
    WorkerLostError,
)
from ndistribute.stream import Stream
from tests.gpu.imitation.nccl import FakeComm

SUM, MEAN, MIN, MAX, PROD = ReduceOp


class Replicas:
    """A replica on each GPU, and a thread for each."""

    def __init__(self):
        devices = list_devices("gpu")
        self.size = len(devices)
        self.streams = [Stream(device) for device in devices]
        self.rendezvous = Rendezvous(self.size)
        self.backends = nccl.make_nccl_backends(self.rendezvous, self.streams)

    def run(self, body):
        """Run a body on each replica; return what it returned or raised."""

        def replica(backend):
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

    def must(self, body):
        """Run a body on each replica, which must not raise."""
        results = self.run(body)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results


@pytest.fixture
def replicas(cupy):
    made = Replicas()
    yield made
    made.backends[0].close()


@pytest.fixture
def fake(kind, cupy):
    """The imitation of NCCL; the test does what no real GPU would."""
    if kind == "real":
        pytest.skip("over the imitation only")
    return cupy.cuda.nccl


def call(name, op=None, timeout=9.0):
    return Call(1, name, op, timeout=timeout)


def test_one_group_launches_all_leaves(fake, replicas):
    def body(backend):
        hosts = [np.ones(4, np.float32), np.ones(0, np.float32), np.ones(4, np.complex64)]
        inputs = [copy_to(host, backend.device) for host in hosts]
        outputs = [copy_to(np.empty_like(host), backend.device) for host in hosts]
        backend.all_reduce(call("all_reduce"), inputs, outputs, PROD)

    replicas.must(body)
    assert fake.launched == ["allReduce", "allGather"] * 2


def test_a_mismatch_launches_nothing(fake, replicas):
    def body(backend):
        data = copy_to(np.ones(3), backend.device)
        name = ["SUM", "MAX"][backend.rank]
        backend.all_reduce(call("all_reduce", name), [data], [data.copy()], SUM)

    assert [type(e) for e in replicas.run(body)] == [CollectiveMismatchError] * 2
    assert fake.launched == []


def test_a_missing_replica_is_a_timeout_and_launches_nothing(fake, replicas):
    def body(backend):
        if backend.rank == 0:
            soon = call("broadcast", timeout=0.05)
            backend.broadcast(soon, [copy_to(np.ones(3), backend.device)], 0)

    assert [type(e) for e in replicas.run(body)] == [CollectiveTimeoutError, type(None)]
    assert fake.launched == []


def test_after_a_failure_of_nccl_the_next_call_connects_again(fake, replicas):
    def body(backend):
        buffer = copy_to(np.full(3, float(backend.rank)), backend.device)
        backend.broadcast(call("broadcast"), [buffer], 1)
        return to_host(buffer).tolist()

    fake.fail_launching = "a link is down"
    for error in replicas.run(body):
        assert isinstance(error, WorkerLostError)
        assert "a link is down" in str(error)
    assert [comm.state for comm in fake.comms] == ["aborted"] * 2
    fake.fail_launching = ""
    replicas.rendezvous.reset()
    assert replicas.must(body) == [[1, 1, 1]] * 2


def test_work_that_never_ends_is_a_timeout(fake, replicas):
    fake.comms[0].lose_link()
    for error in replicas.run(lambda backend: merged_after_a_broadcast(backend, 0.05)):
        assert isinstance(error, CollectiveTimeoutError | WorkerLostError)
    assert {comm.state for comm in fake.comms} == {"aborted"}


def test_an_error_of_nccl_ends_the_wait_for_a_gpu(fake, replicas):
    for comm in fake.comms:
        comm.failure = "remote access"
    fake.comms[0].lose_link()
    for error in replicas.run(lambda backend: merged_after_a_broadcast(backend, 30.0)):
        assert isinstance(error, WorkerLostError)
        assert "remote access" in str(error)


def merged_after_a_broadcast(backend, timeout):
    """Wait for what is launched, which `broadcast` does not."""
    backend.broadcast(call("broadcast"), [copy_to(np.ones(3), backend.device)], 0)
    try:
        backend.merge(call("merge_call", timeout=timeout), None, list)
    except BaseException as error:
        backend.abort(error)
        raise


def test_an_error_of_cuda_ends_the_wait_for_a_gpu(fake, replicas, cupy, monkeypatch):
    """An illegal address, say, leaves a stream that is never done."""
    monkeypatch.setattr(cupy.cuda.runtime, "streamQuery", lambda stream: 700)
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="700"):
        replicas.backends[0].merge(call("merge_call", timeout=30.0), None, list)


@pytest.mark.parametrize("version", [13, 14])
def test_the_unique_id_is_of_the_kind_that_cupy_takes(fake, monkeypatch, version):
    fake.cupy = version
    backends = Replicas().backends
    assert [comm.state for comm in fake.comms] == ["open"] * 2
    backends[0].close()


def test_nccl_is_told_to_connect_everything_before_its_first_call(fake, monkeypatch):
    """It reads the variable once, at the first communicator of the process."""
    monkeypatch.delenv("NCCL_RUNTIME_CONNECT", raising=False)
    devices.nccl_module.cache_clear()
    Replicas().backends[0].close()
    assert fake.environ["NCCL_RUNTIME_CONNECT"] == "0"


def test_no_communicator_is_ended_while_it_is_asked_for_errors(fake, replicas, monkeypatch):
    inside, leave, asked = threading.Event(), threading.Event(), []

    def slow(comm):
        inside.set()
        leave.wait(timeout=10.0)
        asked.append(comm.state)

    monkeypatch.setattr(FakeComm, "check_async_error", slow)
    fake.comms[0].lose_link()
    with ThreadPoolExecutor(3) as pool:
        waits = [pool.submit(merged_after_a_broadcast, b, 9.0) for b in replicas.backends]
        assert inside.wait(timeout=10.0)
        ending = pool.submit(replicas.backends[1]._group._disconnect, KeyError("lost"))
        assert fake.comms[0].await_end(seconds=0.2) == "open"
        leave.set()
        ending.result(timeout=10.0)
        assert fake.comms[0].await_end(seconds=10.0) == "aborted"
        for waiting in waits:
            waiting.exception(timeout=10.0)
    assert set(asked) == {"open"}


def test_closing_a_strategy_destroys_its_communicators(fake):
    with nd.MirroredStrategy(["gpu:0", "gpu:1"]) as strategy:
        strategy.run(lambda: nd.get_replica_context().all_reduce("sum", 1.0))  # type: ignore[union-attr]
        assert [comm.state for comm in fake.comms] == ["open"] * 2
    assert [comm.state for comm in fake.comms] == ["destroyed"] * 2


def test_communicators_end_with_their_backends(fake):
    replicas = Replicas()
    del replicas
    gc.collect()
    assert [comm.state for comm in fake.comms] == ["destroyed"] * 2


def test_closing_does_not_wait_for_nccl_for_ever(fake, replicas, monkeypatch, caplog):
    """NCCL destroys when all processes do, and one may be gone."""
    leave, left, destroy = threading.Event(), [], FakeComm.destroy

    def stuck(comm):
        left.append(leave.wait(timeout=60.0))
        destroy(comm)

    monkeypatch.setattr(FakeComm, "destroy", stuck)
    monkeypatch.setattr(nccl, "_END_SECONDS", 0.05)
    replicas.backends[0].close()
    assert not left
    assert "more than 0.05 s to destroy" in caplog.text
    leave.set()


def test_gpus_that_are_connected_too_late_are_ended_again(cupy, fake):
    def impatient():
        raise TimeoutError("too late")

    unique_id = nccl._make_unique_id()
    streams = [Stream(gpu) for gpu in list_devices("gpu")]
    early = nccl._Communicators(unique_id, streams[:1], 0, 2)
    with pytest.raises(TimeoutError, match="too late"):
        early.connect(impatient)
    late = nccl._Communicators(unique_id, streams[1:], 1, 2)
    late.connect(lambda: None)
    early.join(timeout=10.0)
    assert {comm.device: comm.state for comm in fake.comms} == {0: "aborted", 1: "open"}
    late.end("abort")


def test_without_cupy_the_error_names_the_extra(monkeypatch):
    for name in ("cupy", "cupy.cuda"):
        monkeypatch.setitem(sys.modules, name, None)
    for cached in (devices.cupy_module, devices.nccl_module):
        cached.cache_clear()
    assert not devices.nccl_available()
    with pytest.raises(MissingDependencyError, match=r"ndistribute\[cuda12\]"):
        nccl.make_nccl_backends(Rendezvous(1), [Stream(Device("cpu:0"))])


def test_the_wire_of_a_reduction():
    for op, dtype, expected in (
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
    ):
        assert reduction_wire(op, dtype) == expected, (op, dtype)


def test_bfloat16_is_reduced_in_float32():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    assert reduction_wire(SUM, bfloat16) == reduction_wire(SUM, np.float16)
