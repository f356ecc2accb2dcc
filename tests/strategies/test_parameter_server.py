"""Training on parameter servers gives what one device gives, alone and together."""

import contextlib
import dataclasses
import functools
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import ndistribute as nd
from ndistribute.optimizers import SGD, Adam, Optimizer
from ndistribute.parameter_server.client import closure
from ndistribute.update_rules import Rule
from tests.kinds import DEADLINE, closing, in_thread
from tests.strategies.on_servers import holders, served, worker_of, workers

RNG = np.random.default_rng(2)
TABLE, WEIGHTS, BIAS = RNG.normal(size=(7, 4)), RNG.normal(size=(4, 3)), np.zeros(3)
ROWS = RNG.integers(0, 7, size=(5, 12))
WANTED = RNG.normal(size=(5, 12, 3))
STEPS = 5


class Model:
    """A look-up of rows, a product and a bias, so that gradients are both rows and dense."""

    def __init__(self, strategy: nd.Strategy, optimizer: Optimizer, batch: int = 12) -> None:
        self.strategy, self.optimizer, self.batch = strategy, optimizer, batch
        with strategy.scope():
            self.variables = [nd.Variable(value) for value in (TABLE, WEIGHTS, BIAS)]

    def step(self, rows: Any, wanted: Any) -> None:
        table, weights, bias = self.variables
        with nd.GradientTape() as tape:
            loss = np.sum((table[rows] @ weights + bias - wanted) ** 2) / self.batch
        self.optimizer.minimize(loss, self.variables, tape)

    def train(self, parts: slice = slice(None)) -> list[Any]:
        size = len(self.strategy.devices)
        for number in range(STEPS):
            rows, wanted = ROWS[number][parts], WANTED[number][parts]
            cut = [nd.PerReplica(np.split(array, size)) for array in (rows, wanted)]
            self.strategy.run(self.step, args=cut)
        return [variable.numpy() for variable in self.variables]


def expected(optimizer: Optimizer) -> list[Any]:
    with nd.OneDeviceStrategy("cpu:0") as one:
        return Model(one, optimizer).train()


SHARDS = nd.partitioners.FixedShardsPartitioner


def test_workers_in_step_give_what_one_device_gives_for_the_joined_batch() -> None:
    wanted = expected(Adam(0.1))
    options = {"replicas_to_aggregate": 2, "variable_partitioner": SHARDS(2)}
    with workers(2, 2, **options) as strategies, ThreadPoolExecutor(2) as pool:

        def train(index: int) -> list[Any]:
            optimizer = Adam(0.1, name="same")
            model = Model(strategies[index], optimizer, batch=6)
            return model.train(slice(6 * index, 6 * index + 6))

        trained = list(pool.map(train, range(2)))
        assert [strategy.staleness() for strategy in strategies] == [{0: STEPS}] * 2
    for values in trained:
        for value, other in zip(values, wanted, strict=True):
            np.testing.assert_allclose(value, other, rtol=1e-12, atol=1e-14)


def zero_in(strategy: nd.Strategy) -> nd.Variable:
    with strategy.scope():
        return nd.Variable(0.0)


def test_late_gradients_of_spare_workers_are_dropped() -> None:
    options = {"replicas_to_aggregate": 2, "total_num_replicas": 3}
    with workers(3, **options) as strategies, ThreadPoolExecutor(2) as pool:
        variables = list(map(zero_in, strategies))
        optimizers = [SGD(1.0, name="same") for _ in strategies]

        def push(index: int, gradient: float) -> None:
            optimizers[index].apply_gradients([(gradient, variables[index])])

        for step in range(3):
            first = pool.submit(push, 0, 1.0)
            push(1, 3.0)
            first.result(DEADLINE)
            assert float(variables[2]) == -2.0 * (step + 1)
        push(2, 100.0)  # It does not wait: the step was made long ago.
        assert float(variables[0]) == -6.0
        assert strategies[2].staleness() == {1: 1}


def test_nobody_is_further_ahead_than_asked() -> None:
    slack, steps = 2, 12
    done, lead, ahead = [0, 0], [], threading.Event()
    with workers(2, 2, max_staleness=slack) as strategies, ThreadPoolExecutor(2) as pool:

        def train(index: int) -> None:
            variable, optimizer = zero_in(strategies[index]), SGD(1.0, name="same")
            for _ in range(steps):
                optimizer.apply_gradients([(1.0, variable)])
                done[index] += 1
                lead.append(done[0] - done[1])
                if done[0] == slack:
                    ahead.set()
                if index == 1:  # The first worker can go ahead while this one stays.
                    assert ahead.wait(DEADLINE)

        list(pool.map(train, range(2)))
    assert max(map(abs, lead)) <= slack + 1


