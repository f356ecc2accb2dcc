"""What every test gets: a check that it left nothing behind, and a Hypothesis profile.

The check is a plugin rather than a fixture of this folder, so that it also covers the examples in
the package's docstrings.
"""

import functools
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator

import hypothesis
import numpy as np
import pytest
import threadpoolctl

from tests.leaks import Snapshot, leaks_since
from tests.processes import close_zygote

_FAILED = pytest.StashKey[bool]()

# Here it would hide what it stands in for.
collect_ignore = ["quick"]

# Open MPI refuses what tests do: root, as in containers, and more processes than cores.
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}

# JAX reads it when it starts: a process has so many devices for compiled steps, which XLA compiles
# faster if it does not optimize them. A flag that a release of XLA lacks would end the process.
XLA_FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"

hypothesis.settings.register_profile(
    "ndistribute",
    deadline=None,
    max_examples=50,
    derandomize=bool(os.environ.get("CI")),
    print_blob=True,
)


def pytest_configure(config: pytest.Config) -> None:
    """Load the profile, and the leak check for tests and docstrings alike."""
    # Hundreds of processes import the package: without bytecode each of them would compile it.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    hypothesis.settings.load_profile("ndistribute")
    # A shell's background jobs ignore interrupts, which tests send to themselves and to others.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Threads of BLAS spin while they wait for each other, and all cores have other work: an example
    # with one replica took 27 s of processor time with two threads, and 2.4 s with one.
    np.ones((2, 2)) @ np.ones((2, 2))
    threadpoolctl.threadpool_limits(1, "blas")
    # So that what tests and their processes leave among temporary files is found. pytest's own
    # folders stay where they were.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.TemporaryDirectory(prefix="nd-")
    config.add_cleanup(folder.cleanup)
    changed = pytest.MonkeyPatch()
    config.add_cleanup(changed.undo)
    changed.setenv("TMPDIR", folder.name)
    changed.setattr(tempfile, "tempdir", folder.name)
    # PyTorch makes a folder for its compiler when an optimizer is used.
    compiler = tempfile.TemporaryDirectory(prefix="nd-", dir=os.environ["PYTEST_DEBUG_TEMPROOT"])
    config.add_cleanup(compiler.cleanup)
    changed.setenv("TORCHINDUCTOR_CACHE_DIR", compiler.name)
    os.environ.setdefault("XLA_FLAGS", XLA_FLAGS)
    for name, value in OPEN_MPI.items():
        os.environ.setdefault(name, value)
    config.pluginmanager.register(LeakCheck(), "ndistribute-leaks")


def pytest_unconfigure() -> None:
    """End the zygote that tests may have started."""
    close_zygote()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put files with slow tests first; skip tests that need a GPU unless they alone were asked for.

    Else one of several processes would run a slow file when the others have nothing left to do.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if not wanting or _sees_gpu():
        return
    if config.option.markexpr == "gpu":
        raise pytest.UsageError(
            "-m gpu was asked for, but no GPU is visible: check nvidia-smi, CUDA_VISIBLE_DEVICES "
            "and that CuPy is installed (pip install 'ndistribute[cuda12]')."
        )
    for item in wanting:
        item.add_marker(pytest.mark.skip(reason="no GPU is visible"))


def _sees_gpu() -> bool:
    """Return True if there is a GPU, after its driver has opened its files for good."""
    from ndistribute.devices import list_devices

    gpus = list_devices("gpu")
    for gpu in gpus:
        with gpu.namespace.cuda.Device(gpu.index):
            gpu.namespace.ones(1).sum().get()
    gc.collect()
    return bool(gpus)


class LeakCheck:
    """Fail a test that leaves a thread, process, file, folder or shared memory behind."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        """Remember a failure: its traceback keeps things alive, and it is reported already."""
        report = yield
        if report.failed:
            item.stash[_FAILED] = True
        return report

    @pytest.fixture(autouse=True)
    def _empty_graph(self) -> None:
        """Give each test a default graph without the operations of others."""
        if "ndistribute.graph.graph" in sys.modules:
            sys.modules["ndistribute.graph.graph"].reset_default_graph()

    @pytest.fixture(autouse=True)
    def _folders_of_estimators(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """Put the folders of estimators without model_dir below pytest's, which are cleaned."""
        if estimator := sys.modules.get("ndistribute.estimator.estimator"):
            make = functools.partial(tempfile.mkdtemp, dir=tmp_path_factory.getbasetemp())
            monkeypatch.setattr(estimator, "mkdtemp", make)

    @pytest.fixture(autouse=True)
    def _leaves_nothing_behind(self, request: pytest.FixtureRequest) -> Iterator[None]:
        before = Snapshot()
        yield
        if request.node.stash.get(_FAILED, False):
            return
        leaks = leaks_since(before)
        if leaks:
            pytest.fail("the test left behind:\n" + "\n".join(leaks), pytrace=False)
