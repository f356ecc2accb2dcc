"""The processes that tests start are ended, and nobody else's."""

from __future__ import annotations

import subprocess
import sys

from tests.processes import Ranks


def test_a_stranger_with_the_number_of_a_process_that_has_ended_lives_on() -> None:
    """Numbers come back within a run of all tests, and processes were killed by theirs."""
    command = [sys.executable, "-c", "input()"]
    with Ranks(1) as ranks, subprocess.Popen(command, stdin=subprocess.PIPE) as stranger:
        ranks.kill()
        ranks.pids[0] = stranger.pid
        ranks.kill()
        stranger.communicate(b"\n", timeout=30)
    assert stranger.returncode == 0
