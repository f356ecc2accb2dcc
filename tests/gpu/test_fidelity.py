"""The imitation takes what CuPy takes; where CuPy is installed this is looked up, without a GPU."""

import itertools

import pytest

from ndistribute import devices
from ndistribute.collective import nccl
from ndistribute.collective.reduce_op import ReduceOp
from tests.gpu.imitation.real import check_call, signature_in


@pytest.fixture(scope="module")
def installed():
    """CuPy as it is installed; only looked at, so no GPU is needed."""
    return pytest.importorskip("cupy", reason="CuPy is not installed", exc_type=ImportError)


@pytest.fixture(scope="module")
def library(installed):
    """CuPy's NCCL as it is installed; connecting fails where there is no GPU."""
    if not devices.nccl_available():
        pytest.skip("NCCL is not installed")
    return devices.nccl_module()


@pytest.fixture(scope="module")
def unique_id(library):
    """What NCCL gives; it listens there until somebody has connected, so it is no test's leak."""
    return nccl._make_unique_id()


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("sum", [1], {"keepdim": True}),
        ("concatenate", [], {}),
        ("ndarray.sum", [1], {"where": True}),
        ("cuda.nccl.NcclCommunicator.allReduce", [1, 2, 3], {}),
    ],
)
def test_a_call_that_cupy_would_refuse_is_found(library, name, args, kwargs):
    with pytest.raises(TypeError):
        check_call(name, *args, **kwargs)
    with pytest.raises(AttributeError):
        check_call(f"{name}_of_another_library", *args, **kwargs)


def test_what_a_compiled_function_takes_is_read_from_its_docstring():
    signature = signature_in("ndarray.f(self, int a, axes=(0, 1), *args, out=None) -> x\n\nIt is.")
    assert str(signature) == "(self, a, axes=None, *args, out=None)"


def test_nccl_has_the_constants_of_all_reductions(library):
    dtypes = "?bhilqBHILQefdFD"
    wires = [nccl.reduction_wire(*pair) for pair in itertools.product(ReduceOp, dtypes)]
    names = {name for wire in wires if wire is not None for name in (wire.elements, wire.op)}
    assert all(isinstance(getattr(library, name), int) for name in {*names, "NCCL_UINT8"})


def test_nccl_takes_the_unique_id_that_it_gives(library, unique_id):
    assert len(unique_id) == 128
    if devices.list_devices("gpu"):
        return
    with pytest.raises(library.NcclError):  # It has been understood, and now a GPU is missing.
        nccl._make_communicator(1, unique_id, 0)


def test_a_stream_is_asked_as_cuda_wants_it(installed):
    runtime = installed.cuda.runtime
    status = runtime.streamQuery(0)
    assert status == 0 if devices.list_devices("gpu") else status not in (0, 600)
    assert isinstance(runtime.CUDARuntimeError(700), RuntimeError)
