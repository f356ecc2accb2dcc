"""GPUs for a test: an imitation of CuPy over host memory, and the real thing where there is one.

A test that takes the fixture `strategy` runs on each layout of replicas over GPUs whose code path
differs, on the imitation and, where GPUs are visible, on those with the marker `gpu`. The imitation
is no GPU: see README.md.
"""

import pytest

from ndistribute import devices
from tests.contract_rows import GPU_LAYOUTS
from tests.gpu.imitation.module import imitated_gpus
from tests.gpu.placing import REAL, need
from tests.kinds import closing

ON_ONE_GPU = {"gpu-shared-2", "gpu-and-cpu"}


@pytest.fixture(scope="session", params=["imitation", *REAL])
def kind(request):
    """Name what is below."""
    return str(request.param)


@pytest.fixture
def cupy(kind):
    """CuPy: imitated, with two GPUs; or as it is installed."""
    if kind == "real":
        yield devices.cupy_module()
        return
    with imitated_gpus() as imitation:
        yield imitation


@pytest.fixture(params=GPU_LAYOUTS)
def strategy(cupy, request):
    """Each layout of replicas over GPUs in turn."""
    need(cupy, 1 if request.param in ON_ONE_GPU else 2)
    make, args, named = GPU_LAYOUTS[request.param]
    with closing(make(*args, **named)) as made:
        yield made
