"""What holds for the local strategies holds with the replicas spread over processes.

The contract tests of strategies and variables, and those of equivalence, run inside real workers,
over each way in which these can meet; `tests/kinds.py` offers them strategies of all workers there.
"""

import contextlib
import importlib.util
import io
import os
import sys
import tempfile
from dataclasses import dataclass, field

import pytest

from ndistribute.devices import list_devices
from tests.kinds import worker_ground, worker_kinds
from tests.processes import ROOT, Ranks, find_mpiexec

SECONDS = 300
STRATEGIES, VARIABLES, OPTIMIZERS = "tests/strategies", "tests/variables", "tests/optimizers"
EQUIVALENCE = "tests/test_equivalence.py"
MODELS = "tests/models"


@dataclass(frozen=True)
class Meeting:
    """How workers meet."""

    kinds: str  # The implementation, and layouts of devices on the workers; see `worker_kinds`.
    hosts: str  # A letter for each worker: equal ones share memory.
    wire: str = "tcp"  # How they are started.
    gpus: str = ""  # "imitated" or "real" if the replicas are on GPUs.


MEETINGS = {
    "shared memory": Meeting("auto 1,1 2,2 2,1", "aa"),
    "ring": Meeting("ring 1,1,1 2,1,1", "aaa"),
    "hosts": Meeting("auto 1,1,1 1,2,1", "aba"),
    "mpi": Meeting("mpi 1,1 1,2", "aa", "mpi"),
    "nccl": Meeting("nccl 1,1,1 2,1,1", "aab", gpus="imitated"),
    "nccl over mpi": Meeting("nccl 1,1", "aa", "mpi", gpus="imitated"),
}
if len(list_devices("gpu")) > 1:
    MEETINGS["nccl between real GPUs"] = Meeting("nccl 1,1", "aa", gpus="real")

# All of it over shared memory; over the others what moves data in each way there is, and failures.
# The arithmetic is compared, and replicas diverge, for every layout, the rest is for the one that
# has all levels; over the others with the optimizers that ask for different calls. Before a
# release, CONTRACT_LAYOUTS=all takes all.
ALL_LAYOUTS = os.environ.get("CONTRACT_LAYOUTS") == "all"
FAILING = [f"{STRATEGIES}/test_{name}.py" for name in ("faults", "mismatch", "divergence")]
COLLECTIVES = f"{STRATEGIES}/test_collectives.py"
AGREEMENT = f"{STRATEGIES}/test_agreement.py"
WRITING = [f"{VARIABLES}/test_on_write.py", f"{VARIABLES}/test_scatter.py"]
MOVING = [COLLECTIVES, AGREEMENT, *WRITING]


OPTIMIZERS_OF_OTHERS = "sgd or adam or accumulation or global_clipnorm"


def only(layout, optimizers="equivalence"):
    chosen = f"({layout} or test_divergence) and not test_equivalence or test_equivalence and "
    chosen += f"(not test_steps or {optimizers})"
    return [EQUIVALENCE, *([] if ALL_LAYOUTS else ["-k", chosen])]


SUITES = {
    "shared memory": [STRATEGIES, VARIABLES, OPTIMIZERS, MODELS, *only("auto-2-1")],
    "ring": [*FAILING, *MOVING, *only("ring-2", OPTIMIZERS_OF_OTHERS)],
    "hosts": [*FAILING, *MOVING, *only("auto-1-2", OPTIMIZERS_OF_OTHERS)],
    "mpi": [*FAILING, *MOVING, *only("mpi-1-2", OPTIMIZERS_OF_OTHERS)],
    # What fails there, tests/gpu/test_nccl_workers.py has.
    "nccl": [COLLECTIVES, *only("nccl-2-1-1", OPTIMIZERS_OF_OTHERS)],
    "nccl over mpi": [COLLECTIVES],
    "nccl between real GPUs": [COLLECTIVES, *only("nccl-1-1", OPTIMIZERS_OF_OTHERS)],
}
# What needs GPUs has their mark, where they are.
CASES = [
    pytest.param(name, suite, marks=[pytest.mark.gpu] * (MEETINGS[name].gpus == "real"), id=name)
    for name, suite in SUITES.items()
    if name in MEETINGS
]


@pytest.fixture(scope="module")
def workers(request):
    meeting = MEETINGS[request.param]
    if meeting.wire == "mpi" and not (importlib.util.find_spec("mpi4py") and find_mpiexec()):
        pytest.skip("needs mpi4py and mpiexec: pip install 'ndistribute[mpi]'")
    # The seed of property tests is fixed, so that all workers draw the same examples.
    environ = {"CONTRACT_KINDS": meeting.kinds, "CI": "1"}
    if meeting.gpus:
        environ["CONTRACT_GPUS"] = meeting.gpus
    each = [{**environ, "NDISTRIBUTE_HOST_ID": host} for host in meeting.hosts]
    with Ranks(len(each), meeting.wire, each) as ranks:
        yield ranks


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 20)
@pytest.mark.parametrize(("workers", "suite"), CASES, indirect=["workers"])
def test_the_contracts_hold(workers, suite):
    seen = [outcome.result() for outcome in workers.run(run_pytest, suite, timeout=SECONDS)]
    failures = [
        f"worker {rank}: {name}\n{text}"
        for rank, one in enumerate(seen)
        for name, text in one.failures.items()
    ]
    assert not failures, "\n\n".join(failures[:10])
    assert [one.code for one in seen] == [0] * len(seen), seen[0].output
    assert all(one.passed == seen[0].passed for one in seen), "not the same tests on all workers"
    assert len(seen[0].passed) > 9


@dataclass
class Lockstep:
    """What one worker's pytest did."""

    code: int = -1
    passed: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    output: str = ""


class _Recorder:
    """Keep the tests that run over the workers' strategies, and what becomes of them."""

    def __init__(self):
        self.seen = Lockstep()

    def pytest_collection_modifyitems(self, items):
        # What makes its strategies itself makes local ones, which need no workers.
        wanted = {"strategy", "several"}
        items[:] = [item for item in items if wanted & set(getattr(item, "fixturenames", ()))]

    def pytest_runtest_logstart(self):
        # A test that failed leaves its exception behind, and good-byes would speak of it.
        for name in ("last_value", "last_exc"):
            sys.__dict__.pop(name, None)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.seen.failures[f"{report.nodeid} ({report.when})"] = report.longreprtext[-3000:]
        elif report.passed and report.when == "call":
            self.seen.passed.append(report.nodeid)

    def pytest_collectreport(self, report):
        if report.failed:
            self.seen.failures[report.nodeid] = report.longreprtext[-3000:]


def run_pytest(rank, size, arguments):
    with worker_ground():
        return run_contract_tests(arguments)


def run_contract_tests(arguments):
    """Run tests on this worker, while the others run the same in the same order.

    Each test joins the workers anew, so that one which fails on some of them does not lead the
    next ones astray: they meet again where the strategy is made.
    """
    recorder = _Recorder()
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-o", "timeout=60"]
    os.chdir(ROOT)
    # A folder of its own: other runs of pytest tidy the common one up.
    folder = tempfile.TemporaryDirectory(prefix="pytest-")
    options.append(f"--basetemp={folder.name}")
    # What a process keeps for life, such as MPI's own memory, is no leak of the first test.
    next(iter(worker_kinds().values()))().close()
    with folder, contextlib.redirect_stdout(io.StringIO()) as output:
        plugins = [recorder]
        recorder.seen.code = int(pytest.main([*options, *arguments], plugins=plugins))
    recorder.seen.output = output.getvalue()[-3000:]
    return recorder.seen
