"""Where arrays are: values, results, gradients, input and random numbers on each replica's device.

What they hold, the contract tests compare: those of strategies, variables and optimizers run over
the same layouts of replicas on GPUs.
"""

import contextlib

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.devices import Device
from ndistribute.stream import working_on
from tests.gpu.placing import components, hosts, need, on, place_of
from tests.kinds import context, here, rank

START = np.arange(12.0).reshape(4, 3)
LARGE = 140_000  # Above the size that the last replica to arrive reduces alone.


def make(strategy, value=START, **policy):
    with strategy.scope():
        return nd.Variable(value, **policy)


def homes(strategy):
    """Return the memory space in which each replica's component belongs."""
    if isinstance(strategy, nd.ParameterServerStrategy):
        return ["cpu"]
    central = getattr(strategy, "parameter_device", None)
    return [device.memory_space for device in ([central] if central else strategy.devices)]


def last_of(strategy, array):
    """Return an array on the device of the last replica."""
    return components(strategy, lambda _: array).values[-1]


def test_every_component_is_where_it_belongs(strategy):
    for value in (START, last_of(strategy, START), lambda: START):
        variable = make(strategy, value)
        assert [place_of(array) for array in variable.values] == homes(strategy)
        for copy in [*hosts(variable.values), variable.numpy()]:
            np.testing.assert_array_equal(copy, START)


def test_what_a_replica_reads_and_receives_is_on_its_own_device(strategy):
    variable = make(strategy)
    own = make(strategy, np.zeros(3), synchronization="on_read", aggregation="sum")

    def step():
        own.assign_add(here(np.ones(3)))
        slices = nd.IndexedSlices(here(START), here(np.arange(4)), (9, 3))
        with nd.GradientTape() as tape:
            loss = np.sum(here(np.ones((2, 4))) @ variable)
        total = context().all_reduce("sum", slices)
        return {
            "variable": variable.value,
            "component": own.value,
            "expression": here(np.ones((4, 3))) * variable + variable @ here(np.ones((3, 1))),
            "gradient": tape.gradient(loss, variable),
            "total": context().all_reduce("mean", here(np.ones(LARGE))),
            "rows": total.values,
            "indices": total.indices,
            "gathered": context().all_gather(here(np.full((2, rank()), 1.0)), -1),
        }

    results = strategy.local_results(strategy.run(step))
    for result, device in zip(results, strategy.devices, strict=True):
        assert [name for name, array in result.items() if not on(array, device)] == []


def test_values_that_lie_on_any_device_come_together(strategy):
    """Outside `run`: writes, gradients and reductions of what lies on the last device."""
    variable, size = make(strategy, aggregation="sum"), strategy.num_replicas_in_sync
    last, optimizer = last_of(strategy, np.ones((4, 3))), nd.optimizers.SGD(1.0)
    variable.assign(last).assign_add(START).assign_sub(last)
    variable.scatter_add(np.array([2]), last_of(strategy, np.ones((1, 3))))
    rows = nd.IndexedSlices(last_of(strategy, np.ones((1, 3))), np.array([2]), (4, 3))
    optimizer.apply_gradients([(rows, variable)])
    for copy in hosts(variable.values):
        np.testing.assert_array_equal(copy, START)
    joined = strategy.gather(components(strategy, lambda i: np.full((i, 2), i)), axis=0)
    for total, expected in (
        (strategy.reduce("sum", components(strategy, lambda _: START)), START * size),
        (strategy.reduce("sum", last), np.full((4, 3), size)),
        (strategy.reduce("mean", components(strategy, lambda _: START), axis=0), START.mean(0)),
        (joined, np.repeat(range(size), range(size))[:, None].repeat(2, 1)),
    ):
        np.testing.assert_array_equal(*hosts([total, expected]))
    assert on(joined, strategy.devices[0])


def test_results_may_be_used_at_once_and_inputs_written_again(strategy):
    def step():
        x = here(np.ones(LARGE))
        for _ in range(3):
            x[...] = context().all_reduce("mean", x) * 2
        return x.sum()

    assert {float(total) for total in strategy.run(step).values} == {8.0 * LARGE}


def test_an_update_is_in_place_when_nobody_holds_a_read(strategy):
    if isinstance(strategy, nd.ParameterServerStrategy):
        pytest.skip("what a server updates comes from there anew")
    variable = make(strategy)

    def addresses():
        return [
            array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
            for array in variable.begin_update()
        ]

    before = addresses()
    variable.assign_add(START)
    assert addresses() == before
    held = variable.component()
    variable.assign_add(START)
    assert addresses() != before
    np.testing.assert_array_equal(hosts([held])[0], START * 2)


READS = {
    "value": lambda v: v.value,
    "read_value": lambda v: v.read_value(),
    "slice": lambda v: v[1:],
    "row": lambda v: v[0],
    "transposed": lambda v: v.T,
    "method": lambda v: v.reshape(-1),
    "function": lambda v: np.reshape(v, (2, 6)),
    "functions": lambda v: np.split(v, 2)[1],
    "iterated": lambda v: next(iter(v)),
}


