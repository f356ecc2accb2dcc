"""What ranks print: cut into lines, shown with the rank, and the part that is worth repeating."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndistribute.launcher.output import Console, Writer, is_loss_report, last_report


class Memory(Writer):
    """A writer whose lines can be looked at."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.lines += [line.removeprefix(b"[0] ") for line in data.split(b"\n")[:-1]]


def shown(*pieces: bytes) -> list[list[bytes]]:
    """Return the lines that are shown after each of some pieces of a stream, and at its end."""
    out, seen = Memory(), []
    console = Console(out, out)
    for piece in (*pieces, b""):
        console.feed("0", "stdout", piece)
        seen.append(out.lines)
        out.lines = []
    return seen


@given(st.text("ab\n\r", max_size=40), st.lists(st.integers(0, 40), max_size=5))
def test_lines_do_not_depend_on_how_the_bytes_arrive(text, cuts):
    data = text.encode()
    places = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    pieces = [data[a:b] for a, b in itertools.pairwise(places)]
    assert [*itertools.chain(*shown(*pieces))] == [*itertools.chain(*shown(data))]


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        ([b"10%\r20%\r", b"30%\r\nnext"], [[b"10%"], [b"20%", b"30%"], [b"next"]]),
        ([b"50%\r"], [[], [b"50%"]]),
        # A line without an end does not fill the memory.
        ([b"x" * 100_000], [[b"x" * 100_000], []]),
    ],
)
def test_a_line_is_seen_when_it_is_complete(pieces, lines):
    assert shown(*pieces) == lines


def test_a_full_disk_is_named_once_and_hides_nothing(tmp_path):
    out, err = Memory(), Memory()
    console = Console(out, err, tmp_path)
    path = tmp_path / "rank-0.log"
    path.symlink_to("/dev/full")
    console.take("0", "stdout", [b"a"])
    console.take("0", "stdout", [b"b"])
    what = f"ndistribute run: {path} is incomplete: No space left on device. The job goes on."
    assert (out.lines, err.lines) == ([b"a", b"b"], [what.encode()])


def errors_of(program: str) -> list[bytes]:
    """Run a program that fails, and return the lines of its standard error."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=60, check=False
    )
    return done.stderr.splitlines()


@pytest.mark.parametrize(
    ("program", "first", "last", "tracebacks"),
    [
        ("raise ValueError('no')", b"Traceback", b"ValueError: no", 1),
        ("try:\n    {}[1]\nexcept KeyError:\n    1 / 0", b"Traceback", b"ZeroDivisionError", 2),
        (
            "try:\n    {}[1]\nexcept KeyError as e:\n    raise OSError from e",
            b"Traceback",
            b"OSError",
            2,
        ),
        ("raise OSError('a') from KeyError('b')", b"KeyError: 'b'", b"OSError: a", 1),
        ("raise OSError('a') from TypeError('b\\n\\nc')", b"c", b"OSError: a", 1),
        ("raise ExceptionGroup('g', [OSError('x'), KeyError('y')])", b"  + Exception", b"    +", 1),
        ("import sys; sys.exit('sorry')", b"loading", b"sorry", 0),
    ],
)
def test_the_last_report_is_whole_and_without_what_was_said_before(
    program, first, last, tracebacks
):
    noise = "import sys; print('loading', file=sys.stderr)\n"
    caught = "import traceback\ntry:\n    raise RuntimeError\nexcept RuntimeError:\n    print()\n"
    report = last_report(errors_of(noise + caught + program))
    assert report[0].startswith(first)
    assert report[-1].startswith(last)
    assert sum(b"Traceback" in line for line in report) == tracebacks


def test_a_long_report_is_cut_in_its_middle():
    report = last_report(
        [b"Traceback (most recent call last):", *[b"  line"] * 500, b"Error: x"], 10
    )
    assert report[0].startswith(b"Traceback")
    assert report[-1] == b"Error: x"
    assert b"..." in report


LOST = "class WorkerLostError(Exception): pass\nraise "


@pytest.mark.parametrize(
    ("program", "told"),
    [
        (LOST + "WorkerLostError('worker 1')", True),
        (LOST + "OSError('x') from WorkerLostError('worker 1')", True),
        (LOST + "ValueError('WorkerLostError')", False),
        ("", False),
    ],
)
def test_a_report_of_a_lost_worker_is_known(program, told):
    assert is_loss_report(errors_of(program)) is told