def test_each_worker_gets_its_share_of_the_batches() -> None:
    batches = nd.Dataset.range(10).batch(2)
    with holders(1) as held:
        for index in range(2):
            with worker_of(held, index, 2, replicas=2) as strategy:
                steps = [
                    [part.tolist() for part in step.values]
                    for step in strategy.distribute_dataset(batches)
                ]
                assert steps == [[[2 * i], [2 * i + 1]] for i in range(index, 5, 2)]
                seen: list[nd.InputContext] = []
                strategy.distribute_datasets_from_function(
                    lambda context, seen=seen: seen.append(context) or batches
                )
                (context,) = seen
                assert (context.num_input_pipelines, context.input_pipeline_id) == (2, index)
                assert context.get_per_replica_batch_size(8) == 4


def test_the_chief_is_the_job_of_that_name_else_worker_0() -> None:
    for job, index, chief, leads in (
        ("worker", 0, False, True),
        ("worker", 1, False, False),
        ("chief", 0, True, True),
        ("worker", 0, True, False),
    ):
        with holders(1) as held, worker_of(held, index, 2, job=job, chief=chief) as strategy:
            assert strategy.is_chief is leads


def test_metrics_of_workers_with_a_chief_add_up() -> None:
    with holders(1) as held:
        chief = worker_of(held, 0, 2, chief=True, job="chief")
        workers = [worker_of(held, i, 2, chief=True) for i in range(2)]
        totals = []
        for strategy in (chief, *workers):
            with strategy.scope():
                totals.append(nd.Variable(0.0, synchronization="on_read", aggregation="sum"))
                with pytest.raises(ValueError, match="Keep a sum and a count"):
                    nd.Variable(0.0, synchronization="on_read", aggregation="mean")
        for strategy, total in zip(workers, totals[1:], strict=True):
            strategy.run(lambda total=total: total.assign_add(2.0))
        assert float(totals[0]) == 4.0
        for strategy in (chief, *workers):
            strategy.close()


def test_what_was_deleted_disturbs_neither_later_steps_nor_the_end() -> None:
    with served() as strategy:
        with strategy.scope():
            kept, gone = nd.Variable([1.0]), nd.Variable([2.0])
        assert strategy.run(lambda: kept + gone).values[0].tolist() == [3.0]
        strategy.delete([gone])
        for _ in range(2):
            assert strategy.run(lambda: kept + 0.0).values[0].tolist() == [1.0]
        with pytest.raises(nd.errors.DistributeError, match="no variable"):
            strategy.run(lambda: gone + 0.0)
    alone = nd.ParameterServerStrategy()
    with alone.scope():
        variables = [nd.Variable([1.0]), nd.Variable([2.0])]
    alone.delete(variables[:1])
    alone.close()
    assert variables[1].numpy().tolist() == [2.0]


def test_servers_apply_an_own_rule_and_what_it_changed_before_it_raised_is_read() -> None:
    @dataclasses.dataclass(frozen=True)
    class Choosy(Rule):
        name = "choosy"
        scale: float = 1

        def update(self, variable: Any, gradient: Any, slots: Any, rate: float) -> None:
            if gradient[0] < 0:
                raise ArithmeticError("not down")
            variable -= self.scale * rate * gradient

    here = nd.Variable([1.0], name="here")
    with served() as strategy:
        with strategy.scope():
            variables = [nd.Variable([1.0]), nd.Variable([1.0])]
        assert [float(variable[0]) for variable in variables] == [1.0, 1.0]
        pairs = zip([np.array([1.0]), np.array([-1.0])], variables, strict=True)
        with pytest.raises(Exception, match="not down"):
            Optimizer(Choosy(2.0), 0.25).apply_gradients(pairs)
        assert [float(variable[0]) for variable in variables] == [0.5, 1.0]
        with pytest.raises(ValueError, match="'here' are not"):
            SGD().apply_gradients([([1.0], variables[0]), ([1.0], here)])


def test_an_optimizer_that_was_pickled_goes_on() -> None:
    with served(2) as strategy:
        with strategy.scope():
            variables = [nd.Variable([1.0]), nd.Variable([2.0])]
        optimizer = Adam(0.1)
        gradients = [np.array([1.0]), np.array([-1.0])]
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        again, theirs = pickle.loads(pickle.dumps((optimizer, variables)))
        assert theirs[0] is variables[0]
        again.apply_gradients(zip(gradients, theirs, strict=True))
        assert again.iterations == optimizer.iterations == 2
        assert list(map(id, again.variables)) == list(map(id, optimizer.variables))
        strategy.close()
        with pytest.raises(nd.DistributeError):  # At once.
            again.apply_gradients(zip(gradients, theirs, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"total_num_replicas": 2}, "needs replicas_to_aggregate"),
        ({"replicas_to_aggregate": 3}, "number of workers in the cluster, 2"),
        ({"replicas_to_aggregate": 1, "max_staleness": 1}, "not both"),
        ({"max_staleness": -1}, "0 or more"),
        ({"max_staleness": 1, "chief": True}, "remove the chief"),
        ({"timeout_seconds": 0}, "above 0"),
        ({"job": "ps"}, "is a parameter server"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], message: str) -> None:
    with holders(1) as held, pytest.raises(ValueError, match=message):
        worker_of(held, 0, 2, **options)