@pytest.mark.parametrize("how", ["on_write", "on_read"])
def test_a_write_through_what_was_read_does_not_reach_the_variable(strategy, how):
    variable = make(strategy, synchronization=how, aggregation="only_first_replica")

    def spoil():
        for read in READS.values():
            # Refused on a CPU; a GPU has no arrays that are read-only.
            with contextlib.suppress(ValueError):
                read(variable)[...] = 9.0

    spoil()
    strategy.run(spoil)
    with contextlib.suppress(ValueError):
        variable.fill(9.0)
    with contextlib.suppress(ValueError):
        for part in (*variable.values, *strategy.local_results(variable)):
            part[...] = 9.0
    seen = strategy.run(lambda: variable + 0.0).values
    for copy in hosts([*variable.values, *seen]):
        np.testing.assert_array_equal(copy, START)


@pytest.mark.parametrize("ahead", [0, 2])
def test_each_piece_of_a_batch_is_on_its_replica_s_device(strategy, ahead):
    size = strategy.num_replicas_in_sync
    rows = np.arange(7 * size, dtype=np.float32).reshape(-1, 1)
    dataset = nd.Dataset.from_tensor_slices({"x": rows, "y": rows.astype(np.int64)})
    dataset = dataset.batch(3 * size)  # The last one leaves some replicas with an empty piece.
    dealt = strategy.distribute_datasets_from_function(
        lambda _: nd.Dataset.from_tensor_slices({"x": rows}).batch(1)
    )
    options = nd.InputOptions(prefetch=ahead)
    for batches in (strategy.distribute_dataset(dataset, options), dealt):
        seen = []
        for batch in batches:
            for leaf in batch.values():
                pieces = strategy.local_results(leaf)
                assert all(on(*pair) for pair in zip(pieces, strategy.devices, strict=True))
            seen += hosts(strategy.local_results(batch["x"]))
            assert seen[-1].dtype == np.float32
        np.testing.assert_array_equal(np.concatenate(seen), rows)


def test_elements_stay_in_host_memory_unless_an_option_places_them(strategy):
    rows = np.zeros((4 * strategy.num_replicas_in_sync, 1), np.float32)
    dataset = nd.Dataset.from_tensor_slices(rows).batch(len(rows))
    for placed in (False, True):
        options = nd.InputOptions(
            experimental_fetch_to_device=False, experimental_place_dataset_on_device=placed
        )
        (batch,) = strategy.distribute_dataset(dataset, options)
        pieces = strategy.local_results(batch)
        if placed:
            assert all(on(*pair) for pair in zip(pieces, strategy.devices, strict=True))
        else:
            assert {type(piece) for piece in pieces} == {np.ndarray}


def test_layers_take_inputs_of_the_host(strategy):
    with strategy.scope():
        layer = nd.layers.Dense(2, kernel_initializer="ones")
    outputs = strategy.local_results(strategy.run(layer, args=(np.ones((3, 4), np.float32),)))
    assert all(map(on, outputs, strategy.devices))
    np.testing.assert_array_equal(hosts(outputs), np.full((len(outputs), 3, 2), 4))


def test_text_stays_in_host_memory(strategy):
    words = np.array(["a", "b"] * strategy.num_replicas_in_sync)
    dataset = nd.Dataset.from_tensor_slices({"words": words, "x": np.zeros(len(words))})
    for batch in strategy.distribute_dataset(dataset.batch(len(words))):
        assert all(map(on, strategy.local_results(batch["x"]), strategy.devices))
        assert strategy.gather(batch["words"], axis=0).tolist() == words.tolist()


def test_replicas_draw_numbers_of_their_own_on_their_devices(strategy):
    def step():
        drawn = context().rng.random(4), context().rng.standard_normal((2, 2), dtype=np.float32)
        assert on(drawn[0], context().device)
        assert drawn[1].dtype == np.float32
        return drawn

    runs = []
    for _ in range(2):
        nd.set_seed(3)
        steps = [strategy.local_results(strategy.run(step)) for _ in range(2)]
        runs.append([hosts(own) for each in steps for own in each])
    for first, second in zip(*runs, strict=True):
        np.testing.assert_array_equal(first[0], second[0])
        np.testing.assert_array_equal(first[1], second[1])
    uniform = np.stack([own[0] for own in runs[0]])
    assert len(np.unique(uniform)) == uniform.size, "two replicas or steps drew the same numbers"


def test_what_another_device_was_given_is_done_when_it_is_left(cupy):
    need(cupy, 2)
    with working_on(Device("gpu:1")):
        there = cupy.ones(3) + 1
    with cupy.cuda.Device(1), cupy.cuda.Stream(non_blocking=True):
        assert float((there * 2).sum()) == 12.0
