"""Processes that have torchrun's variables find each other; so do those that torchrun starts."""

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.jobs.launched import environment
from tests.processes import python_says

SCRIPT = """
import ndistribute as nd
with nd.MultiWorkerMirroredStrategy() as strategy:
    ones = strategy.run(lambda: 1.0)
    found = type(strategy.cluster_resolver).__name__
    print(f"{found} {float(strategy.reduce('SUM', ones))}\\n", end="")  # In one piece.
"""
SAYS = "TorchrunClusterResolver 2.0"
SEVERAL_HOSTS = {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


@contextlib.contextmanager
def ranks(port: int, numbers=(0, 1), **environ: str):
    """Start processes as torchrun does; kill those that do not end."""
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env=environment({**shared, "MASTER_PORT": str(port), **environ, "RANK": str(rank)}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in numbers
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def outputs(processes) -> list[str]:
    return [process.communicate(timeout=110)[0].strip() for process in processes]


@pytest.fixture
def port() -> Iterator[int]:
    """The port of torchrun's own store; nobody else is given the next one."""
    with contextlib.ExitStack() as opened:
        for _ in range(100):
            store = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
            number = store.getsockname()[1]
            kept = opened.enter_context(socket.socket())
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                kept.bind(("", number + 1))
                break
        yield number


@pytest.mark.parametrize("hosts", ["one", "several"])
def test_processes_with_the_variables_of_torchrun_find_each_other(port, hosts):
    """On several hosts by the address of rank 0 alone, which is not loopback."""
    environ = {}
    if hosts == "several":
        address = socket.gethostbyname(socket.gethostname())
        environ = {**SEVERAL_HOSTS, "MASTER_ADDR": address, "NDISTRIBUTE_SECRET": "horse" * 7}
    with ranks(port, **environ) as processes:
        assert outputs(processes) == [SAYS, SAYS]


def test_a_stranger_is_told_no_address_and_keeps_nobody_from_meeting(port):
    ours, theirs = ({**SEVERAL_HOSTS, "NDISTRIBUTE_SECRET": 32 * name} for name in "AB")
    with ranks(port, [0], **ours) as first, ranks(port, [1], **theirs) as stranger:
        (said,) = outputs(stranger)
        assert "has another secret" in said
        with ranks(port, [1], **ours) as second:
            assert all(output.endswith(SAYS) for output in outputs([*first, *second]))


def test_a_port_that_is_taken_is_an_error_that_names_the_option(port):
    with ranks(port - 1, [0]) as processes:
        (output,) = outputs(processes)
    assert "Another program has this port" in output
    assert "torchrun's --master-port" in output


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torchrun is not installed")
def test_a_script_runs_unchanged_under_torchrun(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = "-m", "torch.distributed.run", "--nproc-per-node", "2", script
    said = python_says(*command, env=environment({"TMPDIR": os.fspath(tmp_path)}))
    assert said.splitlines() == [SAYS, SAYS]
