"""The backends between processes, over sockets, MPI and shared memory: values and mismatches."""

import pytest

from tests.jobs import backend_calls
from tests.processes import Ranks, find_mpiexec

# One dtype that is added in a wider one, one that is not, and one whose sum is a maximum.
DTYPES = ("float16", "bfloat16", "int32", "bool")
WIRES = [("tcp", 2), ("tcp", 3), ("mpi", 2), ("shared", 2), ("shared", 3)]


@pytest.fixture(scope="module", params=WIRES, ids=lambda wire: f"{wire[0]}-{wire[1]}")
def ranks(request):
    wire, size = request.param
    if wire == "mpi":
        pytest.importorskip("mpi4py")
        if find_mpiexec() is None:
            pytest.skip("no mpiexec is installed")
    environ = {"CALLS_MEET": wire}
    with Ranks(size, "mpi" if wire == "mpi" else "tcp", environ) as ranks:
        yield ranks


over_rings = pytest.mark.parametrize("ranks", [("tcp", 3), ("mpi", 2)], ids=str, indirect=True)


def test_every_op_of_every_size_is_right_and_equal_on_all_ranks(ranks):
    pytest.importorskip("ml_dtypes")
    for dtype in DTYPES:
        assert len(set(ranks.results(backend_calls.every_op_and_size, dtype))) == 1


def test_leaves_of_many_sizes_and_dtypes_travel_together(ranks):
    assert len(set(ranks.results(backend_calls.many_leaves, 0, None))) == 1


def test_no_array_outlives_its_call(ranks):
    ranks.results(backend_calls.arrays_let_go)


def test_rows_are_gathered_in_rank_order(ranks):
    for shapes in (
        [((2, 2, 2), 3, "float32")],
        [((0, 1, 7), 1, "int64"), ((300_000, 0, 5), 4, "float16"), ((1, 0, 0), 0, "bool")],
        [((0, 0, 0), 2, "float64")],
        [],
    ):
        ranks.results(backend_calls.gathered, shapes)


def test_every_rank_can_broadcast(ranks):
    ranks.results(backend_calls.copied_from_each)


def test_some_of_the_processes_form_a_group_whose_errors_name_all_by_their_rank(ranks):
    last = ranks.size - 1
    said = ranks.results(backend_calls.among_some, (0, last))
    assert f"worker {last} called all_reduce(SUM, {5 + last} elements" in said[0]
    assert "worker 0 called all_reduce(SUM, 5 elements" in said[last]
    recover(ranks)


def recover(ranks):
    sums = ranks.results(backend_calls.recovered_sum)
    assert sums == [sum(range(ranks.size))] * ranks.size


def test_who_fails_in_an_update_is_named_to_the_others(ranks):
    failing = ranks.size - 1
    outcomes = ranks.run(backend_calls.failing_update, failing)
    assert outcomes[failing].error == "ValueError"
    for outcome in outcomes[:failing]:
        assert outcome.error == "WorkerLostError"
        assert f"worker {failing} failed: ValueError: no room" in outcome.text
    recover(ranks)


@over_rings
@pytest.mark.parametrize(
    ("bytes_per_pack", "wire_dtype"), [(1, None), (100_000, None), (5000, "float16")]
)
def test_leaves_share_buckets_of_any_size(ranks, bytes_per_pack, wire_dtype):
    assert len(set(ranks.results(backend_calls.many_leaves, bytes_per_pack, wire_dtype))) == 1


@over_rings
@pytest.mark.parametrize(
    ("wire_dtype", "least", "most"),
    [(None, 0.0, 1e-6), ("float16", 1e-6, 2e-3), ("bfloat16", 1e-6, 2e-2)],
)
def test_sums_have_the_same_bits_on_all_ranks_and_in_every_run_compressed_or_not(
    ranks, wire_dtype, least, most
):
    (_, error), *others = outcomes = ranks.results(backend_calls.noisy_sums, wire_dtype)
    assert others == outcomes[:1] * (ranks.size - 1)
    assert least < error < most


@over_rings
def test_float64_is_never_compressed(ranks):
    ranks.results(backend_calls.doubles_beside_a_wire_dtype)


@over_rings
def test_small_arrays_are_summed_in_rank_order(ranks):
    ranks.results(backend_calls.sums_in_rank_order)