def test_a_cluster_without_servers_is_refused() -> None:
    resolver = nd.SimpleClusterResolver({"worker": ["a:1"]}, task_type="worker", task_id=0)
    with pytest.raises(ValueError, match="no parameter server"):
        nd.ParameterServerStrategy(resolver)


Pusher = tuple[nd.Strategy, functools.partial[None]]


@contextlib.contextmanager
def two_workers(**options: Any) -> Iterator[list[Pusher]]:
    """Two workers of one server, each with a function that pushes a gradient of 1."""
    with workers(2, **options) as strategies:
        made = []
        for strategy in strategies:
            optimizer, pairs = SGD(1.0, name="same"), [(1.0, zero_in(strategy))]
            made.append((strategy, functools.partial(optimizer.apply_gradients, pairs)))
        yield made


def both(made: list[Pusher]) -> None:
    with in_thread(made[1][1]) as other:
        made[0][1]()
        other.result(DEADLINE)


def test_workers_in_step_notice_who_leaves_and_workers_within_bounds_go_on() -> None:
    with two_workers(replicas_to_aggregate=2) as made:
        both(made)
        with in_thread(made[0][1]) as waiting:
            made[1][0].close()
            with pytest.raises(nd.WorkerLostError):
                waiting.result(DEADLINE)
    with two_workers(max_staleness=0) as made:
        both(made)
        with in_thread(made[0][1]) as waiting:
            made[1][0].close()
            waiting.result(DEADLINE)
        made[0][1]()
        (((_, variable),),) = made[0][1].args
        assert float(variable) == -4.0


def test_nobody_waits_for_ever() -> None:
    for options in ({"replicas_to_aggregate": 2}, {"max_staleness": 0}):
        with (
            two_workers(timeout_seconds=0.2, **options) as made,
            pytest.raises(nd.CollectiveTimeoutError, match="waited for"),
        ):
            made[0][1]()


def test_an_evaluator_reads_and_is_in_nobodys_count() -> None:
    with holders(1) as held, closing(worker_of(held, replicas_to_aggregate=1)) as trainer:
        with trainer.scope():
            weights, optimizer = nd.Variable(0.0), SGD(1.0)
        with closing(worker_of(held, job="evaluator")) as evaluator:
            assert evaluator.is_chief
            with evaluator.scope():
                seen = nd.Variable(0.0)
            for step in range(1, 4):
                optimizer.apply_gradients([(1.0, weights)])
                assert evaluator.run(lambda: float(seen)).values == (-step,)
            batches = nd.Dataset.range(4).batch(2)
            assert evaluator.distribute_dataset(batches).cardinality() == 2


def test_optimizers_are_named_in_the_order_of_their_making() -> None:
    first, second = (SGD().name.removeprefix("sgd").removeprefix("_") or "0" for _ in range(2))
    assert int(second) == int(first) + 1
    assert Adam(name="mine").name == "mine"


def test_a_closure_that_runs_again_trains_once() -> None:
    with served(2, replicas=2) as strategy:
        optimizer = Adam(lambda step: 0.1 / (1 + step))
        model = Model(strategy, optimizer)
        for number, attempt in ((1, 1), (1, 2), (2, 1)):
            with closure("chief", number) as running:
                if attempt > 1:
                    running.begin_again(attempt, strategy)
                strategy.run(model.step, args=(ROWS[0], WANTED[0]))
        assert optimizer.iterations == 2


RUNNING, DONE = threading.Event(), threading.Event()


def hold_and_fail() -> None:
    RUNNING.set()
    assert DONE.wait(timeout=DEADLINE)
    raise ValueError("held")


def test_the_chief_is_not_part_of_what_its_own_process_runs() -> None:
    pytest.importorskip("cloudpickle")
    with nd.ParameterServerStrategy() as strategy, nd.ClusterCoordinator(strategy) as coordinator:
        with strategy.scope():
            number = nd.Variable(0.0)
        coordinator.schedule(hold_and_fail)
        try:
            assert RUNNING.wait(timeout=DEADLINE)
            number.assign_add(1.0)
            with strategy.scope():
                assert float(nd.Variable(2.0)) == 2.0
        finally:
            DONE.set()
        with pytest.raises(ValueError, match="held"):
            coordinator.join(DEADLINE)
        assert float(number) == 1.0


def test_a_closure_may_make_more_changes_than_one_message_takes(monkeypatch: Any) -> None:
    monkeypatch.setattr("ndistribute.parameter_server.client._BUFFERED_CHANGES", 400)
    with served(2) as strategy:
        with strategy.scope():
            numbers = [nd.Variable(0.0, name="n" * 4000 + str(index)) for index in range(2)]
        with closure("chief", 1):
            for _ in range(300):
                for number in numbers:
                    number.assign_add(1.0)
        assert [float(number) for number in numbers] == [300.0, 300.0]
