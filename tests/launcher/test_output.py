"""What ranks print: cut into lines, shown with the rank, and the part that is worth repeating."""

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
    what = f"ndistribute run: {path} is incomplete: No space left on device. The job continues."
    assert (out.lines, err.lines) == ([b"a", b"b"], [what.encode()])


def test_a_traceback_that_another_rank_has_printed_is_printed_in_one_line():
    frames = [b"Traceback (most recent call last):", b'  File "a.py", line 1', b"    f()"]
    note, err = b"raised in replica %d of 3 (cpu:0)", Memory()
    console = Console(Memory(), err)
    console.short = True
    console.take("1", "stderr", frames)
    for rank in (1, 0, 2):
        lines = [*frames[3 * (rank == 1) :], b"ValueError: x", note % rank, b"end"]
        console.feed(str(rank), "stderr", b"".join(b"%b\n" % line for line in lines))
        assert console.kept(str(rank)) == [*frames, *lines[-3:]]
    once = [[b"[%d] ValueError: x (as rank 1)" % rank, b"[%d] end" % rank] for rank in (0, 2)]
    whole = [*frames, b"ValueError: x", note % 1, b"end"]
    shown = [*(b"[1] " + line for line in whole), *once[0], *once[1]]
    assert err.lines == [line.removeprefix(b"[0] ") for line in shown]


def test_a_traceback_that_never_ends_is_printed_at_the_end_of_its_stream():
    err = Memory()
    console = Console(Memory(), err)
    console.short = True
    console.feed("0", "stderr", b"Traceback (most recent call last):\n  File\n")
    assert err.lines == []
    console.feed("0", "stderr", b"")
    assert err.lines == [b"Traceback (most recent call last):", b"  File"]


NOISE = """
import sys
print("loading", file=sys.stderr)
class WorkerLostError(Exception): pass
"""


@pytest.mark.parametrize(
    ("program", "first", "last", "tracebacks", "is_loss"),
    [
        ("raise ValueError('no')", b"Traceback", b"ValueError: no", 1, False),
        ("try: {}[1]\nexcept KeyError: 1 / 0", b"Traceback", b"ZeroDivisionError", 2, False),
        ("try: {}[1]\nexcept KeyError as e: raise OSError from e", b"Tr", b"OSError", 2, False),
        ("raise OSError('a') from KeyError('b')", b"KeyError: 'b'", b"OSError: a", 1, False),
        ("raise OSError('a') from TypeError('b\\n\\nc')", b"c", b"OSError: a", 1, False),
        ("raise ExceptionGroup('', [OSError(), KeyError()])", b"  + Exception", b"   ", 1, False),
        ("raise WorkerLostError('w')", b"Traceback", b"WorkerLostError: w", 1, True),
        ("raise OSError from WorkerLostError('w')", b"WorkerLost", b"OSError", 1, True),
        ("raise OSError('WorkerLostError')", b"Traceback", b"OSError: WorkerLost", 1, False),
    ],
)
def test_the_last_report_is_whole_and_without_what_was_said_before(
    program, first, last, tracebacks, is_loss
):
    command = [sys.executable, "-c", NOISE + program]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    lines = done.stderr.splitlines()
    report = last_report(lines)
    assert report[0].startswith(first)
    assert report[-1].startswith(last)
    assert sum(b"Traceback" in line for line in report) == tracebacks
    assert is_loss_report(lines) is is_loss


def test_without_a_traceback_the_report_is_the_last_lines_and_a_long_one_is_cut():
    assert last_report([b"loading", b"sorry"]) == [b"loading", b"sorry"]
    assert not is_loss_report([])
    lines = [b"Traceback (most recent call last):", *[b"  line"] * 500, b"Error: x"]
    report = last_report(lines, 10)
    assert (report[0], report[5], report[-1]) == (lines[0], b"...", b"Error: x")
