"""Slurm's abbreviations, expanded as `scontrol show hostnames` does."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ndistribute.cluster.slurm import expand_hosts, expand_tasks


@st.composite
def number_sets(draw):
    """What may stand in brackets, and the numbers it stands for."""
    texts, numbers = [], []
    for _ in range(draw(st.integers(1, 3))):
        width = draw(st.integers(1, 4))
        first = draw(st.integers(0, 10**width - 1))
        last = min(first + draw(st.integers(0, 3)), 10**width - 1)
        # Slurm pads all of a range to the width in which its first number is written.
        written = [str(number).zfill(width) for number in range(first, last + 1)]
        numbers += written
        texts.append(written[0] if len(written) == 1 else f"{written[0]}-{written[-1]}")
    return "[" + ",".join(texts) + "]", numbers


WORDS = st.from_regex(r"[a-z][a-z0-9.-]{0,4}", fullmatch=True).map(lambda word: (word, [word]))
ENTRIES = st.tuples(WORDS, number_sets(), WORDS, number_sets()) | st.tuples(WORDS)


@given(st.lists(ENTRIES, min_size=1, max_size=4))
def test_a_list_expands_to_what_it_was_written_for(entries):
    text = ",".join("".join(text for text, _ in parts) for parts in entries)
    hosts = [itertools.product(*(options for _, options in parts)) for parts in entries]
    assert expand_hosts(text) == ["".join(host) for entry in hosts for host in entry]


def test_a_range_may_grow_wider_and_hosts_may_come_back():
    wide = ["n9", "n10", "n11", "n098", "n099", "n100", "a", "a"]
    assert expand_hosts("n[9-11],n[098-100],a,a") == wide


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 20)), min_size=1, max_size=6))
def test_counts_expand_to_what_they_were_written_for(runs):
    text = ",".join(str(count) if times == 1 else f"{count}(x{times})" for count, times in runs)
    assert expand_tasks(text) == [count for count, times in runs for _ in range(times)]


@pytest.mark.parametrize(
    ("expand", "message", "texts"),
    [
        (expand_hosts, "host list", " a, ,a n[1-2 n1] n[] n[2-1] n[a] n[1-] n[[1]] n[-1]"),
        # Refused before it fills the memory.
        (expand_hosts, "more than", "n[1-99999999999] n[1-999][1-999]"),
        (expand_tasks, "tasks per node", " x 2(3) 2(x) 1,,2 1(x99999999)"),
    ],
)
def test_what_is_malformed_or_too_long_is_an_error(expand, message, texts):
    for text in texts.split(" "):
        with pytest.raises(ValueError, match=message):
            expand(text)
