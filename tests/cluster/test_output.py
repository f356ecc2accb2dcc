"""What ranks print: cut into lines, shown with the rank, and the part that is worth repeating."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndistribute.cluster.launcher.output import Console, Lines, last_report, tells_of_another


@given(st.text("ab\n\r", max_size=40), st.lists(st.integers(0, 40), max_size=5))
def test_lines_do_not_depend_on_how_the_bytes_arrive(text, cuts):
    data = text.encode()
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces, whole = Lines(), Lines()
    found = [line for a, b in itertools.pairwise(places) for line in pieces.feed(data[a:b])]
    assert found + pieces.close() == whole.feed(data) + whole.close()


def test_a_progress_bar_is_seen_as_it_goes_on():
    lines = Lines()
    assert lines.feed(b"10%\r20%\r") == [b"10%"]
    assert lines.feed(b"30%\r\nnext") == [b"20%", b"30%"]
    assert lines.close() == [b"next"]


def test_a_line_without_an_end_does_not_fill_the_memory():
    lines = Lines()
    assert [len(line) for line in lines.feed(b"x" * 100_000)] == [100_000]
    assert lines.close() == []


def test_a_log_holds_both_streams_without_the_rank(tmp_path):
    out, err = io.BytesIO(), io.BytesIO()
    console = Console(out, err, tmp_path / "new" / "logs")
    console.take("1", "stdout", [b"a", b"b"])
    console.take("1", "stderr", [b"c"])
    console.close()
    assert (out.getvalue(), err.getvalue()) == (b"[1] a\n[1] b\n", b"[1] c\n")
    assert (tmp_path / "new" / "logs" / "rank-1.log").read_bytes() == b"a\nb\nc\n"
    assert (console.kept("1"), console.kept("0")) == ([b"c"], [])


@pytest.mark.parametrize(("label", "name"), [("1", "rank-1"), ("ps:0", "ps-0"), ("chief", "chief")])
def test_a_log_is_named_after_its_process(tmp_path, label, name):
    for attempt, suffix in ((0, ""), (2, ".2")):
        console = Console(io.BytesIO(), io.BytesIO(), tmp_path, attempt)
        console.take(label, "stdout", [b"a"])
        console.close()
        assert (tmp_path / f"{name}{suffix}.log").is_file()


def test_a_message_of_the_launcher_is_not_taken_for_a_ranks(tmp_path):
    out, err = io.BytesIO(), io.BytesIO()
    console = Console(out, err)
    console.take("ps:0", "stderr", [b"Traceback (most recent call last):"])
    console.forget("ps:0")
    console.say("well.", [b"[0] a"])
    assert err.getvalue().endswith(b"last):\nndistribute run: well.\n[0] a\n")
    assert (out.getvalue(), console.kept("ps:0")) == (b"", [])


def errors_of(program: str) -> list[bytes]:
    """Run a program that fails, and return the lines of its standard error."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=20, check=False
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


LOST = "class WorkerLostError(Exception): pass\n"


@pytest.mark.parametrize(
    ("program", "told"),
    [
        (LOST + "raise WorkerLostError('worker 1')", True),
        (LOST + "raise OSError('x') from WorkerLostError('worker 1')", True),
        (LOST + "raise ValueError('WorkerLostError')", False),
        ("", False),
    ],
)
def test_a_report_of_a_lost_worker_is_known(program, told):
    assert tells_of_another(errors_of(program)) is told
