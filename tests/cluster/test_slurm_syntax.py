"""Slurm's abbreviations, expanded as `scontrol show hostnames` does."""

from __future__ import annotations

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


@st.composite
def entries(draw):
    """One entry of a host list, and the hosts it stands for."""
    words = st.from_regex(r"[a-z][a-z0-9.-]{0,4}", fullmatch=True)
    texts, choices = [draw(words)], []
    choices.append([texts[0]])
    for _ in range(draw(st.integers(0, 2))):
        for text, options in (draw(number_sets()), (word := draw(words | st.just("")), [word])):
            texts.append(text)
            choices.append(options)
    return "".join(texts), ["".join(parts) for parts in itertools.product(*choices)]


@given(st.lists(entries(), min_size=1, max_size=4))
def test_a_list_expands_to_what_it_was_written_for(written):
    text = ",".join(text for text, _ in written)
    assert expand_hosts(text) == [host for _, hosts in written for host in hosts]


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 20)), min_size=1, max_size=6))
def test_counts_expand_to_what_they_were_written_for(runs):
    text = ",".join(str(count) if times == 1 else f"{count}(x{times})" for count, times in runs)
    assert expand_tasks(text) == [count for count, times in runs for _ in range(times)]


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login", ["login"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("r[1-2]n[1,2]-ib", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]),
        ("a,a", ["a", "a"]),
    ],
)
def test_examples(text, hosts):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text", ["", "a,", ",a", "n[1-2", "n1]", "n[]", "n[2-1]", "n[a]", "n[1-]", "n[[1]]", "n[-1]"]
)
def test_a_malformed_list_is_an_error(text):
    with pytest.raises(ValueError, match="host list"):
        expand_hosts(text)


@pytest.mark.parametrize("text", ["n[1-99999999999]", "n[1-999][1-999]"])
def test_a_list_too_long_is_refused_before_it_fills_the_memory(text):
    with pytest.raises(ValueError, match="more than"):
        expand_hosts(text)


@pytest.mark.parametrize("text", ["", "x", "2(3)", "2(x)", "1,,2", "1(x99999999)"])
def test_malformed_counts_are_an_error(text):
    with pytest.raises(ValueError, match="tasks per node"):
        expand_tasks(text)
